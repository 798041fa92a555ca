"""The chunked delta rule is the recurrence, also where a careless form overflows or cancels."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest

from engine.backend import NUMPY
from engine.layers.delta_rule import delta_rule_chunks, delta_rule_step

Floats: TypeAlias = np.ndarray[Any, Any]
Inputs: TypeAlias = tuple[Floats, Floats, Floats, Floats, Floats]

N_HEADS, D_K, D_V = 2, 8, 6


def make_inputs(n_tokens: int, decay: str = "mild", *, same_key: bool = False, seed: int = 0) -> Inputs:
    """Queries, keys (of unit length), values, log-decays, learning rates."""
    draw = np.random.default_rng(seed)
    q: Floats = draw.standard_normal((n_tokens, N_HEADS, D_K))
    k: Floats = draw.standard_normal((n_tokens, N_HEADS, D_K))
    if same_key:
        k[:] = k[0]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v: Floats = draw.standard_normal((n_tokens, N_HEADS, D_V))
    uniform = draw.uniform(size=(n_tokens, N_HEADS, D_K))
    g: Floats = {
        "none": np.zeros_like(uniform),
        "mild": -0.2 * uniform,
        "strong": -60.0 * uniform,
        "huge": -1000.0 * uniform,
        # Now and then all is forgotten, in some channels, and little in between.
        "bursts": np.where(uniform < 0.1, -2000.0, -0.05 * uniform),
    }[decay]
    beta: Floats = np.full((n_tokens, N_HEADS), 0.999) if same_key else draw.uniform(size=(n_tokens, N_HEADS))
    single = [x.astype(np.float32) for x in (q, k, v, g, beta)]
    return single[0], single[1], single[2], single[3], single[4]


def recurrence(inputs: Inputs, state: Floats) -> tuple[Floats, Floats]:
    """The definition, token by token in float64. ``state`` is left as it is."""
    q, k, v, g, beta = (x.astype(np.float64) for x in inputs)
    state, out = state.astype(np.float64), np.zeros(v.shape)
    for t in range(len(q)):
        state = state * np.exp(g[t])[..., None]
        read = np.einsum("hk,hkv->hv", k[t], state)
        state = state + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return out, state


def random_state() -> Floats:
    return np.random.default_rng(9).standard_normal((N_HEADS, D_K, D_V)).astype(np.float32)


@pytest.mark.parametrize("n_tokens", [2, 8, 9, 31, 64, 65, 200])
def test_chunks_are_the_recurrence(n_tokens: int) -> None:
    """For every length, full chunks or not, from a state that is not zero."""
    inputs, state = make_inputs(n_tokens), random_state()
    expected_out, expected_state = recurrence(inputs, state)
    out = delta_rule_chunks(*inputs, state, NUMPY)
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


@pytest.mark.parametrize("decay", ["none", "mild", "strong", "huge", "bursts"])
def test_no_decay_is_too_strong(decay: str) -> None:
    """Nothing overflows, and what little is left is right."""
    inputs, state = make_inputs(150, decay), random_state()
    expected_out, expected_state = recurrence(inputs, state)
    out = delta_rule_chunks(*inputs, state, NUMPY)
    np.testing.assert_allclose(out, expected_out, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


@pytest.mark.parametrize("decay", ["none", "mild"])
def test_a_repeated_key_is_harmless(decay: str) -> None:
    """Where a power series for the inverse has terms of 1e18 that must cancel."""
    inputs, state = make_inputs(192, decay, same_key=True), random_state()
    expected_out, expected_state = recurrence(inputs, state)
    out = delta_rule_chunks(*inputs, state, NUMPY)
    np.testing.assert_allclose(out, expected_out, atol=1e-4)
    np.testing.assert_allclose(state, expected_state, atol=1e-4)


@pytest.mark.parametrize("decay", ["mild", "bursts"])
def test_steps_are_the_recurrence(decay: str) -> None:
    """One token at a time, in place."""
    inputs, state = make_inputs(20, decay), random_state()
    expected_out, expected_state = recurrence(inputs, state)
    q, k, v, g, beta = inputs
    for t in range(20):
        out = delta_rule_step(q[t], k[t], v[t], g[t], beta[t], state, NUMPY)
        np.testing.assert_allclose(out, expected_out[t], atol=1e-5)
    np.testing.assert_allclose(state, expected_state, atol=1e-5)


def test_inputs_are_left_alone() -> None:
    """Only the state is written."""
    inputs = make_inputs(70)
    before = [x.copy() for x in inputs]
    delta_rule_chunks(*inputs, random_state(), NUMPY)
    for x, y in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, y)
