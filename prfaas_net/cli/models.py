"""Where the engine meets prfaas-net: loading a model by its directory, or the one that ships with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from engine.engine import Engine
from engine.tokenizer import Tokenizer

__all__ = ["demo_documents", "load_engine", "load_tokenizer", "model_directory"]

_DATA = resources.files("prfaas_net") / "data"


def model_directory(model: str | None) -> Path:
    """The directory given, or that of the demo model."""
    return Path(model) if model else Path(str(_DATA / "demo_model"))


def demo_documents() -> dict[str, str]:
    """The texts that the demo sends, by name, the short one first."""
    folder = _DATA / "documents"
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("short", "long")}


def load_engine(
    model: str | None,
    *,
    prefill_chunk_tokens: int = 512,
    kv_dtype: str = "float32",
    pace_tokens_per_s: float | None = None,
) -> Engine:
    """An engine for the model.

    Args:
        pace_tokens_per_s: see :class:`engine.engine.Engine`.

    Raises:
        ConfigError: the directory is not a checkpoint that the engine can run.
    """
    return Engine.load(
        model_directory(model),
        prefill_chunk_tokens=prefill_chunk_tokens,
        kv_dtype=kv_dtype,
        pace_tokens_per_s=pace_tokens_per_s,
    )


def load_tokenizer(model: str | None) -> Tokenizer:
    """The model's tokenizer and chat template.

    Raises:
        ConfigError: the directory has none that can be used.
    """
    return Tokenizer.load(model_directory(model))
