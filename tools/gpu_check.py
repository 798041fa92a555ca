"""Check the engine on a GPU, in under six minutes: right on every family, how fast, and what the copies cost.

    python -m tools.gpu_check [--output FILE] [--backend numpy] [--quick]

1. Every family of the tests' references, on CuPy: logits to 2e-3, every greedy token.
2. Prefill tokens/s by length, and decode tokens/s by batch, on a mid-size random model.
3. How much of the copying to the host is hidden behind computing: the same prefill with copies that run beside
   it, with copies that are waited for, and without copies.

The report is JSON. Exit status: 0 if every family agrees, 1 if not, 2 if it could not be run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend import Backend, load_backend
from engine.bench.models import write_model
from engine.checkpoint import load_checkpoint
from engine.engine import Engine
from engine.oracle import load_oracle
from engine.sampling import Greedy
from engine.verify import verify
from prfaas_net.errors import PrfaasError
from prfaas_net.kv import RegionMap
from tests.engine.checkpoints import RECIPES, write_checkpoint

BUDGET_S = 330.0
FIXTURES = Path("tests/engine/fixtures")
MID_SIZE = {"hidden_size": 1536, "intermediate_size": 4608}
LENGTHS, BATCHES = (1024, 4096, 16384), (1, 4, 16)
QUICK_LENGTHS, QUICK_BATCHES = (64, 128), (1, 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", type=Path, default=Path("build/gpu.json"), metavar="FILE")
    parser.add_argument("--backend", default="cupy", help="cupy (default), or numpy to try the script itself")
    parser.add_argument("--quick", action="store_true", help="a small model and short prompts")
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    try:
        backend = load_backend(arguments.backend)
        report = _check(backend, quick=arguments.quick, seconds_left=lambda: BUDGET_S - (time.monotonic() - started))
    except PrfaasError as error:
        print(f"error: {error.line()}", file=sys.stderr)
        return 2
    report["seconds"] = round(time.monotonic() - started, 1)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def _check(backend: Backend, *, quick: bool, seconds_left: Callable[[], float]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        families = {family: _family(family, Path(scratch) / family, backend) for family in sorted(RECIPES)}
        ok = all(family["ok"] for family in families.values())
        report: dict[str, Any] = {"ok": ok, "device": _device(backend), "backend": backend.name, "families": families}
        directory = write_model(Path(scratch) / "mid", "kda-mla", {} if quick else MID_SIZE)
        engine = _engine(directory, backend)
        report["prefill"] = [
            {"tokens": n, "tokens_per_s": round(n / _prefill_s(engine, n), 1)}
            for n in (QUICK_LENGTHS if quick else LENGTHS)
            if seconds_left() > 60
        ]
        report["decode"] = [
            {"batch": n, "tokens_per_s": round(n / _step_s(engine, n), 1)}
            for n in (QUICK_BATCHES if quick else BATCHES)
            if seconds_left() > 60
        ]
        if seconds_left() > 60:
            report["copies"] = _copies(directory, backend, QUICK_LENGTHS[-1] if quick else LENGTHS[-1])
        return report


def _family(family: str, directory: Path, backend: Backend) -> dict[str, Any]:
    """The references of one family."""
    engine = Engine(load_checkpoint(write_checkpoint(directory, family)), backend, prefill_chunk_tokens=64)
    report = verify(engine, load_oracle(FIXTURES / family / "oracle.json", engine.vocab_size))
    return {"ok": report.ok, "prompts": [asdict(prompt) for prompt in report.prompts]}


def _device(backend: Backend) -> str:
    if backend.name != "cupy":
        return "none"
    name: bytes = backend.xp.cuda.runtime.getDeviceProperties(backend.xp.cuda.Device().id)["name"]
    return name.decode()


def _engine(directory: Path, backend: Backend) -> Engine:
    return Engine(load_checkpoint(directory), backend, prefill_chunk_tokens=1024)


def _prefill_s(engine: Engine, n_tokens: int) -> float:
    """The median of three, after one that warms up."""
    regions, times = RegionMap(engine.layout, n_tokens), []
    buffer, prompt = bytearray(regions.total_bytes), [token % 4000 + 5 for token in range(n_tokens)]
    for _ in range(4):
        started = time.perf_counter()
        engine.prefill(prompt, Greedy(1, ignore_eos=True), regions, buffer)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _step_s(engine: Engine, batch_size: int) -> float:
    """One decode step of a batch, 256 tokens of context each."""
    sampling, batch = Greedy(24, ignore_eos=True), engine.batch()
    regions = RegionMap(engine.layout, 256 + sampling.max_tokens)
    for index in range(batch_size):
        buffer = bytearray(regions.total_bytes)
        result = engine.prefill([(token + index) % 4000 + 5 for token in range(256)], sampling, regions, buffer)
        assert result is not None
        batch.join(256, result.first_token, sampling, regions, buffer)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        batch.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class _NoCopier:
    """Copies nothing: what is left is the computing."""

    def start(self, array: Any) -> _NoCopy:
        return _NoCopy(array.shape)


class _NoCopy:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._zeros = np.broadcast_to(np.float32(0), shape)

    def done(self) -> bool:
        return True

    def result(self) -> np.ndarray[Any, Any]:
        return self._zeros

    def release(self) -> None:
        pass


def _copies(directory: Path, backend: Backend, n_tokens: int) -> dict[str, Any]:
    """Seconds of a prefill by how its state leaves; and the share of the copying that computing hides."""
    ways = {
        "beside": backend,
        "waited_for": replace(backend, new_copier=None),
        "none": replace(backend, new_copier=_NoCopier),
    }
    seconds = {name: _prefill_s(_engine(directory, way), n_tokens) for name, way in ways.items()}
    cost = seconds["waited_for"] - seconds["none"]
    hidden = (seconds["waited_for"] - seconds["beside"]) / cost if cost > 0 else None
    return {
        "tokens": n_tokens,
        **{f"{name}_seconds": round(value, 5) for name, value in seconds.items()},
        "hidden_share": None if hidden is None else round(hidden, 3),
    }


if __name__ == "__main__":
    sys.exit(main())
