"""How fast the model is on this machine, for fleets that are started here and whose planner has to know."""

from __future__ import annotations

from pathlib import Path

import orjson

from engine.profiling import profile_model
from prfaas_net.cli.models import load_engine

__all__ = ["write_quick_profile"]

# A few seconds on the demo model: enough to tell a long prompt from a short one, and a batch from nothing.
LENGTHS, BATCHES, ROUNDS = (128, 512, 1024), (1, 4), 1


def write_quick_profile(model: str | None, path: Path) -> Path:
    """What ``python -m engine profile`` would measure, in less time. Returns ``path``.

    Raises:
        ConfigError: the directory is not a checkpoint that the engine can run.
    """
    engine = load_engine(model)
    lengths = [n for n in LENGTHS if n < engine.max_model_tokens]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(profile_model(engine, lengths, BATCHES, ROUNDS)))
    return path
