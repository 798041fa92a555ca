"""Sliding-window attention: each token sees the last ``window`` tokens, itself included (Beltagy et al. 2020).

State: ``k`` and ``v`` of the last ``window`` tokens, oldest first, from row 0. After n tokens the first
min(n, window) rows count.
"""

from __future__ import annotations

from engine.backend import Array, Backend
from engine.layers.attention import banded_attention, softmax_rows
from engine.rows import Span
from engine.spec import LayerState

__all__ = ["WindowAttention"]


class WindowAttention:
    """One layer's attention, after projections and positions and before the output map.

    Args:
        window: tokens that a query sees.
        dtype: in which keys and values are kept.
        sinks: [n_heads], or None.
    """

    def __init__(self, window: int, dtype: str, sinks: Array | None, backend: Backend) -> None:
        self._window = window
        self._dtype = dtype
        self._sinks = sinks
        self._backend = backend

    def forward(self, q: Array, k: Array, v: Array, state: LayerState, span: Span) -> Array:
        """As :meth:`engine.layers.full_attention.FullAttention.forward`."""
        if span.n_rows == 1:
            return self._one(q, k, v, state, span)
        xb, xp, n_past = self._backend, self._backend.xp, min(span.start, self._window)
        keys = xp.concatenate([xb.load(state["k"][:n_past]), xb.rounded(k, self._dtype)])
        values = xp.concatenate([xb.load(state["v"][:n_past]), xb.rounded(v, self._dtype)])
        n_kept = min(span.stop, self._window)
        state["k"][:n_kept] = keys[-n_kept:]
        state["v"][:n_kept] = values[-n_kept:]
        if len(q) == 0:
            return q[:, 0]
        heads_first = xp.ascontiguousarray(q.transpose(1, 0, 2))
        out = banded_attention(heads_first, keys, values, len(keys) - len(q), self._window, xb, self._sinks)
        return out.transpose(1, 0, 2).reshape(len(q), -1)

    def _one(self, q: Array, k: Array, v: Array, state: LayerState, span: Span) -> Array:
        """One token: its row takes the place of the oldest, and all rows are seen."""
        xb, row = self._backend, min(span.start, self._window - 1)
        for name, values in (("k", k), ("v", v)):
            if span.start >= self._window:
                state[name][:-1] = state[name][1:].copy()
            xb.keep(state[name], slice(row, row + 1), values, self._dtype)
        if len(q) == 0:
            return q[:, 0]
        keys, values = xb.load(state["k"][: row + 1]), xb.load(state["v"][: row + 1])
        n_kv = keys.shape[1]
        sinks = None if self._sinks is None else self._sinks.reshape(n_kv, -1, 1)
        weights = softmax_rows(q[0].reshape(n_kv, -1, q.shape[2]) @ keys.transpose(1, 2, 0), xb, sinks)
        return (weights @ values.transpose(1, 0, 2)).reshape(1, -1)
