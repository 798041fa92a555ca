"""gpt-oss (arXiv:2508.10925): sliding-window and full attention in turn, with sinks; clamped experts; YaRN."""

from __future__ import annotations

from engine.families.common import FULL, SLIDING, head_dim, kv_heads, periodic_types, rope_spec
from engine.jsonfile import JsonObject
from engine.layers.clamped_moe import ClampedMoeSpec
from engine.layers.gqa import GqaSpec
from engine.spec import LayerSpec, ModelSpec

__all__ = ["gpt_oss_spec"]


def gpt_oss_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``GptOssForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    types = periodic_types(config, n_layers, 2, most=SLIDING, last=FULL)
    n_experts = config.integer("num_local_experts", "num_experts")
    mlp = ClampedMoeSpec(
        hidden_size=hidden_size,
        expert_size=config.integer("intermediate_size"),
        n_experts=n_experts,
        top_k=config.integer("num_experts_per_tok", "experts_per_token"),
        alpha=config.number("swiglu_alpha", default=1.702),
        limit=config.number("swiglu_limit", default=7.0),
    )
    if mlp.top_k > n_experts:
        raise config.error(
            "a token cannot have so many experts", "num_experts_per_tok", expected=f"up to {n_experts}", found=mlp.top_k
        )
    mixers = {kind: _gqa(config, hidden_size, kind) for kind in set(types)}
    return ModelSpec(
        model_type="gpt_oss",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind in types),
    )


def _gqa(config: JsonObject, hidden_size: int, kind: str) -> GqaSpec:
    n_heads = config.integer("num_attention_heads")
    bias = config.flag("attention_bias", default=True)
    dim = head_dim(config, hidden_size, n_heads)
    return GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads(config, n_heads),
        head_dim=dim,
        rope=rope_spec(config, dim),
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        bias=bias,
        out_bias=bias,
        window=config.integer("sliding_window", default=128) if kind == SLIDING else 0,
        sinks="sinks",
    )
