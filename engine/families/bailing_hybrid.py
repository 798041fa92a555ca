"""Bailing hybrid (Ling 3, Ring): Kimi Delta Attention with a bounded decay; every few layers gated, rotary MLA."""

from __future__ import annotations

from engine.families.common import FULL, LINEAR, dense_or_sparse, mlp_specs, periodic_types
from engine.families.deepseek_v3 import mla_spec, mtp_prefixes
from engine.jsonfile import JsonObject
from engine.layers.kda import KdaSpec
from engine.spec import LayerSpec, MixerSpec, ModelSpec

__all__ = ["bailing_hybrid_spec"]

_RENAMES = (
    ("model.word_embeddings.", "model.embed_tokens."),
    (".attention.", ".self_attn."),
    (".self_attn.dense.", ".self_attn.o_proj."),
    (".gate.expert_bias", ".gate.e_score_correction_bias"),
)


def bailing_hybrid_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``BailingHybridForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    types = periodic_types(config, n_layers, config.integer("layer_group_size", default=6), most=LINEAR, last=FULL)
    mixers: dict[str, MixerSpec] = {LINEAR: _kda(config, hidden_size), FULL: mla_spec(config, gated=True)}
    mlps = mlp_specs(config, hidden_size, dense_or_sparse(config, n_layers, n_dense=2), shared=True)
    return ModelSpec(
        model_type="bailing_hybrid",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        max_tokens=config.integer("model_max_length", "max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind, mlp in zip(types, mlps, strict=True)),
        renames=_RENAMES,
        ignored=mtp_prefixes(config, n_layers),
    )


def _kda(config: JsonObject, hidden_size: int) -> KdaSpec:
    n_heads = config.integer("linear_num_heads", "num_attention_heads")
    bounded = config.flag("kda_safe_gate", default=True)
    bound = config.get("kda_lower_bound", default=-5.0)
    if not isinstance(bound, int | float) or isinstance(bound, bool) or bound >= 0:
        raise config.error("an entry has the wrong value", "kda_lower_bound", expected="a negative number", found=bound)
    return KdaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        head_dim=config.integer("linear_head_dim", "head_dim"),
        conv_kernel=config.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4, minimum=2),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        bottleneck=False,
        lower_bound=float(bound) if bounded else None,
        a_log_shape=(n_heads,),
    )
