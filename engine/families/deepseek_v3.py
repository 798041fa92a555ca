"""DeepSeek-V3 (arXiv:2412.19437): latent attention with rotary positions, dense MLPs first, then experts."""

from __future__ import annotations

from engine.families.common import dense_or_sparse, mlp_specs, mscaled, rope_spec
from engine.jsonfile import JsonObject
from engine.layers.mla import MlaSpec
from engine.spec import LayerSpec, ModelSpec

__all__ = ["deepseek_v3_spec", "mla_spec", "mtp_prefixes"]


def deepseek_v3_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``DeepseekV3ForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    config.require("scoring_func", "sigmoid", default="sigmoid")
    config.require("topk_method", "noaux_tc", default="noaux_tc")
    config.require("moe_layer_freq", 1, default=1)
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    types = dense_or_sparse(config, n_layers, n_dense=3)
    attention = mla_spec(config, interleaved=config.flag("rope_interleave", default=True))
    return ModelSpec(
        model_type="deepseek_v3",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=tuple(LayerSpec(attention, mlp) for mlp in mlp_specs(config, hidden_size, types, shared=True)),
        ignored=mtp_prefixes(config, n_layers),
    )


def mla_spec(config: JsonObject, *, rotary: bool = True, interleaved: bool = True, gated: bool = False) -> MlaSpec:
    """Latent attention as the keys of DeepSeek's configs describe it."""
    n_heads = config.integer("num_attention_heads")
    config.require("num_key_value_heads", n_heads, default=n_heads)
    rank = config.get("q_lora_rank", default=None)
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    scale = (nope_dim + rope_dim) ** -0.5
    return MlaSpec(
        hidden_size=config.integer("hidden_size"),
        n_heads=n_heads,
        q_rank=config.integer("q_lora_rank") if rank is not None else None,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim"),
        bias=config.flag("attention_bias", default=False),
        rope=rope_spec(config, rope_dim, interleaved=interleaved) if rotary else None,
        gated=gated,
        scale=mscaled(config, scale) if rotary else scale,
    )


def mtp_prefixes(config: JsonObject, n_layers: int) -> tuple[str, ...]:
    """What the names of the layers for multi-token prediction begin with: stored after the others, not run here."""
    n_extra = config.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, minimum=0)
    return tuple(f"model.layers.{n_layers + index}." for index in range(n_extra))
