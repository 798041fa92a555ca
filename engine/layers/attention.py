"""Causal softmax attention in tiles, with bounded memory whatever the length.

Prefill runs over key tiles with a running maximum and sum (online softmax: Milakov and Gimelshein 2018, as
in FlashAttention), so no more than one tile of scores exists at a time. Decode has one query a head and
needs no tiles.

A *sink* (Xiao et al. 2023, as gpt-oss has it) is one more score of each head, whose value is nothing: it only
takes weight away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from engine.backend import Array, Backend

__all__ = ["KeyTile", "banded_attention", "causal_attention", "softmax_rows"]

# Keys and values of tokens ``lo`` to ``hi``: [n_kv_heads, hi - lo, d] and [n_kv_heads, hi - lo, d_v].
KeyTile: TypeAlias = Callable[[int, int], tuple[Array, Array]]

# A tile of scores, 512 rows by 1024 keys, is 2 MiB: the size at which the five passes over it cost least.
_TILE_KEYS = 1024
# On the diagonal half of a tile is masked and wasted, so tiles are smaller there.
_DIAGONAL_KEYS = 128
_BAND_ROWS = 128


def softmax_rows(scores: Array, backend: Backend, sinks: Array | None = None) -> Array:
    """Softmax over the last axis, in place; ``sinks`` has the shape of ``scores`` with 1 as its last axis."""
    xp = backend.xp
    high = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        high = xp.maximum(high, sinks)
    scores -= high
    xp.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += xp.exp(sinks - high)
    scores /= total
    return scores


def causal_attention(
    q: Array, keys: KeyTile, start: int, d_v: int, backend: Backend, sinks: Array | None = None
) -> Array:
    """softmax(q k^T) v for consecutive queries, each seeing every token up to and with its own.

    Args:
        q: [n_heads, T, d], already scaled by 1/sqrt(d); row t stands at token ``start + t``.
        keys: gives keys and values of a range of tokens. Head h of q uses head h * n_kv_heads // n_heads.
        d_v: size of a value.
        sinks: [n_heads].

    Returns:
        [n_heads, T, d_v]
    """
    xp = backend.xp
    n_heads, n_rows, _ = q.shape
    out = xp.zeros((n_heads, n_rows, d_v), dtype=xp.float32)
    high = xp.full((n_heads, n_rows, 1), -np.inf, dtype=xp.float32)
    total = xp.zeros((n_heads, n_rows, 1), dtype=xp.float32)
    if sinks is not None:
        high[...] = sinks[:, None, None]
        total += np.float32(1.0)
    mask = xp.triu(xp.full((_DIAGONAL_KEYS, _DIAGONAL_KEYS), -np.inf, dtype=xp.float32), 1)
    for lo, hi in _tiles(start, start + n_rows):
        k, v = keys(lo, hi)
        first = max(0, lo - start)  # earlier rows see nothing of this tile
        masked = mask[: hi - lo, : hi - lo] if lo >= start else None
        group = n_heads // k.shape[0]
        for head in range(n_heads):
            rows = (slice(first, None),)
            _add_tile(
                q[head][rows], k[head // group], v[head // group], masked,
                out[head][rows], high[head][rows], total[head][rows], backend,
            )  # fmt: skip
    out /= total
    return out


def banded_attention(
    q: Array, k: Array, v: Array, n_before: int, window: int, backend: Backend, sinks: Array | None = None
) -> Array:
    """softmax(q k^T) v where each query sees the last ``window`` tokens, its own included. Linear in T.

    Args:
        q: [n_heads, T, d], scaled.
        k, v: [n_before + T, n_kv_heads, d] and [..., d_v]: the tokens before the queries, then their own.
        sinks: [n_heads].

    Returns:
        [n_heads, T, d_v]
    """
    xp = backend.xp
    n_heads, n_rows, d = q.shape
    n_kv, d_v = k.shape[1], v.shape[2]
    grouped = q.reshape(n_kv, n_heads // n_kv, n_rows, d)
    out = xp.empty((n_kv, n_heads // n_kv, n_rows, d_v), dtype=xp.float32)
    column = None if sinks is None else sinks.reshape(n_kv, -1, 1, 1)
    for first in range(0, n_rows, _BAND_ROWS):
        last = min(first + _BAND_ROWS, n_rows)
        lo, hi = max(0, n_before + first - window + 1), n_before + last
        scores = grouped[:, :, first:last] @ k[lo:hi].transpose(1, 2, 0)[:, None]
        own = xp.arange(n_before + first, n_before + last)[:, None]
        seen = xp.arange(lo, hi)[None]
        scores += xp.where((seen <= own) & (seen > own - window), np.float32(0.0), np.float32(-np.inf))
        out[:, :, first:last] = softmax_rows(scores, backend, column) @ v[lo:hi].transpose(1, 0, 2)[:, None]
    return out.reshape(n_heads, n_rows, d_v)


def _tiles(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Key ranges for queries at ``start`` to ``stop``: large ones before them, small ones along the diagonal."""
    for lo in range(0, start, _TILE_KEYS):
        yield lo, min(lo + _TILE_KEYS, start)
    for lo in range(start, stop, _DIAGONAL_KEYS):
        yield lo, min(lo + _DIAGONAL_KEYS, stop)


def _add_tile(
    q: Array, k: Array, v: Array, mask: Array | None, out: Array, high: Array, total: Array, backend: Backend
) -> None:
    """Bring one head's running sums up to date with one tile of keys.

    Args:
        q, k, v: [rows, d], [keys, d], [keys, d_v].
        mask: added to the first rows, which lie on the diagonal.
        out, high, total: [rows, d_v], [rows, 1], [rows, 1]: sum of exp(score - high) v, the maximum so far,
            and the sum of exp(score - high). Changed in place.
    """
    xp = backend.xp
    scores = q @ k.T
    if mask is not None:
        scores[: mask.shape[0]] += mask
    new_high = xp.maximum(high, scores.max(axis=-1, keepdims=True))
    scores -= new_high
    xp.exp(scores, out=scores)
    decay = xp.exp(high - new_high)
    total *= decay
    total += scores.sum(axis=-1, keepdims=True)
    out *= decay
    out += scores @ v
    high[...] = new_high
