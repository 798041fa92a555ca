"""Windows forget exactly what is too old, whatever their steps and lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.congestion.bandwidth import BandwidthEstimator
from prfaas_net.congestion.base_rtt import FLAT_S, BaseRtt
from prfaas_net.congestion.windows import WindowedMax, WindowedSums

steps = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000)), min_size=1, max_size=60)


@given(steps, st.integers(1, 200))
def test_sums_are_those_of_the_steps_that_reach_into_the_window(taken: list[tuple[int, int]], window: int) -> None:
    """Never less than the window, unless there is no more; never one step more than it needs."""
    sums, now = WindowedSums(1), 0
    for index, (dt, value) in enumerate(taken, 1):
        now += dt
        sums.add(float(now), float(dt), (value,), window_s=float(window))
        kept, time = 0, 0
        for past_dt, past_value in reversed(taken[:index]):
            if time >= window:
                break
            kept, time = kept + past_value, time + past_dt
        assert sums.sums == [kept]
        assert sums.time_s == time


@given(steps, st.integers(0, 200))
def test_the_greatest_is_that_of_the_window(taken: list[tuple[int, int]], window: int) -> None:
    """As a search through all of it would find."""
    greatest, now, seen = WindowedMax(), 0, []
    for dt, value in taken:
        now += dt
        seen.append((now, value))
        greatest.add(float(now), float(value), window_s=float(window))
        assert greatest.value == max(past for at, past in seen if at >= now - window)


def test_a_base_is_kept_while_there_is_trouble_and_forgotten_when_there_is_none() -> None:
    """A queue that stands for two minutes is still a queue; a slow drift of a clear path is its new length."""
    for troubled, base_s in ((True, 0.04), (False, 0.05)):
        base = BaseRtt()
        for tick in range(50):
            base.add(0.04, None, troubled=False, missing=False, now=tick / 10)
        for tick in range(1200):
            base.add(0.05 + tick % 7 / 1000, None, troubled=troubled, missing=True, now=5 + tick / 10)
        assert base.value_s == pytest.approx(base_s)


def test_a_base_follows_a_longer_route_once_it_has_held_still() -> None:
    """Not before; and the kernel's minimum, which remembers the shorter one for minutes, is not believed any more."""
    base = BaseRtt()
    for tick in range(100):
        base.add(0.04, 0.04, troubled=False, missing=False, now=tick / 50)
    seen = []
    for tick in range(200):
        base.add(0.07, 0.04, troubled=True, missing=False, now=2 + tick / 50)
        seen.append(base.value_s)
    early = int(FLAT_S * 50) - 1
    assert max(value for value in seen[:early] if value) < 0.05
    assert seen[-1] == pytest.approx(0.07)


def test_an_estimate_follows_within_two_rounds_and_says_how_far_its_rates_lie_apart() -> None:
    """Steady rates have no error; a halved one is found, and the error shows that something changed."""
    estimator = BandwidthEstimator()
    for tick in range(50):
        estimator.add(100e6, round_s=0.1, now=tick / 50)
    assert estimator.rate_bps == pytest.approx(100e6)
    assert estimator.error == 0.0
    for tick in range(15):
        estimator.add(50e6, round_s=0.1, now=1 + tick / 50)
    assert estimator.rate_bps == pytest.approx(50e6, rel=0.1)
    assert estimator.error > 0.05
