"""Gemma 3 (arXiv:2503.19786), text: sliding-window attention, every few layers full; norms around each half."""

from __future__ import annotations

from engine.families.common import FULL, SLIDING, head_dim, kv_heads, periodic_types, rope_section, rope_spec
from engine.jsonfile import JsonObject
from engine.layers.gqa import GqaSpec
from engine.layers.mlp import GatedMlpSpec
from engine.layers.rope import RopeSpec
from engine.spec import LayerSpec, ModelSpec, Residuals

__all__ = ["gemma3_spec"]

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma3_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``Gemma3ForCausalLM``."""
    config.require("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.require(key, None, default=None)
    config.require("use_bidirectional_attention", False, default=False)
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    types = periodic_types(config, n_layers, period, most=SLIDING, last=FULL)
    mixers = {kind: _gqa(config, hidden_size, kind) for kind in set(types)}
    mlp = GatedMlpSpec(hidden_size, config.integer("intermediate_size"), gelu=True)
    residuals = Residuals(norms=_NORMS, norm_offset=1.0)
    return ModelSpec(
        model_type="gemma3_text",
        vocab_size=config.integer("vocab_size", default=262208),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        max_tokens=config.integer("max_position_embeddings", default=131072),
        tied=config.flag("tie_word_embeddings", default=True),
        layers=tuple(LayerSpec(mixers[kind], mlp, residuals) for kind in types),
        norm_offset=1.0,
        embedding_scale=hidden_size**0.5,
    )


def _gqa(config: JsonObject, hidden_size: int, kind: str) -> GqaSpec:
    n_heads = config.integer("num_attention_heads", default=8)
    bias = config.flag("attention_bias", default=False)
    dim = head_dim(config, hidden_size, n_heads)
    return GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads(config, n_heads),
        head_dim=dim,
        rope=_rope(config, dim, kind),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        norm="head",
        norm_offset=1.0,
        bias=bias,
        out_bias=bias,
        window=config.integer("sliding_window", default=4096) if kind == SLIDING else 0,
        scale=config.number("query_pre_attn_scalar", default=256) ** -0.5,
    )


def _rope(config: JsonObject, dim: int, kind: str) -> RopeSpec:
    """From ``rope_parameters`` by kind of layer; older files scale and set the base of full attention apart."""
    if rope_section(config).get(kind, default=None) is not None:
        return rope_spec(config, dim, rope=rope_section(config).section(kind))
    if kind == SLIDING:
        return RopeSpec(dim, config.number("rope_local_base_freq", default=10000.0))
    rope = dict(config.section("rope_scaling", default={}).body)
    theta = config.number("rope_theta", default=1000000.0)
    return rope_spec(config, dim, rope=JsonObject(config.file, {**rope, "rope_theta": theta}, "rope_scaling."))
