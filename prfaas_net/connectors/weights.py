"""A digest of a checkpoint: cheap enough for every start, and different for another fine-tune of the same shapes."""

from __future__ import annotations

from pathlib import Path

import xxhash

from prfaas_net.units import KiB

__all__ = ["weights_digest"]

SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
SAMPLES = 16
SAMPLE_BYTES = 4 * KiB
HEAD_BYTES = 64 * KiB


def weights_digest(model: str, revision: str | None = None) -> str:
    """64 bits, hex, over the name, size, beginning and samples of every file of weights in a directory.

    Args:
        model: a directory. Of anything else (a name on a hub) the name and the revision are taken.
    """
    state = xxhash.xxh3_64()
    directory = Path(model)
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES) if directory.is_dir() else []
    if not files:
        state.update(f"{model}@{revision or ''}".encode())
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            state.update(file.read(HEAD_BYTES))
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                state.update(file.read(SAMPLE_BYTES))
    return state.hexdigest()
