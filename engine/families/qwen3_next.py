"""Qwen3-Next and Qwen3.5 (text): Gated DeltaNet, every few layers gated grouped-query attention.

Qwen3-Next has experts, with a gated shared one; Qwen3.5 dense MLPs or the same experts. Norms are stored minus 1.
With text alone Qwen3.5's three-part positions are all the same number, so they are ordinary ones.
"""

from __future__ import annotations

from engine.families.common import FULL, LINEAR, head_dim, kv_heads, periodic_types, rope_spec, softmax_router
from engine.jsonfile import JsonObject
from engine.layers.gdn import GdnSpec
from engine.layers.gqa import GqaSpec
from engine.layers.mlp import GatedMlpSpec
from engine.layers.moe import MoeSpec
from engine.spec import LayerSpec, MixerSpec, MlpSpec, ModelSpec, Residuals

__all__ = ["qwen3_5_moe_spec", "qwen3_5_spec", "qwen3_next_spec"]

_RENAMES = ((".linear_attn.", ".self_attn."), ("model.language_model.", "model."))
_IGNORED = ("mtp.",)


def qwen3_next_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``Qwen3NextForCausalLM``."""
    return _spec(config, "qwen3_next", _sparse_layers(config), grouped=True)


def qwen3_5_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``Qwen3_5ForCausalLM``."""
    return _spec(config, "qwen3_5_text", set(), grouped=False)


def qwen3_5_moe_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``Qwen3_5MoeForCausalLM``."""
    return _spec(config, "qwen3_5_moe_text", set(range(config.integer("num_hidden_layers"))), grouped=False)


def _sparse_layers(config: JsonObject) -> set[int]:
    """The layers with experts."""
    dense = config.get("mlp_only_layers", default=[])
    step = config.integer("decoder_sparse_step", default=1)
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise config.error("an entry has the wrong value", "mlp_only_layers", expected="layer numbers", found=dense)
    return {i for i in range(config.integer("num_hidden_layers")) if i not in dense and (i + 1) % step == 0}


def _spec(config: JsonObject, model_type: str, sparse: set[int], *, grouped: bool) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    norm_eps = config.number("rms_norm_eps", default=1e-6)
    period = config.integer("full_attention_interval", default=4)
    types = periodic_types(config, n_layers, period, most=LINEAR, last=FULL)
    mixers: dict[str, MixerSpec] = {
        LINEAR: _gdn(config, hidden_size, norm_eps, grouped=grouped),
        FULL: _gqa(config, hidden_size, norm_eps),
    }
    mlps: dict[bool, MlpSpec] = {}
    if sparse:
        mlps[True] = _moe(config, hidden_size)
    if len(sparse) < n_layers:
        mlps[False] = GatedMlpSpec(hidden_size, config.integer("intermediate_size"))
    residuals = Residuals(norm_offset=1.0)
    return ModelSpec(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=norm_eps,
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=tuple(LayerSpec(mixers[kind], mlps[i in sparse], residuals) for i, kind in enumerate(types)),
        renames=_RENAMES,
        norm_offset=1.0,
        ignored=_IGNORED,
    )


def _gdn(config: JsonObject, hidden_size: int, norm_eps: float, *, grouped: bool) -> GdnSpec:
    n_k, n_v = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if n_v % n_k:
        raise config.error(
            "the heads cannot be grouped", "linear_num_key_heads", expected=f"a divisor of {n_v}", found=n_k
        )
    return GdnSpec(
        hidden_size=hidden_size,
        n_k_heads=n_k,
        n_v_heads=n_v,
        k_dim=config.integer("linear_key_head_dim"),
        v_dim=config.integer("linear_value_head_dim"),
        conv_kernel=config.integer("linear_conv_kernel_dim", default=4, minimum=2),
        norm_eps=norm_eps,
        grouped=grouped,
    )


def _gqa(config: JsonObject, hidden_size: int, norm_eps: float) -> GqaSpec:
    n_heads = config.integer("num_attention_heads")
    bias = config.flag("attention_bias", default=False)
    dim = head_dim(config, hidden_size, n_heads)
    return GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads(config, n_heads),
        head_dim=dim,
        rope=rope_spec(config, dim, share=0.25),
        norm_eps=norm_eps,
        norm="head",
        norm_offset=1.0,
        bias=bias,
        out_bias=bias,
        gated=True,
    )


def _moe(config: JsonObject, hidden_size: int) -> MoeSpec:
    return MoeSpec(
        hidden_size=hidden_size,
        expert_size=config.integer("moe_intermediate_size"),
        router=softmax_router(config, renormalise=config.flag("norm_topk_prob", default=True)),
        shared="shared_expert",
        shared_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
