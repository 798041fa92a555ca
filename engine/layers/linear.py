"""A linear map, and several of the same input as one."""

from __future__ import annotations

from engine.backend import Array, Backend
from engine.spec import Shapes, Weights

__all__ = ["Linear", "linear_shapes"]


def linear_shapes(name: str, n_in: int, n_out: int, *, bias: bool = False) -> Shapes:
    """The weights of one map, as checkpoints name and shape them."""
    shapes: Shapes = {f"{name}.weight": (n_out, n_in)}
    if bias:
        shapes[f"{name}.bias"] = (n_out,)
    return shapes


class Linear:
    """y = x W^T + b, for one or more maps side by side.

    Maps of the same input are joined into one product: BLAS is faster on it, and a decode step, which is
    bound by the cost of calls, makes fewer.

    Args:
        names: the maps, whose outputs follow one another.
    """

    def __init__(self, weights: Weights, backend: Backend, *names: str) -> None:
        xp = backend.xp
        stacked = [weights[f"{name}.weight"] for name in names]
        self._backend = backend
        self._weight: Array = stacked[0] if len(stacked) == 1 else xp.concatenate(stacked)
        biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
        self._bias: Array | None = xp.concatenate(biases) if biases else None

    def __call__(self, x: Array) -> Array:
        """[T, n_in] to [T, n_out]."""
        y = self._backend.product(x, self._weight)
        if self._bias is not None:
            y += self._bias
        return y

    def part(self, x: Array, first: int, stop: int | None) -> Array:
        """Some of the outputs: [T, n_in] to [T, stop - first]."""
        y = self._backend.product(x, self._weight[first:stop])
        if self._bias is not None:
            y += self._bias[first:stop]
        return y
