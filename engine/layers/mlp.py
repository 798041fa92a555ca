"""The gated MLP (SwiGLU, Shazeer 2020): down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend import Array, Backend
from engine.layers.linear import Linear, linear_shapes
from engine.spec import Shapes, Weights

__all__ = ["GatedMlp", "GatedMlpSpec"]


@dataclass(frozen=True)
class GatedMlpSpec:
    """Shapes of a gated MLP."""

    hidden_size: int
    inner_size: int

    def weight_shapes(self) -> Shapes:
        return {
            **linear_shapes("gate_proj", self.hidden_size, self.inner_size),
            **linear_shapes("up_proj", self.hidden_size, self.inner_size),
            **linear_shapes("down_proj", self.inner_size, self.hidden_size),
        }

    def build(self, weights: Weights, backend: Backend) -> GatedMlp:
        return GatedMlp(weights, backend, "gate_proj", "up_proj", "down_proj")


class GatedMlp:
    """The MLP itself.

    Args:
        gate, up, down: the names of its three maps.
    """

    def __init__(self, weights: Weights, backend: Backend, gate: str, up: str, down: str) -> None:
        self._backend = backend
        self._gate_up = Linear(weights, backend, gate, up)
        self._down = Linear(weights, backend, down)

    def forward(self, x: Array) -> Array:
        """[T, hidden_size] to [T, hidden_size]."""
        gate_up = self._gate_up(x)
        inner_size = gate_up.shape[1] // 2
        y = self._backend.silu(gate_up[:, :inner_size])
        y *= gate_up[:, inner_size:]
        return self._down(y)
