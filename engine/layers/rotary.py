"""Rotary position embedding (Su et al. 2021), in the form that rotates the two halves of a head."""

from __future__ import annotations

import numpy as np

from engine.backend import Array, Backend

__all__ = ["Rotary"]


class Rotary:
    """Rotates pairs (i, i + d/2) of a head by position * theta^(-2i/d).

    Args:
        head_dim: d, even.
        theta: the base of the frequencies.
    """

    def __init__(self, head_dim: int, theta: float, backend: Backend) -> None:
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        # Angles are float32, as in training: at long contexts their rounding is part of the model.
        self._frequencies = backend.from_host((1.0 / np.float32(theta) ** exponents).astype(np.float32))
        self._xp = backend.xp

    def tables(self, start: int, stop: int) -> tuple[Array, Array]:
        """Cosines and sines for positions ``start`` to ``stop``, each [T, 1, d/2]."""
        xp = self._xp
        positions = xp.arange(start, stop, dtype=xp.float32)
        angles = positions[:, None, None] * self._frequencies
        return xp.cos(angles), xp.sin(angles)

    def rotate(self, x: Array, tables: tuple[Array, Array]) -> Array:
        """[T, n_heads, d] to [T, n_heads, d]; ``x`` is left as it is."""
        cos, sin = tables
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        y = self._xp.empty_like(x)
        y[..., :half] = first * cos - second * sin
        y[..., half:] = second * cos + first * sin
        return y
