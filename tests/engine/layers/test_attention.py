"""Tiled attention is attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backend import NUMPY
from engine.layers.attention import banded_attention, causal_attention, softmax_rows


def plain(q: Any, k: Any, v: Any, start: int) -> Any:
    """The definition, in float64."""
    n_heads, n_rows, _ = q.shape
    k, v = (np.repeat(x.astype(np.float64), n_heads // len(x), axis=0) for x in (k, v))
    scores = q.astype(np.float64) @ k.transpose(0, 2, 1)
    seen = np.arange(k.shape[1]) <= start + np.arange(n_rows)[:, None]
    weights = np.exp(np.where(seen, scores - scores.max(axis=-1, keepdims=True), -np.inf))
    return weights @ v / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("start", "n_rows"), [(0, 1), (0, 300), (5, 129), (1024, 10), (2500, 260)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_tiles_give_what_one_matrix_gives(start: int, n_rows: int, scale: float) -> None:
    """Over past and diagonal tiles, whole and partial, with shared heads, for flat and for sharp scores."""
    draw = np.random.default_rng(start)
    q = (scale * draw.standard_normal((4, n_rows, 8))).astype(np.float32)
    k, v = (draw.standard_normal((2, start + n_rows, d)).astype(np.float32) for d in (8, 5))
    out = causal_attention(q, lambda lo, hi: (k[:, lo:hi], v[:, lo:hi]), start, 5, NUMPY)
    np.testing.assert_allclose(out, plain(q, k, v, start), atol=5e-5)


def test_tiles_are_bounded() -> None:
    """No tile asks for more than 1024 keys, and together they ask for each key once."""
    asked = []

    def keys(lo: int, hi: int) -> tuple[Any, Any]:
        asked.append((lo, hi))
        return np.zeros((1, hi - lo, 2), np.float32), np.zeros((1, hi - lo, 2), np.float32)

    causal_attention(np.zeros((1, 700, 2), np.float32), keys, 3000, 2, NUMPY)
    assert max(hi - lo for lo, hi in asked) <= 1024
    assert [lo for lo, _ in asked] == [0, *(hi for _, hi in asked[:-1])]
    assert asked[-1][1] == 3700


def test_softmax_does_not_overflow() -> None:
    """Large scores are shifted first."""
    scores = np.array([[1000.0, 1000.0, -1000.0]], dtype=np.float32)
    np.testing.assert_allclose(softmax_rows(scores, NUMPY), [[0.5, 0.5, 0.0]])


@pytest.mark.parametrize(
    ("n_before", "n_rows", "window"), [(0, 5, 3), (0, 300, 32), (31, 300, 32), (7, 1, 8), (40, 129, 200)]
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_band_gives_what_one_masked_matrix_gives(n_before: int, n_rows: int, window: int, with_sinks: bool) -> None:
    """Each query sees its window; a sink takes weight and gives nothing."""
    draw = np.random.default_rng(n_rows)
    q, k, v = (draw.standard_normal(s) for s in ((4, n_rows, 6), (n_before + n_rows, 2, 6), (n_before + n_rows, 2, 5)))
    sinks = draw.standard_normal(4) if with_sinks else None
    own, seen = np.arange(n_before, n_before + n_rows)[:, None], np.arange(n_before + n_rows)
    mask = (seen <= own) & (seen > own - window)
    expected = np.empty((4, n_rows, 5))
    for head in range(4):
        weights = np.where(mask, np.exp(q[head] @ k[:, head // 2].T), 0.0)
        total = weights.sum(axis=1) + (np.exp(sinks[head]) if sinks is not None else 0.0)
        expected[head] = weights @ v[:, head // 2] / total[:, None]
    qs, ks, vs = (x.astype(np.float32) for x in (q, k, v))
    narrow = None if sinks is None else sinks.astype(np.float32)
    out = banded_attention(qs, ks, vs, n_before, window, NUMPY, narrow)
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_sinks_in_tiles() -> None:
    """The running sums begin with the sink."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal(s).astype(np.float32) for s in ((4, 300, 6), (2, 340, 6), (2, 340, 5)))
    sinks = draw.standard_normal(4).astype(np.float32)
    out = causal_attention(q, lambda lo, hi: (k[:, lo:hi], v[:, lo:hi]), 40, 5, NUMPY, sinks)
    for head in range(4):
        scores = np.exp((q[head] @ k[head // 2].T).astype(np.float64))
        scores[np.arange(340) > np.arange(40, 340)[:, None]] = 0
        expected = scores @ v[head // 2] / (scores.sum(axis=1) + np.exp(sinks[head]))[:, None]
        np.testing.assert_allclose(out[head], expected, atol=1e-4)
