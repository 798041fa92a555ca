"""A mixture of experts, each a gated MLP; every token goes to its chosen ones and to the shared ones, if any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.backend import Array, Backend
from engine.layers.linear import Linear, linear_shapes
from engine.layers.mlp import GatedMlp
from engine.layers.router import RouterSpec
from engine.spec import Shapes, Weights

__all__ = ["Moe", "MoeSpec", "run_experts"]

_MAPS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MoeSpec:
    """Shapes and rules of an expert layer.

    Attributes:
        expert_size: inner size of one expert.
        shared: name of the shared experts, which are one MLP; ``""`` if there are none.
        shared_size: its inner size.
        shared_gate: whether what it gives is scaled by a gate that comes from the input (Qwen3-Next).
    """

    hidden_size: int
    expert_size: int
    router: RouterSpec
    shared: str = ""
    shared_size: int = 0
    shared_gate: bool = False

    def weight_shapes(self) -> Shapes:
        shapes: Shapes = self.router.weight_shapes(self.hidden_size)
        experts = {f"experts.{e}": self.expert_size for e in range(self.router.n_experts)}
        for name, size in (experts | ({self.shared: self.shared_size} if self.shared else {})).items():
            shapes |= linear_shapes(f"{name}.gate_proj", self.hidden_size, size)
            shapes |= linear_shapes(f"{name}.up_proj", self.hidden_size, size)
            shapes |= linear_shapes(f"{name}.down_proj", size, self.hidden_size)
        if self.shared_gate:
            shapes |= linear_shapes(f"{self.shared}_gate", self.hidden_size, 1)
        return shapes

    def build(self, weights: Weights, backend: Backend) -> Moe:
        return Moe(self, weights, backend)


class Moe:
    """The expert layer itself."""

    def __init__(self, spec: MoeSpec, weights: Weights, backend: Backend) -> None:
        self._backend = backend
        self._router = spec.router.build(weights, backend)
        self._experts = [
            GatedMlp(weights, backend, *(f"experts.{e}.{name}" for name in _MAPS)) for e in range(spec.router.n_experts)
        ]
        self._shared = GatedMlp(weights, backend, *(f"{spec.shared}.{m}" for m in _MAPS)) if spec.shared else None
        self._shared_gate = Linear(weights, backend, f"{spec.shared}_gate") if spec.shared_gate else None

    def forward(self, x: Array) -> Array:
        """[T, hidden_size] to [T, hidden_size]."""
        if self._shared is None:
            y = self._backend.xp.zeros_like(x)
        else:
            y = self._shared.forward(x)
            if self._shared_gate is not None:
                y *= self._backend.sigmoid(self._shared_gate(x))
        chosen, weights = self._router.route(x)
        run_experts(x, y, chosen, weights, lambda expert, rows: self._experts[expert].forward(rows), self._backend)
        return y


def run_experts(
    x: Array, y: Array, chosen: Array, weights: Array, run: Callable[[int, Array], Array], backend: Backend
) -> None:
    """Add to ``y`` [T, hidden_size] what each token's experts give for its row of ``x``, weighted.

    Args:
        chosen, weights: [T, top_k].
        run: one expert on some rows.
    """
    xp = backend.xp
    if len(x) == 1:
        for expert, weight in zip(chosen[0].tolist(), weights[0], strict=True):
            y += run(expert, x) * weight
        return
    for expert in xp.unique(chosen).tolist():
        tokens, slots = xp.nonzero(chosen == expert)
        # An expert appears once among a token's choices, so no row is added to twice.
        y[tokens] += run(expert, x[tokens]) * weights[tokens, slots, None]
