"""MiMo-V2-Flash: sliding-window attention with sinks and twice the key heads, every few layers full attention.

Keys and values of a head have different sizes, values are scaled before they are kept, a third of a head is
rotated, and experts are DeepSeek's without shared ones.
"""

from __future__ import annotations

from engine.families.common import DENSE, FULL, SLIDING, SPARSE, kv_heads, mlp_specs, rope_section, rope_spec
from engine.jsonfile import JsonObject
from engine.layers.gqa import GqaSpec
from engine.layers.rope import RopeSpec
from engine.spec import LayerSpec, ModelSpec

__all__ = ["mimo_v2_flash_spec"]

_THETA = {FULL: 5_000_000.0, SLIDING: 10_000.0}
_ROTATED_SHARE = 0.334


def mimo_v2_flash_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``MiMoV2FlashForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    types = _types(config, n_layers)
    mlp_types = [DENSE] + [SPARSE] * (n_layers - 1)
    if config.get("mlp_layer_types", default=None) is not None:
        mlp_types = config.strings("mlp_layer_types", length=n_layers, among=(DENSE, SPARSE))
    mixers = {kind: _gqa(config, hidden_size, kind) for kind in set(types)}
    mlps = mlp_specs(config, hidden_size, mlp_types, shared=False)
    return ModelSpec(
        model_type="mimo_v2_flash",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind, mlp in zip(types, mlps, strict=True)),
        renames=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        ignored=("model.mtp.",),
    )


def _types(config: JsonObject, n_layers: int) -> list[str]:
    """``layer_types``, or else full attention first and in every sixth layer."""
    if config.get("layer_types", default=None) is not None:
        return config.strings("layer_types", length=n_layers, among=(FULL, SLIDING))
    return [FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(n_layers)]


def _gqa(config: JsonObject, hidden_size: int, kind: str) -> GqaSpec:
    n_heads = config.integer("num_attention_heads")
    sliding, dim = kind == SLIDING, config.integer("head_dim")
    return GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads(config, n_heads, 2 if sliding else 1),
        head_dim=dim,
        rope=_rope(config, dim, kind),
        norm_eps=config.number("rms_norm_eps", "layernorm_epsilon", default=1e-5),
        v_dim=config.integer("v_head_dim"),
        bias=config.flag("attention_bias", default=False),
        window=_window(config) if sliding else 0,
        sinks="attention_sink_bias" if sliding else "",
        value_scale=config.number("attention_value_scale", default=1.0),
    )


def _window(config: JsonObject) -> int:
    """Tokens that a query sees. ``sliding_window_size``, where it is given, does not count the query's own."""
    if config.get("sliding_window_size", default=None) is not None:
        return config.integer("sliding_window_size") + 1
    return config.integer("sliding_window")


def _rope(config: JsonObject, dim: int, kind: str) -> RopeSpec:
    if rope_section(config).get(kind, default=None) is not None:
        return rope_spec(config, dim, rope=rope_section(config).section(kind), share=_ROTATED_SHARE)
    return RopeSpec(int(dim * _ROTATED_SHARE), _THETA[kind])
