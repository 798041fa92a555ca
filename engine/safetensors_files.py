"""The weights of a checkpoint directory: every tensor's name, type and shape first, its values on demand."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from safetensors import SafetensorError, safe_open

from engine.jsonfile import read_json_object
from prfaas_net.errors import ConfigError

__all__ = ["StoredTensor", "WeightFiles", "read_tensors"]

_INDEX = "model.safetensors.index.json"
_DOWNLOAD = "download the checkpoint again"
# Bytes an element, for the types that are read.
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        dtype: as the format writes it, such as ``BF16``.
        data: its bytes, a view of the mapped file.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def float32(self) -> np.ndarray[Any, Any]:
        """The values; a copy, so that it outlives the file."""
        if self.dtype == "BF16":  # the upper half of a float32
            bits = np.frombuffer(self.data, dtype="<u2").astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).reshape(self.shape)
        stored = np.frombuffer(self.data, dtype="<f4" if self.dtype == "F32" else "<f2")
        return stored.astype(np.float32).reshape(self.shape)


class WeightFiles:
    """All tensors of a directory: ``model.safetensors``, or the shards that the index names.

    Raises:
        ConfigError: a file is missing or damaged, disagrees with the index, or holds quantised weights.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        index = directory / _INDEX
        weight_map = _read_index(index) if index.exists() else None
        names = sorted(set(weight_map.values())) if weight_map is not None else _find_files(directory)
        for name in names:
            for tensor in _read_header(directory / name):
                if tensor.name in self.tensors:
                    raise ConfigError(
                        "a weight is stored twice", expected=f"it in {self.tensors[tensor.name].file} only",
                        found=f"it in {name} too", do="remove files that do not belong to the checkpoint",
                        key=tensor.name,
                    )  # fmt: skip
                self.tensors[tensor.name] = tensor
        for key, file in (weight_map or {}).items():
            found = self.tensors.get(key)
            if found is None or found.file != file:
                where = "it in no file" if found is None else f"it in {found.file}"
                raise ConfigError(
                    "the index and the files disagree", expected=f"the weight in {file}", found=where,
                    do=_DOWNLOAD, file=_INDEX, key=key,
                )  # fmt: skip

    def digest(self, extra: bytes) -> str:
        """128 bits over every tensor (however sharded) and ``extra``, as hex."""
        state = xxhash.xxh3_128(extra)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            state.update(orjson.dumps([name, tensor.dtype, tensor.shape]))
            state.update(tensor.data)
        return state.hexdigest()


def read_tensors(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of one file, as float32 by name.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    return {tensor.name: tensor.float32() for tensor in _read_header(path)}


def _find_files(directory: Path) -> list[str]:
    """The weight files of a directory without an index."""
    if (directory / "model.safetensors").exists():
        return ["model.safetensors"]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ConfigError(
            "there are no weights", expected=f"model.safetensors or {_INDEX}", found="no *.safetensors file",
            do="give the directory of a Hugging Face checkpoint in safetensors format", file=directory,
        )  # fmt: skip
    return names


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name. A file outside the directory is refused."""
    body = read_json_object(path, do=_DOWNLOAD)
    weight_map = body.section("weight_map").body
    for key, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise body.error(
                "a weight is in no file of this directory", key, expected="a file's name", found=file, do=_DOWNLOAD
            )
    return weight_map


def _read_header(path: Path) -> Iterable[StoredTensor]:
    """The tensors of one file, in its own order."""
    try:
        with safe_open(path, framework="np"):  # checks the header: offsets, sizes, overlaps
            pass
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise ConfigError("a file is missing", expected=path.name, found="no such file", do=_DOWNLOAD) from None
    except (SafetensorError, OSError) as error:
        raise ConfigError("a file is not valid safetensors", found=error, do=_DOWNLOAD, file=path.name) from error
    # The format: 8 bytes of header length, little-endian, the header as JSON, then the tensors' bytes.
    base = 8 + int.from_bytes(mapped[:8], "little")
    header: dict[str, Any] = orjson.loads(mapped[8:base])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] not in _FLOAT_BYTES:
            raise ConfigError(
                "a weight has a type that is not read", expected=", ".join(_FLOAT_BYTES), found=entry["dtype"],
                do="use an unquantised checkpoint", file=path.name, key=name,
            )  # fmt: skip
        begin, end = entry["data_offsets"]
        yield StoredTensor(name, path.name, entry["dtype"], tuple(entry["shape"]), mapped[base + begin : base + end])
