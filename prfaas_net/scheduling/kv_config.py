"""S_kv(l) straight from a Hugging Face ``config.json``: which layers keep what, for every hybrid family we know of.

Unlike the engine, which has to *run* a model, this only counts bytes, and therefore reads configurations of models
that no engine here runs. Rows of full attention and windows are counted in ``kv_bytes`` a number, recurrent states in
float32, as vLLM and SGLang keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.profiles import KvSize

__all__ = ["kv_size_of_config"]

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Names that published configurations give to the three kinds.
_NAMES = {FULL: FULL, WINDOW: WINDOW, LINEAR: LINEAR, "attention": FULL, "chunked_attention": WINDOW}
STATE_BYTES = 4


class _Config:
    """Entries of a configuration; what is missing is named."""

    def __init__(self, body: Mapping[str, Any], place: str) -> None:
        self._body, self._place = body, place

    def get(self, *names: str) -> Any:
        for name in names:
            if self._body.get(name) is not None:
                return self._body[name]
        return None

    def number(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names)
        if value is None and default is not None:
            return default
        if value is None:
            raise ConfigError(
                f"{self._place}: {' or '.join(names)} is missing", do="give the config.json of the model itself"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self._place}: {names[0]} is not a count", expected="1 or more", found=repr(value))
        return value


def kv_size_of_config(body: Mapping[str, Any], *, kv_bytes: int = 2, place: str = "config.json") -> KvSize:
    """The KVCache of a sequence, by length.

    Args:
        body: the parsed file; the language part of a multimodal model is found by itself.
        kv_bytes: of one number of a key, value or latent (2: bfloat16, 1: fp8).
        place: how errors call it.

    Raises:
        ConfigError: an entry that decides the size is missing or wrong; it is named.
    """
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(body.get(part), Mapping):
            body, place = body[part], f"{place}: {part}"
            break
    config = _Config(body, place)
    kinds = _kinds(config, place)
    constant = per_token = window_bytes = 0.0
    if LINEAR in kinds:
        constant = kinds.count(LINEAR) * _linear_bytes(config, kv_bytes)
    if FULL in kinds:
        per_token = kinds.count(FULL) * _row_bytes(config, "", kv_bytes)
    window_tokens = 0
    if WINDOW in kinds:
        window_bytes = kinds.count(WINDOW) * _row_bytes(config, "swa_", kv_bytes)
        window_tokens = config.number("sliding_window", "sliding_window_size", "attention_chunk_size")
    return KvSize(constant, per_token, window_bytes, window_tokens)


def _kinds(config: _Config, place: str) -> list[str]:
    """What every layer keeps."""
    count = config.number("num_hidden_layers", "n_layer")
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers") is not None:
        # Counted from 1.
        full = set(linear["full_attn_layers"])
        return [FULL if i + 1 in full else LINEAR for i in range(count)]
    types = config.get("layer_types")
    if types is not None:
        unknown = sorted(set(types) - set(_NAMES))
        if unknown or len(types) != count:
            raise ConfigError(
                f"{place}: layer_types cannot be used", expected=f"{count} of {', '.join(_NAMES)}",
                found=f"{len(types)} entries, unknown: {unknown}",
            )  # fmt: skip
        return [_NAMES[kind] for kind in types]
    pattern = config.get("hybrid_layer_pattern")
    if pattern is not None:
        return [WINDOW if kind else FULL for kind in pattern]
    pattern = config.get("attn_type_list")
    if pattern is not None:
        return [FULL if kind else LINEAR for kind in pattern]
    period = config.get("layer_group_size", "full_attention_interval")
    if period:
        # The last of every group is full, and so are those behind the last whole group.
        whole = count // period * period
        return [FULL if (i + 1) % period == 0 or i >= whole else LINEAR for i in range(count)]
    windowed = config.get("sliding_window") and config.get("use_sliding_window") is not False
    return [WINDOW if windowed else FULL] * count


def _row_bytes(config: _Config, prefix: str, kv_bytes: int) -> int:
    """Of one token in one layer."""
    if config.get("kv_lora_rank") is not None and not prefix:
        return (config.number("kv_lora_rank") + config.number("qk_rope_head_dim")) * kv_bytes
    heads = config.number(*([f"{prefix}num_key_value_heads"] if prefix else []), "num_key_value_heads")
    if prefix and config.get("model_type") == "mimo_v2_flash" and config.get("swa_num_key_value_heads") is None:
        # transformers' form of its configuration leaves out that windows have twice as many heads.
        heads *= 2
    dim = _head_dim(config, prefix)
    value_dim = config.number(*([f"{prefix}v_head_dim"] if prefix else []), "v_head_dim", default=dim)
    return heads * (dim + value_dim) * kv_bytes


def _head_dim(config: _Config, prefix: str = "") -> int:
    names = ([f"{prefix}head_dim"] if prefix else []) + ["head_dim"]
    if config.get(*names) is None:
        return config.number("hidden_size") // config.number("num_attention_heads")
    return config.number(*names)


def _linear_bytes(config: _Config, kv_bytes: int) -> int:
    """Of the state of one linear layer, its short convolution included."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        # KDA: one square state a head; q, k and v are convolved.
        part = _Config(linear, "linear_attn_config")
        heads, dim = part.number("num_heads"), part.number("head_dim")
        taps = part.number("short_conv_kernel_size") - 1
        return heads * dim * dim * STATE_BYTES + 3 * heads * dim * taps * kv_bytes
    if config.get("linear_num_value_heads") is not None:
        # Gated DeltaNet.
        k_heads, v_heads = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
        k_dim, v_dim = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
        taps = config.number("linear_conv_kernel_dim") - 1
        convolved = 2 * k_heads * k_dim + v_heads * v_dim
        return v_heads * k_dim * v_dim * STATE_BYTES + convolved * taps * kv_bytes
    heads = config.number("linear_num_heads", "num_attention_heads")
    dim = config.number("linear_head_dim", "head_dim", default=_head_dim(config))
    size = heads * dim * dim * STATE_BYTES
    taps = config.get("linear_conv_kernel_dim", "short_conv_kernel_size")
    if taps is None and config.get("model_type") == "bailing_hybrid":
        taps = 4  # KDA, whose configuration may leave it out
    # Lightning attention has no convolution.
    return size + (3 * heads * dim * (taps - 1) * kv_bytes if taps else 0)
