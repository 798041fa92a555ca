"""Probes: short, of real data, and only where they can tell something."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from prfaas_net.congestion.budget import BudgetFollower
from prfaas_net.congestion.path import PathDetector
from prfaas_net.congestion.probe import DRAIN, GAIN, BandwidthProbe, ProbeResult
from prfaas_net.congestion.verdict import LinkState, Verdict
from tests.congestion.fluid import EVERY_S, MBPS, Fluid

BUDGET, ROOM = 40e6, 180e6
RTT_S = 0.04
CALM = Verdict(LinkState.CLEAR, 0.0, 0.0, base_rtt_s=RTT_S, goodput_bps=BUDGET, backlog_bytes=50_000_000)


@dataclass
class Run:
    """A probe on a path that carries so much, looked at every 20 ms; what arrives follows two looks later."""

    carries_bps: float
    calm: Verdict = CALM
    budget_bps: float = BUDGET

    def play(self, seconds: float) -> tuple[list[float], list[tuple[float, ProbeResult]]]:
        """The gains, and (when, result)."""
        probe, gains, found = BandwidthProbe(), [1.0, 1.0, 1.0], []
        for tick in range(round(seconds / EVERY_S)):
            arrives_bps = min(self.carries_bps, gains[-3] * self.budget_bps)
            queue_s = 0.01 if gains[-3] * self.budget_bps > self.carries_bps else 0.0
            verdict = replace(
                self.calm, goodput_bps=min(arrives_bps, self.calm.goodput_bps * GAIN), queueing_delay_s=queue_s
            )
            result = probe.step(verdict, self.budget_bps, ROOM, now=tick * EVERY_S)
            gains.append(probe.gain)
            if result is not None:
                found.append((tick * EVERY_S, result))
        return gains, found


def test_a_probe_is_two_round_trips_of_a_quarter_more() -> None:
    """Or a tenth of a second, if that is longer; in between at the budget."""
    gains, found = Run(carries_bps=200e6).play(4.0)
    assert set(gains) == {1.0, GAIN}
    assert len(found) >= 3
    longest = max(len(run) for run in "".join("u" if gain > 1 else " " for gain in gains).split())
    assert longest * EVERY_S <= 0.1 + 2 * EVERY_S


def test_what_is_there_is_found_with_its_error() -> None:
    """All of it arrived, and no queue grew: the path could carry no less."""
    _, found = Run(carries_bps=200e6).play(2.0)
    result = found[0][1]
    assert result.carried
    assert result.rate_bps == pytest.approx(GAIN * BUDGET)
    assert result.error == pytest.approx(0.0, abs=0.01)


def test_a_probe_that_finds_nothing_takes_its_queue_away_and_rests_longer_each_time() -> None:
    """The most that arrived is the estimate; how far it lay below what was paced, its error."""
    gains, found = Run(carries_bps=BUDGET).play(30.0)
    assert not any(result.carried for _, result in found)
    assert found[0][1].rate_bps == pytest.approx(BUDGET)
    assert found[0][1].error == pytest.approx(1 - 1 / GAIN)
    assert DRAIN in gains
    pauses = [later - sooner for (sooner, _), (later, _) in pairwise(found)]
    assert len(pauses) >= 3
    assert pauses == sorted(pauses)
    assert pauses[-1] > 1.8 * pauses[-2]


@pytest.mark.parametrize(
    "calm",
    [
        replace(CALM, backlog_bytes=100_000),
        replace(CALM, state=LinkState.APP_LIMITED),
        replace(CALM, state=LinkState.HOST_LIMITED),
        replace(CALM, goodput_bps=0.5 * BUDGET),
    ],
    ids=["too little to send", "application-limited", "host-limited", "the budget is not used"],
)
def test_there_is_no_probe_where_it_could_tell_nothing(calm: Verdict) -> None:
    """It would need padding, or show somebody else's limit."""
    gains, found = Run(carries_bps=200e6, calm=calm).play(5.0)
    assert set(gains) == {1.0}
    assert not found


def test_there_is_no_probe_beyond_what_is_configured() -> None:
    """The operator's budget is the operator's."""
    gains, _ = Run(carries_bps=500e6, budget_bps=ROOM).play(5.0)
    assert set(gains) == {1.0}


def test_after_congestion_probes_bring_the_budget_back_sooner_than_steps_would() -> None:
    """The loop closed on a fluid: from a fifth of what is configured to all of it, with nothing lost."""
    link, detector, follower = Fluid(), PathDetector("cubic"), BudgetFollower(round(140 * MBPS))
    follower.budget_bps = round(28 * MBPS)
    link.offered_bps = follower.budget_bps
    began_s = link.now
    while follower.budget_bps < follower.configured_bps and link.now < began_s + 10.0:
        (look,) = link.run(EVERY_S)
        link.offered_bps = follower.follow(detector.observe(look), now=look.at_s)
    assert follower.probe.last is not None
    assert follower.probe.last.carried
    assert link.counted["bytes_retrans"] == 0
    assert link.now - began_s < 4.0  # in steps of 2 % every tenth of a second alone: 4 s, and half a second of calm
