"""MiniMax-01 (arXiv:2501.08313): lightning attention, every few layers grouped-query attention; experts.
MiniMax-M2: grouped-query attention throughout, queries and keys normed as whole vectors; experts by sigmoid.
"""

from __future__ import annotations

from engine.families.common import (
    EXPERT_RENAMES,
    FULL,
    LINEAR,
    head_dim,
    kv_heads,
    periodic_types,
    rope_spec,
    sigmoid_router,
    softmax_router,
)
from engine.jsonfile import JsonObject
from engine.layers.gqa import GqaSpec
from engine.layers.lightning import LightningSpec
from engine.layers.moe import MoeSpec
from engine.layers.router import RouterSpec
from engine.spec import LayerSpec, MixerSpec, ModelSpec, Residuals

__all__ = ["minimax_m2_spec", "minimax_spec"]

_RENAMES = (
    (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".block_sparse_moe.", ".mlp."),
    (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    *EXPERT_RENAMES,
)
# Tables that follow from the config.
_TABLES = ("self_attn.slope_rate", "self_attn.query_decay", "self_attn.key_decay", "self_attn.diagonal_decay")


def minimax_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``MiniMaxForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    config.require("sliding_window", None, default=None)
    hidden_size = config.integer("hidden_size")
    n_layers = config.integer("num_hidden_layers")
    n_heads = config.integer("num_attention_heads")
    dim = head_dim(config, hidden_size, n_heads)
    types = periodic_types(config, n_layers, 2, most=FULL, last=LINEAR)
    mlp = _moe(config, hidden_size, softmax_router(config, renormalise=True))
    full = _gqa(config, hidden_size, norm="")
    layers = []
    for index, kind in enumerate(types):
        mixer: MixerSpec = full if kind == FULL else LightningSpec(hidden_size, n_heads, dim, index, n_layers)
        name = "full" if kind == FULL else "linear"
        residuals = Residuals(
            from_normed=True,
            mixer_scales=(
                config.number(f"{name}_attn_alpha_factor", default=1.0),
                config.number(f"{name}_attn_beta_factor", default=1.0),
            ),
            mlp_scales=(config.number("mlp_alpha_factor", default=1.0), config.number("mlp_beta_factor", default=1.0)),
        )
        layers.append(LayerSpec(mixer, mlp, residuals))
    return _model(config, "minimax", hidden_size, layers)


def minimax_m2_spec(config: JsonObject) -> ModelSpec:
    """Read the config of a ``MiniMaxM2ForCausalLM``."""
    config.require("hidden_act", "silu", default="silu")
    hidden_size = config.integer("hidden_size")
    layer = LayerSpec(_gqa(config, hidden_size, norm="whole"), _moe(config, hidden_size, sigmoid_router(config)))
    return _model(config, "minimax_m2", hidden_size, [layer] * config.integer("num_hidden_layers"))


def _model(config: JsonObject, model_type: str, hidden_size: int, layers: list[LayerSpec]) -> ModelSpec:
    return ModelSpec(
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        max_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", default=False),
        layers=tuple(layers),
        renames=_RENAMES,
        ignored=(*_TABLES, "model.mtp."),
    )


def _gqa(config: JsonObject, hidden_size: int, *, norm: str) -> GqaSpec:
    n_heads = config.integer("num_attention_heads")
    dim = head_dim(config, hidden_size, n_heads)
    return GqaSpec(
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=kv_heads(config, n_heads),
        head_dim=dim,
        rope=rope_spec(config, dim),
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        norm=norm,
    )


def _moe(config: JsonObject, hidden_size: int, router: RouterSpec) -> MoeSpec:
    return MoeSpec(hidden_size=hidden_size, expert_size=config.integer("intermediate_size"), router=router)
