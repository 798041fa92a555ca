"""What the configs of several families have in common."""

from __future__ import annotations

from engine.jsonfile import JsonObject
from engine.layers.mlp import GatedMlpSpec
from engine.layers.moe import MoeSpec
from engine.layers.rope import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling, yarn_mscale
from engine.layers.router import RouterSpec, SigmoidRouterSpec, SoftmaxRouterSpec
from engine.spec import MlpSpec

__all__ = [
    "DENSE", "EXPERT_RENAMES", "FULL", "LINEAR", "SLIDING", "SPARSE", "dense_or_sparse", "head_dim", "kv_heads",
    "mlp_specs", "mscaled", "periodic_types", "rope_section", "rope_spec", "sigmoid_moe",
    "sigmoid_router", "softmax_router",
]  # fmt: skip

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"
# Mixtral's names for an expert's three maps.
EXPERT_RENAMES = ((".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))
_NO_ROPE: dict[str, object] = {}


def head_dim(config: JsonObject, hidden_size: int, n_heads: int) -> int:
    """``head_dim``, or an equal share of the hidden size."""
    return config.integer("head_dim", default=max(1, hidden_size // n_heads))


def kv_heads(config: JsonObject, n_heads: int, factor: int = 1) -> int:
    """``num_key_value_heads``, times a factor, checked to divide the heads."""
    n_kv = config.integer("num_key_value_heads", default=n_heads) * factor
    if n_heads % n_kv:
        raise config.error(
            "the heads cannot be grouped", "num_key_value_heads", expected=f"a divisor of {n_heads // factor}",
            found=n_kv // factor,
        )  # fmt: skip
    return n_kv


def rope_section(config: JsonObject) -> JsonObject:
    """Where rotary positions are described: ``rope_parameters``, or ``rope_scaling`` as older files have it."""
    return config.section("rope_parameters", "rope_scaling", default=_NO_ROPE)


def rope_spec(
    config: JsonObject, dim: int, *, rope: JsonObject | None = None, interleaved: bool = False, share: float = 1.0
) -> RopeSpec:
    """Rotary positions of heads with ``dim`` entries.

    Args:
        rope: the section that describes them, if it is not :func:`rope_section`.
        share: of the entries that are rotated, where the config does not say.
    """
    rope = rope_section(config) if rope is None else rope
    has_theta = rope.get("rope_theta", default=None) is not None
    theta = rope.number("rope_theta") if has_theta else config.number("rope_theta", default=10000.0)
    if rope.get("partial_rotary_factor", default=None) is not None:
        share = rope.number("partial_rotary_factor")
    elif config.get("rotary_dim", default=None) is not None:
        share = config.integer("rotary_dim") / dim
    elif config.get("partial_rotary_factor", default=None) is not None:
        share = config.number("partial_rotary_factor")
    rotated = int(dim * share)
    if rotated < 2 or rotated % 2 or rotated > dim:
        raise rope.error(
            "this share of a head cannot be rotated", "partial_rotary_factor",
            expected=f"an even number of {dim} entries", found=f"{rotated} entries",
        )  # fmt: skip
    return RopeSpec(rotated, theta, interleaved, _scaling(config, rope))


def _scaling(config: JsonObject, rope: JsonObject) -> RopeScaling | None:
    kind = rope.get("rope_type", "type", default="default")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.error(
            "this scaling of rotary positions is not supported", "rope_type",
            expected="default, linear, llama3 or yarn", found=kind, do="use a checkpoint of a supported variant",
        )  # fmt: skip
    factor = rope.number("factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = rope.get("original_max_position_embeddings", default=None)
    n_original = (rope if original is not None else config).integer(
        "original_max_position_embeddings", "max_position_embeddings"
    )
    if kind == "llama3":
        return Llama3Scaling(factor, rope.number("low_freq_factor"), rope.number("high_freq_factor"), n_original)
    if rope.get("attention_factor", default=None) is not None:
        magnitude = rope.number("attention_factor")
    elif rope.get("mscale", default=0) and rope.get("mscale_all_dim", default=0):
        all_dim = yarn_mscale(factor, rope.number("mscale_all_dim"))
        magnitude = yarn_mscale(factor, rope.number("mscale")) / all_dim
    else:
        magnitude = yarn_mscale(factor)
    return YarnScaling(
        factor, n_original, rope.number("beta_fast", default=32.0), rope.number("beta_slow", default=1.0),
        rope.flag("truncate", default=True), magnitude,
    )  # fmt: skip


def mscaled(config: JsonObject, scale: float) -> float:
    """The factor on scores, enlarged where YaRN's ``mscale_all_dim`` says so (DeepSeek)."""
    rope = rope_section(config)
    if rope.get("rope_type", "type", default="default") == "default" or not rope.get("mscale_all_dim", default=0):
        return scale
    mscale = yarn_mscale(rope.number("factor"), rope.number("mscale_all_dim"))
    return scale * mscale * mscale


def periodic_types(config: JsonObject, n_layers: int, period: int, *, most: str, last: str) -> list[str]:
    """``layer_types``, or else ``last`` for the last layer of every ``period`` and ``most`` for the others."""
    if config.get("layer_types", default=None) is not None:
        return config.strings("layer_types", length=n_layers, among=(most, last))
    return [last if (index + 1) % period == 0 else most for index in range(n_layers)]


def dense_or_sparse(config: JsonObject, n_layers: int, *, n_dense: int) -> list[str]:
    """``mlp_layer_types``, or else dense for the first ``first_k_dense_replace`` layers."""
    if config.get("mlp_layer_types", default=None) is not None:
        return config.strings("mlp_layer_types", length=n_layers, among=(DENSE, SPARSE))
    n_dense = config.integer("first_k_dense_replace", default=n_dense, minimum=0)
    return [DENSE if index < n_dense else SPARSE for index in range(n_layers)]


def mlp_specs(config: JsonObject, hidden_size: int, types: list[str], *, shared: bool) -> list[MlpSpec]:
    """A dense MLP or sigmoid-routed experts for each layer."""
    specs: dict[str, MlpSpec] = {}
    if DENSE in types:
        specs[DENSE] = GatedMlpSpec(hidden_size, config.integer("intermediate_size"))
    if SPARSE in types:
        specs[SPARSE] = sigmoid_moe(config, hidden_size, shared=shared)
    return [specs[kind] for kind in types]


def sigmoid_moe(config: JsonObject, hidden_size: int, *, shared: bool) -> MoeSpec:
    """Experts as DeepSeek-V3 has them, with or without shared ones."""
    expert_size = config.integer("moe_intermediate_size")
    n_shared = config.integer("num_shared_experts", "n_shared_experts", default=1) if shared else 0
    return MoeSpec(
        hidden_size=hidden_size,
        expert_size=expert_size,
        router=sigmoid_router(config),
        shared="shared_experts" if shared else "",
        shared_size=n_shared * expert_size,
    )


def sigmoid_router(config: JsonObject) -> RouterSpec:
    """With or without groups of experts."""
    spec = SigmoidRouterSpec(
        n_experts=config.integer("num_experts", "num_local_experts", "n_routed_experts"),
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


def softmax_router(config: JsonObject, *, renormalise: bool) -> RouterSpec:
    """Without groups."""
    spec = SoftmaxRouterSpec(
        config.integer("num_experts", "num_local_experts"), config.integer("num_experts_per_tok"), renormalise
    )
    if spec.top_k > spec.n_experts:
        raise config.error(
            "a token cannot have so many experts", "num_experts_per_tok",
            expected=f"up to {spec.n_experts}", found=spec.top_k,
        )  # fmt: skip
    return spec
