"""A mixture of experts with shared ones, routed as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).

Every token goes to its ``top_k`` experts of all and to the shared experts. Scores are sigmoids of a linear
map. A learned bias is added for the choice only, which first keeps the best groups of experts (by the sum of
their two best scores), then the best experts in them; the weights are the scores without the bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.linear import linear_shapes
from engine.layers.mlp import GatedMlp
from engine.spec import Shapes, Weights

__all__ = ["Moe", "MoeSpec"]


@dataclass(frozen=True)
class MoeSpec:
    """Shapes and rules of an expert layer.

    Attributes:
        expert_size: inner size of one expert; the shared experts are one MLP of ``n_shared`` times that.
        top_k: experts a token.
        n_groups, top_groups: groups of experts, and how many of them a token may choose from.
        renormalise: make a token's weights sum to 1 before ``scale``.
        scale: factor on the routed experts' sum.
    """

    hidden_size: int
    expert_size: int
    n_experts: int
    n_shared: int
    top_k: int
    n_groups: int
    top_groups: int
    renormalise: bool
    scale: float

    def weight_shapes(self) -> Shapes:
        shared_size = self.n_shared * self.expert_size
        shapes: Shapes = {
            "gate.weight": (self.n_experts, self.hidden_size),
            "gate.e_score_correction_bias": (self.n_experts,),
            **linear_shapes("shared_experts.gate_proj", self.hidden_size, shared_size),
            **linear_shapes("shared_experts.up_proj", self.hidden_size, shared_size),
            **linear_shapes("shared_experts.down_proj", shared_size, self.hidden_size),
        }
        for expert in range(self.n_experts):
            # w1 is the gate, w3 the up projection, w2 the down projection (Mixtral's names).
            shapes |= linear_shapes(f"experts.{expert}.w1", self.hidden_size, self.expert_size)
            shapes |= linear_shapes(f"experts.{expert}.w3", self.hidden_size, self.expert_size)
            shapes |= linear_shapes(f"experts.{expert}.w2", self.expert_size, self.hidden_size)
        return shapes

    def build(self, weights: Weights, backend: Backend) -> Moe:
        return Moe(self, weights, backend)


class Moe:
    """The expert layer itself."""

    def __init__(self, spec: MoeSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._router_t = weights["gate.weight"].T
        self._choice_bias = weights["gate.e_score_correction_bias"]
        self._shared = GatedMlp(
            weights, backend, "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"
        )
        self._experts = [
            GatedMlp(weights, backend, f"experts.{e}.w1", f"experts.{e}.w3", f"experts.{e}.w2")
            for e in range(spec.n_experts)
        ]

    def forward(self, x: Array) -> Array:
        """[T, hidden_size] to [T, hidden_size]."""
        xp = self._backend.xp
        y = self._shared.forward(x)
        chosen, weights = self._route(x)
        for expert in xp.unique(chosen).tolist():
            tokens, slots = xp.nonzero(chosen == expert)
            # An expert appears once among a token's choices, so no row is added to twice.
            y[tokens] += self._experts[expert].forward(x[tokens]) * weights[tokens, slots, None]
        return y

    def _route(self, x: Array) -> tuple[Array, Array]:
        """Each token's experts [T, top_k] and their weights [T, top_k]."""
        spec, xp = self._spec, self._backend.xp
        scores = self._backend.sigmoid(x @ self._router_t)
        choice = scores + self._choice_bias
        if spec.n_groups > 1:
            grouped = choice.reshape(len(x), spec.n_groups, -1)
            group_scores = xp.partition(grouped, -2, axis=-1)[..., -2:].sum(axis=-1)
            kept = xp.argpartition(group_scores, -spec.top_groups, axis=-1)[:, -spec.top_groups :]
            closed = xp.ones((len(x), spec.n_groups), dtype=bool)
            closed[xp.arange(len(x))[:, None], kept] = False
            choice = xp.where(closed[..., None], np.float32(-np.inf), grouped).reshape(len(x), -1)
        chosen = xp.argpartition(choice, -spec.top_k, axis=-1)[:, -spec.top_k :]
        weights = xp.take_along_axis(scores, chosen, axis=-1)
        if spec.renormalise:
            weights /= weights.sum(axis=-1, keepdims=True) + np.float32(1e-20)
        weights *= np.float32(spec.scale)
        return chosen, weights
