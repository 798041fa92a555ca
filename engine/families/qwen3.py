"""Qwen3: grouped-query attention with norms on queries and keys, rotary positions, dense MLPs."""

from __future__ import annotations

from engine.jsonfile import JsonObject
from engine.layers.gqa import GqaSpec
from engine.layers.mlp import GatedMlpSpec
from engine.spec import LayerSpec, ModelSpec

__all__ = ["qwen3_spec"]


def qwen3_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``Qwen3ForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    config.require("use_sliding_window", False, default=False)
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    n_heads = config.integer("num_attention_heads")
    norm_eps = config.number("rms_norm_eps", default=1e-6)
    if config.get("layer_types", default=None) is not None:
        config.strings("layer_types", length=n_layers, among=("full_attention",))
    attention = GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", default=n_heads),
        head_dim=config.integer("head_dim", default=max(1, hidden_size // n_heads)),
        rope_theta=_rope_theta(config),
        norm_eps=norm_eps,
        bias=config.flag("attention_bias", default=False),
    )
    if attention.n_heads % attention.n_kv_heads:
        raise config.error(
            "the heads cannot be grouped", "num_key_value_heads",
            expected=f"a divisor of {n_heads}", found=attention.n_kv_heads,
        )  # fmt: skip
    layer = LayerSpec(attention, GatedMlpSpec(hidden_size, config.integer("intermediate_size")))
    return ModelSpec(
        model_type="qwen3",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=norm_eps,
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=(layer,) * n_layers,
    )


def _rope_theta(config: JsonObject) -> float:
    """From ``rope_parameters``, or from ``rope_theta`` and ``rope_scaling`` as older files have it."""
    rope = config.section("rope_parameters", "rope_scaling", default={})
    rope_type = rope.get("rope_type", "type", default="default")
    if rope_type != "default":
        raise config.error(
            "scaled rotary positions are not supported", "rope_type",
            expected="default", found=rope_type, do="remove the scaling, at the price of a shorter context",
        )  # fmt: skip
    if rope.get("rope_theta", default=None) is not None:
        return rope.number("rope_theta")
    return config.number("rope_theta")
