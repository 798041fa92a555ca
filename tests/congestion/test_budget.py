"""The pacing budget: within what is configured, one cut a round trip, back when it is calm."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.congestion.budget import FLOOR_SHARE, BudgetFollower
from prfaas_net.congestion.path import PathDetector
from prfaas_net.congestion.probe import DRAIN, GAIN
from prfaas_net.congestion.verdict import LinkState, Verdict
from tests.congestion.fluid import EVERY_S, MBPS, Fluid

CONFIGURED = 140_000_000


def verdict(state: LinkState, goodput_bps: float, *, rtt_s: float = 0.04) -> Verdict:
    return Verdict(state, 0.0, 0.0, goodput_bps=goodput_bps, base_rtt_s=rtt_s)


@given(
    st.lists(
        st.tuples(st.sampled_from(LinkState), st.floats(0, 1e12), st.floats(0, 2.0), st.floats(0, 5.0)), max_size=60
    )
)
def test_it_never_leaves_its_bounds_and_is_cut_once_a_round_trip(
    steps: list[tuple[LinkState, float, float, float]],
) -> None:
    """Whatever the verdicts."""
    follower, now, cut_at_s = BudgetFollower(CONFIGURED), 0.0, None
    for state, goodput_bps, rtt_s, later_s in steps:
        now += later_s
        before = follower.budget_bps
        pace_bps = follower.follow(verdict(state, goodput_bps, rtt_s=rtt_s), now=now)
        after = follower.budget_bps
        assert FLOOR_SHARE * CONFIGURED - 1 <= after <= CONFIGURED
        assert DRAIN * after - 1 <= pace_bps <= min(CONFIGURED, GAIN * after)
        if after < before:
            assert state in (LinkState.CONGESTED, LinkState.BUILDING)
            assert cut_at_s is None or now - cut_at_s >= rtt_s
            cut_at_s = now


def test_it_goes_down_to_what_arrives() -> None:
    """A path that carries a quarter is paced to a quarter within four round trips, and not below it."""
    follower, now = BudgetFollower(CONFIGURED), 0.0
    for _ in range(20):
        now += 0.05
        budget = follower.follow(verdict(LinkState.CONGESTED, 35e6), now=now)
    assert 0.6 * 35e6 <= budget <= 1.15 * 35e6


def test_a_pause_of_what_arrives_is_not_what_the_path_carries() -> None:
    """Retransmission timeouts: nothing for 200 ms of every second. The budget stays near what
    arrives on the whole, and never falls to its floor."""
    follower, now = BudgetFollower(CONFIGURED), 0.0
    for tick in range(1500):
        now += 0.02
        follower.follow(verdict(LinkState.CONGESTED, 0.0 if tick % 50 < 10 else 40e6), now=now)
    assert 0.6 * 40e6 <= follower.budget_bps <= 1.1 * 40e6


def test_a_queue_of_others_alone_does_not_starve_us() -> None:
    """The path carries our pace: however long they queue, it costs us less than half."""
    follower, now = BudgetFollower(CONFIGURED), 0.0
    for _ in range(2000):
        now += 0.05
        follower.follow(verdict(LinkState.CONGESTED, float(follower.budget_bps)), now=now)
    assert 0.6 * CONFIGURED <= follower.budget_bps < CONFIGURED


def test_it_comes_back_step_by_step() -> None:
    """A fifth of what is configured a second; not while something is building. (Nothing waits: there is no probe.)"""
    follower = BudgetFollower(CONFIGURED)
    follower.follow(verdict(LinkState.CONGESTED, 35e6), now=1.0)
    for tick in range(40):
        assert follower.follow(verdict(LinkState.BUILDING, 35e6), now=1.1 + tick / 20) <= 0.7 * CONFIGURED
    seen = [follower.follow(verdict(LinkState.CLEAR, float(CONFIGURED)), now=3.1 + tick / 50) for tick in range(400)]
    assert follower.probe.last is None
    assert seen == sorted(seen)
    assert max(b - a for a, b in pairwise(seen)) <= 0.021 * CONFIGURED
    assert seen[-1] == CONFIGURED


def test_an_idle_link_is_given_its_budget_back_after_a_while() -> None:
    """What was learnt seconds ago is not known any more."""
    follower = BudgetFollower(CONFIGURED)
    follower.follow(verdict(LinkState.CONGESTED, 35e6), now=1.0)
    low = follower.budget_bps
    assert follower.follow(verdict(LinkState.IDLE, 0.0), now=3.5) == low
    for tick in range(400):
        follower.follow(verdict(LinkState.IDLE, 0.0), now=11.5 + tick / 4)
    assert follower.budget_bps == CONFIGURED


@pytest.mark.parametrize("others_mbps", [100, 160])
def test_detector_and_budget_together_end_the_queue_and_come_back(others_mbps: int) -> None:
    """The loop closed on a link as a fluid: their queue is not ours for long, and what they leave is ours again."""
    link, detector, follower = Fluid(), PathDetector("cubic"), BudgetFollower(CONFIGURED)

    def run(seconds: float) -> list[Verdict]:
        verdicts = []
        for _ in range(round(seconds / EVERY_S)):
            (look,) = link.run(EVERY_S)
            verdicts.append(detector.observe(look))
            link.offered_bps = follower.follow(verdicts[-1], now=look.at_s)
        return verdicts

    run(3.0)
    link.others_bps = others_mbps * MBPS
    during = run(10.0)
    assert follower.budget_bps < 1.2 * (link.rate_bps - link.others_bps)
    # It has been empty, and is tried again and again for more.
    assert min(v.queueing_delay_s for v in during[-400:]) < 0.1 * link.queue_limit_s
    assert sum(v.queueing_delay_s for v in during[-200:]) / 200 < 0.75 * link.queue_limit_s
    link.others_bps = 0.0
    run(10.0)
    assert follower.budget_bps == CONFIGURED
    assert replace(detector.observe(link.run(EVERY_S)[0]), evidence=()).state is LinkState.CLEAR
