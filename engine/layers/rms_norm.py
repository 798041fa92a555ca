"""Root-mean-square normalisation: x / sqrt(mean(x^2) + eps) * w, over the last axis."""

from __future__ import annotations

import numpy as np

from engine.backend import Array, Backend

__all__ = ["RmsNorm", "unit_norm"]


class RmsNorm:
    """The norm with its learned scale [n]."""

    def __init__(self, weight: Array, eps: float, backend: Backend) -> None:
        self._weight = weight
        self._eps = np.float32(eps)
        self._inverse_n = np.float32(1.0 / weight.shape[-1])
        self._xp = backend.xp

    def __call__(self, x: Array) -> Array:
        """[..., n] to [..., n]; ``x`` is left as it is."""
        xp = self._xp
        # einsum sums the squares without storing them.
        scale = xp.einsum("...n,...n->...", x, x)
        scale *= self._inverse_n
        scale += self._eps
        xp.sqrt(scale, out=scale)
        y = x / scale[..., None]
        y *= self._weight
        return y


def unit_norm(x: Array, backend: Backend, eps: float = 1e-6) -> Array:
    """x / sqrt(sum(x^2) + eps) over the last axis: the norm of KDA's queries and keys."""
    xp = backend.xp
    scale = xp.einsum("...n,...n->...", x, x)
    scale += np.float32(eps)
    xp.sqrt(scale, out=scale)
    return x / scale[..., None]
