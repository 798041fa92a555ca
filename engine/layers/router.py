"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.backend import Array, Backend
from engine.layers.attention import softmax_rows
from engine.spec import Shapes, Weights

__all__ = ["Router", "RouterSpec", "SigmoidRouterSpec", "SoftmaxRouterSpec"]


class Router(Protocol):
    """Routes tokens."""

    def route(self, x: Array) -> tuple[Array, Array]:
        """[T, hidden_size] to each token's experts [T, top_k] and their weights [T, top_k]."""
        ...


class RouterSpec(Protocol):
    """Shapes and rules of a router."""

    @property
    def n_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...

    def weight_shapes(self, hidden_size: int) -> Shapes: ...

    def build(self, weights: Weights, backend: Backend) -> Router: ...


@dataclass(frozen=True)
class SigmoidRouterSpec:
    """Scores are sigmoids (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    A learned bias is added for the choice only, which first keeps the best groups of experts (by the sum of
    their two best scores), then the best experts in them; the weights are the scores without the bias.

    Attributes:
        n_groups, top_groups: groups of experts, and how many of them a token may choose from.
        renormalise: make a token's weights sum to 1 before ``scale``.
        scale: factor on the weights.
    """

    n_experts: int
    top_k: int
    n_groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0

    def weight_shapes(self, hidden_size: int) -> Shapes:
        return {"gate.weight": (self.n_experts, hidden_size), "gate.e_score_correction_bias": (self.n_experts,)}

    def build(self, weights: Weights, backend: Backend) -> _SigmoidRouter:
        return _SigmoidRouter(self, weights, backend)


class _SigmoidRouter:
    def __init__(self, spec: SigmoidRouterSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._weight_t = weights["gate.weight"].T
        self._choice_bias = weights["gate.e_score_correction_bias"]

    def route(self, x: Array) -> tuple[Array, Array]:
        """See :meth:`Router.route`."""
        spec, xp = self._spec, self._backend.xp
        scores = self._backend.sigmoid(x @ self._weight_t)
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


@dataclass(frozen=True)
class SoftmaxRouterSpec:
    """Scores are a softmax over all experts (Shazeer et al. 2017).

    Attributes:
        renormalise: make a token's weights sum to 1; it is then a softmax over the chosen.
        name: of the map; ``bias``: whether it has one.
    """

    n_experts: int
    top_k: int
    renormalise: bool = True
    name: str = "gate"
    bias: bool = False

    def weight_shapes(self, hidden_size: int) -> Shapes:
        shapes: Shapes = {f"{self.name}.weight": (self.n_experts, hidden_size)}
        if self.bias:
            shapes[f"{self.name}.bias"] = (self.n_experts,)
        return shapes

    def build(self, weights: Weights, backend: Backend) -> _SoftmaxRouter:
        return _SoftmaxRouter(self, weights, backend)


class _SoftmaxRouter:
    def __init__(self, spec: SoftmaxRouterSpec, weights: Weights, backend: Backend) -> None:
        self._spec = spec
        self._backend = backend
        self._weight_t = weights[f"{spec.name}.weight"].T
        self._bias = weights[f"{spec.name}.bias"] if spec.bias else None

    def route(self, x: Array) -> tuple[Array, Array]:
        """See :meth:`Router.route`."""
        spec, xp = self._spec, self._backend.xp
        scores = x @ self._weight_t
        if self._bias is not None:
            scores += self._bias
        chosen = xp.argpartition(scores, -spec.top_k, axis=-1)[:, -spec.top_k :]
        if spec.renormalise:
            return chosen, softmax_rows(xp.take_along_axis(scores, chosen, axis=-1), self._backend)
        return chosen, xp.take_along_axis(softmax_rows(scores, self._backend), chosen, axis=-1)
