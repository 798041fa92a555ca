"""Attention over every token so far: rows of keys and values that grow with the sequence."""

from __future__ import annotations

from engine.backend import Array, Backend
from engine.layers.attention import causal_attention, softmax_rows
from engine.rows import Span
from engine.spec import LayerState

__all__ = ["FullAttention"]


class FullAttention:
    """One layer's attention, after projections and positions and before the output map.

    Args:
        dtype: in which keys and values are kept.
        sinks: [n_heads], or None.
    """

    def __init__(self, dtype: str, sinks: Array | None, backend: Backend) -> None:
        self._dtype = dtype
        self._sinks = sinks
        self._backend = backend

    def forward(self, q: Array, k: Array, v: Array, state: LayerState, span: Span) -> Array:
        """Keep the span's keys and values; attend for its last rows.

        Args:
            q: [n_out, n_heads, d], scaled.
            k, v: [span.n_rows, n_kv_heads, d] and [..., d_v].

        Returns:
            [n_out, n_heads * d_v]
        """
        xb, own = self._backend, slice(span.start, span.stop)
        xb.keep(state["k"], own, k, self._dtype)
        xb.keep(state["v"], own, v, self._dtype)
        if len(q) == 0:
            return q[:, 0]
        keys, values = state["k"][: span.stop], state["v"][: span.stop]
        if len(q) == 1:
            return self._one(q[0], xb.load(keys), xb.load(values))

        def tile(lo: int, hi: int) -> tuple[Array, Array]:
            return xb.load(keys[lo:hi]).transpose(1, 0, 2), xb.load(values[lo:hi]).transpose(1, 0, 2)

        heads_first = xb.xp.ascontiguousarray(q.transpose(1, 0, 2))
        out = causal_attention(heads_first, tile, span.stop - len(q), v.shape[2], xb, self._sinks)
        return out.transpose(1, 0, 2).reshape(len(q), -1)

    def _one(self, q: Array, k: Array, v: Array) -> Array:
        """[n_heads, d], the query of the last token; returns [1, n_heads * d_v]."""
        n_kv = k.shape[1]
        sinks = None if self._sinks is None else self._sinks.reshape(n_kv, -1, 1)
        weights = softmax_rows(q.reshape(n_kv, -1, q.shape[1]) @ k.transpose(1, 2, 0), self._backend, sinks)
        return (weights @ v.transpose(1, 0, 2)).reshape(1, -1)
