"""Kimi Linear: Kimi Delta Attention, every few layers MLA without positions, dense or expert MLPs.

Two generations of config are about: that of the hub, whose ``linear_attn_config`` counts layers from 1, and
that of transformers, with ``layer_types`` and ``mlp_layer_types``. Where both are present the latter counts.
"""

from __future__ import annotations

from engine.families.common import DENSE, EXPERT_RENAMES, FULL, LINEAR, dense_or_sparse, mlp_specs
from engine.families.deepseek_v3 import mla_spec
from engine.jsonfile import JsonObject
from engine.layers.kda import KdaSpec
from engine.spec import LayerSpec, MixerSpec, ModelSpec

__all__ = ["kimi_linear_spec"]

# Both generations of checkpoint name the expert layers ``block_sparse_moe``, transformers the dense ones too.
_RENAMES = ((".block_sparse_moe.", ".mlp."), *EXPERT_RENAMES)


def kimi_linear_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``KimiLinearForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    config.require("mla_use_nope", True, default=True)
    config.require("tie_word_embeddings", False, default=False)
    config.require("moe_router_activation_func", "sigmoid", default="sigmoid")
    hidden_size = config.integer("hidden_size")
    mixers: dict[str, MixerSpec] = {LINEAR: _kda(config, hidden_size), FULL: mla_spec(config, rotary=False)}
    mixer_types = _mixer_types(config)
    mlps = mlp_specs(config, hidden_size, _mlp_types(config), shared=True)
    return ModelSpec(
        model_type="kimi_linear",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        max_tokens=config.integer("model_max_length", "max_position_embeddings"),
        tied=False,
        layers=tuple(LayerSpec(mixers[m], mlp) for m, mlp in zip(mixer_types, mlps, strict=True)),
        renames=_RENAMES,
    )


def _kda(config: JsonObject, hidden_size: int) -> KdaSpec:
    if config.get("linear_attn_config", default=None) is not None:
        linear = config.section("linear_attn_config")
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        linear = config
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    n_heads, dim, conv_kernel = names
    return KdaSpec(
        hidden_size=hidden_size,
        n_heads=linear.integer(n_heads),
        head_dim=linear.integer(dim),
        conv_kernel=linear.integer(conv_kernel, minimum=2),
        norm_eps=config.number("rms_norm_eps", default=1e-5),
    )


def _mixer_types(config: JsonObject) -> list[str]:
    """What each layer mixes with."""
    n_layers = config.integer("num_hidden_layers")
    if config.get("layer_types", default=None) is not None:
        return config.strings("layer_types", length=n_layers, among=(LINEAR, FULL))
    linear = config.section("linear_attn_config")
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    described = isinstance(kda, list) and isinstance(full, list) and all(type(n) is int for n in kda + full)
    if not described or sorted(kda + full) != list(range(1, n_layers + 1)):
        raise config.error(
            "the layers are not fully described", "linear_attn_config",
            expected=f"each of the layers 1 to {n_layers} in kda_layers or in full_attn_layers", found=linear.body,
        )  # fmt: skip
    return [FULL if number in full else LINEAR for number in range(1, n_layers + 1)]


def _mlp_types(config: JsonObject) -> list[str]:
    """Which layers have experts."""
    n_layers = config.integer("num_hidden_layers")
    described = config.get("mlp_layer_types", default=None) is not None
    if not described and config.get("num_experts", "num_local_experts", default=None) is None:
        return [DENSE] * n_layers
    config.require("moe_layer_freq", 1, default=1)
    return dense_or_sparse(config, n_layers, n_dense=1)
