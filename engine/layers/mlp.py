"""The gated MLP (Shazeer 2020): down(act(gate(x)) * up(x)), with silu (SwiGLU) or gelu (GeGLU)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backend import Array, Backend
from engine.layers.linear import Linear, linear_shapes
from engine.spec import Shapes, Weights

__all__ = ["GatedMlp", "GatedMlpSpec"]


@dataclass(frozen=True)
class GatedMlpSpec:
    """Shapes of a gated MLP.

    Attributes:
        gelu: whether the gate passes gelu (its tanh form) instead of silu.
    """

    hidden_size: int
    inner_size: int
    bias: bool = False
    gelu: bool = False

    def weight_shapes(self) -> Shapes:
        return {
            **linear_shapes("gate_proj", self.hidden_size, self.inner_size, bias=self.bias),
            **linear_shapes("up_proj", self.hidden_size, self.inner_size, bias=self.bias),
            **linear_shapes("down_proj", self.inner_size, self.hidden_size, bias=self.bias),
        }

    def build(self, weights: Weights, backend: Backend) -> GatedMlp:
        return GatedMlp(weights, backend, "gate_proj", "up_proj", "down_proj", gelu=self.gelu)


class GatedMlp:
    """The MLP itself.

    Args:
        gate, up, down: the names of its three maps.
    """

    def __init__(
        self, weights: Weights, backend: Backend, gate: str, up: str, down: str, *, gelu: bool = False
    ) -> None:
        self._activation = backend.gelu if gelu else backend.silu
        self._gate_up = Linear(weights, backend, gate, up)
        self._down = Linear(weights, backend, down)

    def forward(self, x: Array) -> Array:
        """[T, hidden_size] to [T, hidden_size]."""
        gate_up = self._gate_up(x)
        inner_size = gate_up.shape[1] // 2
        y = self._activation(gate_up[:, :inner_size])
        y *= gate_up[:, inner_size:]
        return self._down(y)
