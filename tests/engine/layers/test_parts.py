"""The small parts: activations, norms, rotary positions, the short convolution."""

from __future__ import annotations

import numpy as np
import pytest

from engine.backend import NUMPY
from engine.layers.rms_norm import RmsNorm, unit_norm
from engine.layers.rope import RopeSpec
from engine.layers.rotary import Rotary
from engine.layers.short_conv import ShortConv
from engine.rows import Rows

WIDE = np.array([-1e4, -100, -20, -1, -1e-3, 0, 1e-3, 1, 20, 100, 1e4], dtype=np.float32)


def test_activations_hold_over_the_whole_range() -> None:
    """Without overflow; sigmoid and softplus to rounding even where they are tiny."""
    x = np.clip(WIDE.astype(np.float64), -700, 700)
    sigmoid = 1 / (1 + np.exp(-x))
    np.testing.assert_allclose(NUMPY.sigmoid(WIDE), sigmoid, rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(NUMPY.softplus(WIDE), np.logaddexp(0, WIDE.astype(np.float64)), rtol=1e-5, atol=1e-30)
    np.testing.assert_allclose(NUMPY.silu(WIDE), WIDE * sigmoid, rtol=1e-5, atol=2e-6)


def test_rms_norm() -> None:
    """Unit root mean square, then the scale; the input is left alone."""
    x = np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32)
    y = RmsNorm(np.array([1.0, 2.0], np.float32), 1e-6, NUMPY)(x)
    np.testing.assert_allclose(y, np.array([[3.0, 8.0], [0.0, 0.0]]) / np.sqrt(12.5), rtol=1e-6)
    assert x[0, 0] == 3.0


def test_unit_norm() -> None:
    """Unit length, and zero for zero."""
    x = np.array([[3.0, 4.0], [0.0, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(unit_norm(x, NUMPY), x / 5, rtol=1e-6)


@pytest.mark.parametrize("spec", [RopeSpec(8, 1e4), RopeSpec(8, 1e4, interleaved=True), RopeSpec(4, 1e4)])
def test_rotary_positions_are_relative(spec: RopeSpec) -> None:
    """The product of two rotated vectors depends on the distance between their positions alone."""
    rotary = Rotary(spec, NUMPY)
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 8)).astype(np.float32)

    def product(i: int, j: int) -> float:
        a, b = (rotary.rotate(x, rotary.tables(np.array([p], np.float32))) for x, p in ((q, i), (k, j)))
        return float((a * b).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-6)
    assert product(7, 3) != pytest.approx(product(8, 3), abs=1e-3)


@pytest.mark.parametrize("cut", [1, 2, 5, 9])
def test_the_convolution_continues_from_its_state(cut: int) -> None:
    """In pieces of any length, shorter than the filter too, it is what it is in one."""
    draw = np.random.default_rng(0)
    conv = ShortConv(draw.standard_normal((3, 1, 4)).astype(np.float32), NUMPY)
    x = draw.standard_normal((10, 3)).astype(np.float32)
    whole_state, state = np.zeros((2, 3, 3), np.float32)
    whole = conv.forward(x, [whole_state], Rows([(0, 10)], NUMPY))
    pieces = [conv.forward(x[i : i + cut], [state], Rows([(i, len(x[i : i + cut]))], NUMPY)) for i in range(0, 10, cut)]
    np.testing.assert_allclose(np.concatenate(pieces), whole, atol=1e-6)
    np.testing.assert_array_equal(state, x[-3:].T)
    np.testing.assert_array_equal(state, whole_state)
