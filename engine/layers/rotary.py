"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import numpy as np

from engine.backend import Array, Backend
from engine.layers.rope import RopeSpec

__all__ = ["Rotary"]


class Rotary:
    """Rotates the first ``dim`` entries of a head, pair by pair, by position times frequency."""

    def __init__(self, spec: RopeSpec, backend: Backend) -> None:
        self.key = spec
        # Angles are float32, as in training: at long contexts their rounding is part of the model.
        self._frequencies = backend.from_host(spec.frequencies())
        self._xp = backend.xp

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """Cosines and sines for positions [T], each [T, 1, dim/2]."""
        xp = self._xp
        angles = positions[:, None, None] * self._frequencies
        cos, sin = xp.cos(angles), xp.sin(angles)
        if self.key.magnitude != 1.0:
            cos *= np.float32(self.key.magnitude)
            sin *= np.float32(self.key.magnitude)
        return cos, sin

    def rotate(self, x: Array, tables: tuple[Array, Array]) -> Array:
        """[T, n_heads, d] to [T, n_heads, d]; ``x`` is left as it is."""
        cos, sin = tables
        dim, half = self.key.dim, self.key.dim // 2
        if self.key.interleaved:
            first, second = x[..., 0:dim:2], x[..., 1:dim:2]
        else:
            first, second = x[..., :half], x[..., half:dim]
        y = self._xp.empty(x.shape, dtype=np.float32)
        y[..., :half] = first * cos
        y[..., :half] -= second * sin
        y[..., half:dim] = second * cos
        y[..., half:dim] += first * sin
        if dim < x.shape[-1]:
            y[..., dim:] = x[..., dim:]
        return y
