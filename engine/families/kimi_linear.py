"""Kimi Linear: Kimi Delta Attention, every few layers MLA without positions, dense or expert MLPs.

Two generations of config are about: that of the hub, whose ``linear_attn_config`` counts layers from 1, and
that of transformers, with ``layer_types`` and ``mlp_layer_types``. Where both are present the latter counts.
"""

from __future__ import annotations

from engine.jsonfile import JsonObject
from engine.layers.kda import KdaSpec
from engine.layers.mla import MlaSpec
from engine.layers.mlp import GatedMlpSpec
from engine.layers.moe import MoeSpec
from engine.spec import LayerSpec, MixerSpec, MlpSpec, ModelSpec

__all__ = ["kimi_linear_spec"]

_LINEAR, _FULL = "linear_attention", "full_attention"
_DENSE, _SPARSE = "dense", "sparse"
# Both generations of checkpoint name the expert layers ``block_sparse_moe``, transformers the dense ones too.
_RENAMES = ((".block_sparse_moe.", ".mlp."),)


def kimi_linear_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``KimiLinearForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    config.require("mla_use_nope", True, default=True)
    config.require("tie_word_embeddings", False, default=False)
    hidden_size = config.integer("hidden_size")
    mixers: dict[str, MixerSpec] = {_LINEAR: _kda(config, hidden_size), _FULL: _mla(config, hidden_size)}
    mixer_types = _mixer_types(config)
    mlp_types = _mlp_types(config)
    mlps: dict[str, MlpSpec] = {_DENSE: GatedMlpSpec(hidden_size, config.integer("intermediate_size"))}
    if _SPARSE in mlp_types:
        mlps[_SPARSE] = _moe(config, hidden_size)
    return ModelSpec(
        model_type="kimi_linear",
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        max_tokens=config.integer("model_max_length", "max_position_embeddings"),
        tied=False,
        layers=tuple(LayerSpec(mixers[m], mlps[p]) for m, p in zip(mixer_types, mlp_types, strict=True)),
        renames=_RENAMES,
    )


def _kda(config: JsonObject, hidden_size: int) -> KdaSpec:
    if config.get("linear_attn_config", default=None) is not None:
        linear = config.section("linear_attn_config")
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        linear = config
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    n_heads, head_dim, conv_kernel = names
    return KdaSpec(
        hidden_size=hidden_size,
        n_heads=linear.integer(n_heads),
        head_dim=linear.integer(head_dim),
        conv_kernel=linear.integer(conv_kernel, minimum=2),
        norm_eps=config.number("rms_norm_eps", default=1e-5),
    )


def _mla(config: JsonObject, hidden_size: int) -> MlaSpec:
    config.require(
        "num_key_value_heads", config.integer("num_attention_heads"), default=config.get("num_attention_heads")
    )
    rank = config.get("q_lora_rank", default=None)
    return MlaSpec(
        hidden_size=hidden_size,
        n_heads=config.integer("num_attention_heads"),
        q_rank=config.integer("q_lora_rank") if rank is not None else None,
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        v_dim=config.integer("v_head_dim"),
        bias=config.flag("attention_bias", default=False),
    )


def _moe(config: JsonObject, hidden_size: int) -> MoeSpec:
    config.require("moe_router_activation_func", "sigmoid", default="sigmoid")
    spec = MoeSpec(
        hidden_size=hidden_size,
        expert_size=config.integer("moe_intermediate_size"),
        n_experts=config.integer("num_experts", "num_local_experts"),
        n_shared=config.integer("num_shared_experts", "n_shared_experts", default=1),
        top_k=config.integer("num_experts_per_token", "num_experts_per_tok"),
        n_groups=config.integer("num_expert_group", "n_group", default=1),
        top_groups=config.integer("topk_group", default=1),
        renormalise=config.flag("moe_renormalize", "norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor", default=1.0),
    )
    group_size = spec.n_experts // spec.n_groups
    equal = spec.n_experts % spec.n_groups == 0 and (spec.n_groups == 1 or group_size > 1)
    if not equal or spec.top_groups > spec.n_groups or spec.top_k > group_size * spec.top_groups:
        raise config.error(
            "the experts cannot be grouped", "num_expert_group",
            expected=f"{spec.n_experts} experts in equal groups, {spec.top_k} of them in {spec.top_groups} groups",
            found=f"{spec.n_groups} groups",
        )  # fmt: skip
    return spec


def _mixer_types(config: JsonObject) -> list[str]:
    """What each layer mixes with."""
    n_layers = config.integer("num_hidden_layers")
    if config.get("layer_types", default=None) is not None:
        return config.strings("layer_types", length=n_layers, among=(_LINEAR, _FULL))
    linear = config.section("linear_attn_config")
    kda, full = linear.get("kda_layers"), linear.get("full_attn_layers")
    described = isinstance(kda, list) and isinstance(full, list) and all(type(n) is int for n in kda + full)
    if not described or sorted(kda + full) != list(range(1, n_layers + 1)):
        raise config.error(
            "the layers are not fully described", "linear_attn_config",
            expected=f"each of the layers 1 to {n_layers} in kda_layers or in full_attn_layers", found=linear.body,
        )  # fmt: skip
    return [_FULL if number in full else _LINEAR for number in range(1, n_layers + 1)]


def _mlp_types(config: JsonObject) -> list[str]:
    """Which layers have experts."""
    n_layers = config.integer("num_hidden_layers")
    if config.get("mlp_layer_types", default=None) is not None:
        return config.strings("mlp_layer_types", length=n_layers, among=(_DENSE, _SPARSE))
    if config.get("num_experts", "num_local_experts", default=None) is None:
        return [_DENSE] * n_layers
    config.require("moe_layer_freq", 1, default=1)
    n_dense = config.integer("first_k_dense_replace", default=1, minimum=0)
    return [_DENSE if index < n_dense else _SPARSE for index in range(n_layers)]
