"""Llama and Qwen3: grouped-query attention with rotary positions, dense MLPs; Qwen3 norms queries and keys."""

from __future__ import annotations

from engine.families.common import FULL, head_dim, kv_heads, rope_spec
from engine.jsonfile import JsonObject
from engine.layers.gqa import GqaSpec
from engine.layers.mlp import GatedMlpSpec
from engine.spec import LayerSpec, ModelSpec

__all__ = ["llama_spec", "qwen3_spec"]


def llama_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``LlamaForCausalLM``."""
    return _dense_spec(config, "llama", norm="")


def qwen3_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``Qwen3ForCausalLM``."""
    config.require("use_sliding_window", False, default=False)
    return _dense_spec(config, "qwen3", norm="head")


def _dense_spec(config: JsonObject, model_type: str, *, norm: str) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    n_heads = config.integer("num_attention_heads")
    norm_eps = config.number("rms_norm_eps", default=1e-6)
    if config.get("layer_types", default=None) is not None:
        config.strings("layer_types", length=n_layers, among=(FULL,))
    bias = config.flag("attention_bias", default=False)
    dim = head_dim(config, hidden_size, n_heads)
    attention = GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads(config, n_heads),
        head_dim=dim,
        rope=rope_spec(config, dim),
        norm_eps=norm_eps,
        norm=norm,
        bias=bias,
        out_bias=bias,
    )
    mlp_bias = config.flag("mlp_bias", default=False)
    layer = LayerSpec(attention, GatedMlpSpec(hidden_size, config.integer("intermediate_size"), bias=mlp_bias))
    return ModelSpec(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=norm_eps,
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=(layer,) * n_layers,
    )
