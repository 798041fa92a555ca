"""Reference outputs that lie beside a checkpoint: what another implementation computed with the same weights.

``oracle.json`` holds prompts with the logits after them and the greedy tokens that follow. Next to it,
``oracle/prefill_cache_<prompt>.safetensors`` may hold a prompt's state as transformers keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend import Array
from engine.jsonfile import JsonObject, read_json_object
from engine.safetensors_files import read_tensors
from prfaas_net.errors import ConfigError
from prfaas_net.kv import LayerLayout

__all__ = ["OraclePrompt", "expected_state", "load_oracle"]

_DO = "make the oracle again, or give another with --oracle"


@dataclass(frozen=True)
class OraclePrompt:
    """One prompt and what must come of it.

    Attributes:
        last_logits: [vocab_size], after the prompt's last token.
        greedy: the tokens that follow, whatever they are.
        cache: tensors of the state after the prompt by transformers' names; empty if not recorded.
    """

    name: str
    input_ids: list[int]
    last_logits: np.ndarray[Any, Any]
    greedy: list[int]
    cache: dict[str, np.ndarray[Any, Any]]


def load_oracle(path: Path, vocab_size: int) -> list[OraclePrompt]:
    """Read an oracle for a model with ``vocab_size`` tokens.

    Raises:
        ConfigError: it is missing or damaged, or it is another model's.
    """
    oracle = read_json_object(path, do="give an oracle with --oracle")
    prompts = oracle.section("prompts")
    if not prompts.body:
        raise oracle.error("an entry has the wrong value", "prompts", expected="at least one prompt", found="none")
    return [_prompt(name, prompts.section(name), path, vocab_size) for name in prompts.body]


def _prompt(name: str, entry: JsonObject, path: Path, vocab_size: int) -> OraclePrompt:
    for key in ("input_ids", "greedy"):
        ids = entry.get(key)
        if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            expected = f"token ids under {vocab_size}"
            raise entry.error("an entry has the wrong value", key, expected=expected, found=ids, do=_DO)
    try:
        logits = np.asarray(entry.get("last_logits"), dtype=np.float32)
    except (TypeError, ValueError):
        logits = np.empty(0, dtype=np.float32)
    if logits.shape != (vocab_size,):
        raise entry.error(
            "an entry has the wrong value", "last_logits",
            expected=f"{vocab_size} numbers", found=f"shape {list(logits.shape)}", do=_DO,
        )  # fmt: skip
    cache = path.parent / "oracle" / f"prefill_cache_{name}.safetensors"
    return OraclePrompt(
        name, entry.get("input_ids"), logits, entry.get("greedy"), read_tensors(cache) if cache.exists() else {}
    )


def expected_state(layer: LayerLayout, cache: dict[str, np.ndarray[Any, Any]]) -> dict[str, Array]:
    """One layer's state as ours, from transformers' cache.

    Transformers keeps keys and values as [1, heads, T, d] (of latent attention: the latent as keys, the shared
    entries as values; of a window: one token less than it sees) and one more column of the convolution's state
    than is ever read.

    Raises:
        ConfigError: a tensor of the layer is not there.
    """
    prefix = f"layers.{layer.index}."
    names = {tensor.name for tensor in layer.tensors}
    try:
        if names == {"k", "v"}:
            return {
                "k": cache[prefix + "keys"][0].transpose(1, 0, 2),
                "v": cache[prefix + "values"][0].transpose(1, 0, 2),
            }
        if names == {"latent"}:
            parts = [cache[prefix + "keys"][0, 0], cache[prefix + "values"][0, 0]]
            return {"latent": np.concatenate(parts, axis=-1)}
        if names == {"recurrent"}:
            return {"recurrent": cache[prefix + "linear_cache"][0]}
        return {
            "recurrent": cache[prefix + "recurrent_states.0"][0],
            "conv": cache[prefix + "conv_states.0"][0][:, 1:],
        }
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            "the oracle's cache is another model's", expected=f"state of layer {layer.index}", found=error, do=_DO
        ) from error
