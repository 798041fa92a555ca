"""A Hugging Face checkpoint directory: checked as a whole before a single weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from engine.families import model_spec
from engine.jsonfile import JsonObject, read_json_object
from engine.safetensors_files import StoredTensor, WeightFiles
from engine.spec import ModelSpec
from prfaas_net.errors import ConfigError

__all__ = ["KV_DTYPES", "Checkpoint", "load_checkpoint"]

KV_DTYPES = ("float32", "bfloat16")

# Entries of a config that change nothing in the computation; all others are part of the weights' digest.
_NOT_COMPUTED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "output_router_logits", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
_WHERE = "give the directory of a Hugging Face checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint; its weights are read when asked for.

    Attributes:
        weights_digest: equal for equal weights and equal computation, however the files are cut.
        eos_token_ids: tokens that end an answer; may be empty.
    """

    name: str
    spec: ModelSpec
    weights_digest: str
    eos_token_ids: frozenset[int]
    tensors: dict[str, StoredTensor]

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One weight as float32, by our name for it."""
        return self.tensors[name].float32()


def load_checkpoint(directory: Path, name: str | None = None, kv_dtype: str = "float32") -> Checkpoint:
    """Open and check a directory.

    Args:
        name: for people; the directory's own if not given.
        kv_dtype: ``float32`` or ``bfloat16``: in which keys, values and latents are kept.

    Raises:
        ConfigError: anything that would make the model compute something else than the checkpoint's author
            meant: an unsupported model, quantisation, a weight missing, unknown, or of another shape.
    """
    if not directory.is_dir():
        raise ConfigError("there is no such directory", found=directory, do=_WHERE)
    config = read_json_object(directory / "config.json", do=_WHERE)
    for key in ("quantization_config", "compression_config"):
        if config.get(key, default=None) is not None:
            raise config.error(
                "quantised weights are not supported", key,
                expected="no such entry", found=config.get(key), do="use the unquantised checkpoint",
            )  # fmt: skip
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(
            "keys and values cannot be kept in this type", expected=" or ".join(KV_DTYPES), found=kv_dtype,
            do="correct kv_dtype",
        )  # fmt: skip
    spec = model_spec(config).stored_as(kv_dtype)
    files = WeightFiles(directory)
    tensors = _match(spec, files.tensors)
    computed = {key: value for key, value in config.body.items() if key not in _NOT_COMPUTED and value is not None}
    return Checkpoint(
        name=name or directory.resolve().name,
        spec=spec,
        weights_digest=files.digest(orjson.dumps(computed, option=orjson.OPT_SORT_KEYS)),
        eos_token_ids=_eos_token_ids(directory, config, spec.vocab_size),
        tensors=tensors,
    )


def _match(spec: ModelSpec, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The stored tensors by our names, one for every weight of the spec and none beyond."""
    expected = spec.weight_shapes()
    by_name: dict[str, StoredTensor] = {}
    for tensor in stored.values():
        name = spec.canonical(tensor.name)
        if spec.ignores(name):
            continue
        if name not in expected or name in by_name:
            raise ConfigError(
                "a weight does not belong to the model",
                expected=f"the {len(expected)} weights that config.json describes",
                found="one more",
                do="use config.json and weights of the same checkpoint",
                file=tensor.file, key=tensor.name,
            )  # fmt: skip
        if tensor.shape != expected[name]:
            raise ConfigError(
                "a weight has the wrong shape",
                expected=list(expected[name]),
                found=list(tensor.shape),
                do="use config.json and weights of the same checkpoint",
                file=tensor.file, key=tensor.name,
            )  # fmt: skip
        by_name[name] = tensor
    missing = sorted(expected.keys() - by_name.keys())
    if missing:
        files = sorted({tensor.file for tensor in stored.values()})
        raise ConfigError(
            "a weight is missing",
            expected=f"{len(expected)} weights, as config.json describes",
            found=f"{len(by_name)}; {len(missing)} missing",
            do="download the checkpoint again",
            file=", ".join(files[:3]) + (", ..." if len(files) > 3 else ""), key=missing[0],
        )  # fmt: skip
    return by_name


def _eos_token_ids(directory: Path, config: JsonObject, vocab_size: int) -> frozenset[int]:
    """From generation_config.json, which overrides config.json; either may hold one id or a list."""
    source, path = config, directory / "generation_config.json"
    if path.exists():
        generation = read_json_object(path, do=_WHERE)
        if generation.get("eos_token_id", default=None) is not None:
            source = generation
    value = source.get("eos_token_id", default=[])
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size for i in ids):
        raise source.error(
            "an entry has the wrong value", "eos_token_id", expected=f"token ids under {vocab_size}", found=value
        )
    return frozenset(ids)
