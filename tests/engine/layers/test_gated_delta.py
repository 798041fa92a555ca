"""Gated delta rule with one decay a head, and lightning attention: chunks against steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backend import NUMPY
from engine.layers.gated_delta import gated_delta_chunks, gated_delta_step
from engine.layers.lightning import Lightning, LightningSpec
from engine.rows import Rows

H, D_K, D_V = 3, 16, 8


def inputs(n_tokens: int, decay: float) -> list[Any]:
    """q, k of unit length, v, log-decays up to ``-decay`` a token, learning rates."""
    draw = np.random.default_rng(n_tokens)
    q, k = draw.standard_normal((2, n_tokens, H, D_K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, b = -decay * draw.random((n_tokens, H)), draw.random((n_tokens, H))
    return [x.astype(np.float32) for x in (q / 4, k, draw.standard_normal((n_tokens, H, D_V)), g, b)]


@pytest.mark.parametrize("decay", [0.0, 0.1, 3.0, 200.0])
@pytest.mark.parametrize("n_tokens", [2, 8, 63, 64, 65, 200])
def test_chunks_are_steps(n_tokens: int, decay: float) -> None:
    """Outputs and state, from a state that is not zero; with decay so strong that nothing is left after a token."""
    q, k, v, g, b = inputs(n_tokens, decay)
    start = np.random.default_rng(1).standard_normal((H, D_K, D_V)).astype(np.float32)
    stepped, chunked = start.copy(), start.copy()
    expected = [gated_delta_step(q[t], k[t], v[t], g[t], b[t], stepped, NUMPY) for t in range(n_tokens)]
    out = gated_delta_chunks(q, k, v, g, b, chunked, NUMPY)
    np.testing.assert_allclose(out, expected, atol=2e-4)
    np.testing.assert_allclose(chunked, stepped, atol=2e-4)


def test_repeated_keys_stay_stable() -> None:
    """The same key a thousand times, learned at full rate, without decay: the state holds the last value."""
    _, k, v, _, _ = inputs(1000, 0.0)
    k[:] = k[0]
    state = np.zeros((H, D_K, D_V), np.float32)
    ones, zeros = np.ones((1000, H), np.float32), np.zeros((1000, H), np.float32)
    out = gated_delta_chunks(k.copy(), k, v, zeros, ones, state, NUMPY)
    np.testing.assert_allclose(out, v, atol=1e-3)


@pytest.mark.parametrize("cut", [1, 3, 127, 128, 129, 300])
def test_lightning_attention_in_pieces(cut: int) -> None:
    """In pieces of any length it is what it is token by token."""
    spec = LightningSpec(hidden_size=24, n_heads=4, head_dim=6, layer_index=1, n_layers=3)
    draw = np.random.default_rng(0)
    weights = {n: (draw.standard_normal(s) / 5).astype(np.float32) for n, s in spec.weight_shapes().items()}
    layer: Lightning = spec.build(weights, NUMPY)
    x = draw.standard_normal((300, 24)).astype(np.float32)

    def run(size: int) -> tuple[Any, Any]:
        state = {"recurrent": np.zeros((4, 6, 6), np.float32)}
        pieces = [
            layer.forward(x[i : i + size], [state], Rows([(i, len(x[i : i + size]))], NUMPY), len(x[i : i + size]))
            for i in range(0, 300, size)
        ]
        return np.concatenate(pieces), state["recurrent"]

    (whole, whole_state), (pieces, state) = run(1), run(cut)
    np.testing.assert_allclose(pieces, whole, atol=1e-4)
    np.testing.assert_allclose(state, whole_state, atol=1e-4)


def test_heads_forget_at_different_rates_and_late_layers_less() -> None:
    """2^(-8 (h + 1) / H) in the first layer; next to nothing in the last."""
    first, last = (LightningSpec(8, 4, 2, index, 10).rates() for index in (0, 9))
    np.testing.assert_allclose(first, [2**-2, 2**-4, 2**-6, 2**-8], rtol=1e-4)
    assert (last < 1e-4 * first).all() and (last > 0).all()
