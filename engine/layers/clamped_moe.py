"""gpt-oss's mixture of experts: a clamped SwiGLU with biases, all experts' maps stored as one tensor.

An expert gives W_down [(u + 1) g sigmoid(a g)] + b, where g and u are every other entry of W_up x + b, clamped:
g from above, u from both sides. The router is a softmax over the chosen experts, with a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.backend import Array, Backend
from engine.layers.moe import run_experts
from engine.layers.router import SoftmaxRouterSpec
from engine.spec import Shapes, Weights

__all__ = ["ClampedMoe", "ClampedMoeSpec"]


@dataclass(frozen=True)
class ClampedMoeSpec:
    """Shapes and constants of the expert layer."""

    hidden_size: int
    expert_size: int
    n_experts: int
    top_k: int
    alpha: float
    limit: float

    @property
    def router(self) -> SoftmaxRouterSpec:
        return SoftmaxRouterSpec(self.n_experts, self.top_k, name="router", bias=True)

    def weight_shapes(self) -> Shapes:
        n, hidden, inner = self.n_experts, self.hidden_size, self.expert_size
        return {
            **self.router.weight_shapes(hidden),
            "experts.gate_up_proj": (n, hidden, 2 * inner),
            "experts.gate_up_proj_bias": (n, 2 * inner),
            "experts.down_proj": (n, inner, hidden),
            "experts.down_proj_bias": (n, hidden),
        }

    def build(self, weights: Weights, backend: Backend) -> ClampedMoe:
        return ClampedMoe(self, weights, backend)


class ClampedMoe:
    """The expert layer itself."""

    def __init__(self, spec: ClampedMoeSpec, weights: Weights, backend: Backend) -> None:
        xp = backend.xp
        self._backend = backend
        self._router = spec.router.build(weights, backend)
        both, bias = weights["experts.gate_up_proj"], weights["experts.gate_up_proj_bias"]
        self._gate_up = xp.concatenate([both[..., ::2], both[..., 1::2]], axis=-1)
        self._gate_up_bias = xp.concatenate([bias[..., ::2], bias[..., 1::2]], axis=-1)
        self._down, self._down_bias = weights["experts.down_proj"], weights["experts.down_proj_bias"]
        self._inner = spec.expert_size
        self._alpha, self._limit = np.float32(spec.alpha), np.float32(spec.limit)

    def forward(self, x: Array) -> Array:
        """[T, hidden_size] to [T, hidden_size]."""
        y = self._backend.xp.zeros_like(x)
        chosen, weights = self._router.route(x)
        run_experts(x, y, chosen, weights, self._expert, self._backend)
        return y

    def _expert(self, expert: int, x: Array) -> Array:
        xp = self._backend.xp
        gate_up = x @ self._gate_up[expert]
        gate_up += self._gate_up_bias[expert]
        gate = xp.minimum(gate_up[:, : self._inner], self._limit)
        up = xp.clip(gate_up[:, self._inner :], -self._limit, self._limit)
        up += np.float32(1.0)
        up *= gate
        up *= self._backend.sigmoid(gate * self._alpha)
        y = up @ self._down[expert]
        y += self._down_bias[expert]
        return y
