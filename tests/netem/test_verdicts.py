"""Verdicts on real netem: each scenario makes one thing happen to a link, and shows that it happened.

A machine under test does other things too, and a wire that stands still for 50 ms *is* a queue: see ``conftest.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from prfaas_net.congestion.verdict import Cause, LinkState, Verdict
from tests.netem.watching import Watched, states
from tools.netlab import Link

pytestmark = [pytest.mark.netem, pytest.mark.timeout(120)]
IDLE, CLEAR, BUILDING, CONGESTED = LinkState.IDLE, LinkState.CLEAR, LinkState.BUILDING, LinkState.CONGESTED
HOST, APP, DOWN = LinkState.HOST_LIMITED, LinkState.APP_LIMITED, LinkState.DOWN

RATE_BPS, DELAY_MS, QUEUE_BYTES = 100e6, 20, 500_000  # a round trip of 40 ms, a queue of one BDP
PACE_BPS = 60e6
Scenario = Callable[[Link], None]


def scenario(play: Scenario) -> Callable[[Link], None]:
    """Play on a fresh path."""

    @functools.wraps(play)
    def test(netlab_link: Link) -> None:
        usual(netlab_link)
        play(netlab_link)

    del test.__dict__["__wrapped__"]  # pytest would ask for the scenario's own arguments
    return test


def usual(link: Link, way: str | None = None, **changes: Any) -> None:
    """The path as it is before and after."""
    link.set(way, **{"rate_bps": RATE_BPS, "delay_ms": DELAY_MS, "queue_bytes": QUEUE_BYTES, "loss": 0.0} | changes)


def negotiate_marks(link: Link, on: bool) -> None:
    """Whether connections that begin now ask for ECN."""
    for side in "ab":
        link.run_in(side, ["sh", "-c", f"echo {1 if on else 2} > /proc/sys/net/ipv4/tcp_ecn"])


def share(verdicts: list[Verdict], *of: LinkState) -> float:
    """Of the looks."""
    return sum(verdict.state in of for verdict in verdicts) / len(verdicts)


def sent_again(totals: dict[str, float]) -> float:
    return totals["retrans_bytes"] / totals["sent_bytes"]


@scenario
def test_a_clean_link_is_clear(link: Link) -> None:
    """From the first round trips on."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        verdicts = sender.watch(3.0)
        totals = sender.totals(verdicts)
    assert set(states(verdicts)) <= {IDLE, CLEAR, HOST}
    assert share(verdicts, CLEAR) > 0.8
    assert sent_again(totals) < 0.001
    assert totals["rtt_s"] >= 0.040
    assert median(v.queueing_delay_s for v in verdicts) < 0.005
    assert median(v.available_bps or 0.0 for v in verdicts[-50:]) == pytest.approx(PACE_BPS, rel=0.1)


@scenario
def test_a_longer_route_is_not_congestion(link: Link) -> None:
    """The round trip goes from 40 to 70 ms and stays: a while of building at most, then a new base."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        sender.mark("longer route")
        link.set("ab", delay_ms=50)
        verdicts = sender.watch_until(lambda v: v.state is CLEAR and v.base_rtt_s >= 0.069)
        totals = sender.totals(verdicts)
    assert CONGESTED not in states(verdicts)
    assert totals["rtt_s"] >= 0.069


@scenario
def test_loss_without_a_queue_is_found_and_forgotten(link: Link) -> None:
    """Five percent at random: congested by loss, not by queue; clear within seconds of its end."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        sender.mark("loss")
        link.set("ab", loss=0.05)
        lossy = sender.watch(2.0)
        totals = sender.totals(lossy)
        usual(link)
        sender.mark("over")
        sender.watch_until(lambda v: v.state is CLEAR)
    found = next(verdict for verdict in lossy if verdict.state is CONGESTED)
    assert "loss" in {item.signal for item in found.evidence}
    assert median(v.queueing_delay_s for v in lossy) < 0.010
    assert 0.5 * 0.05 < sent_again(totals) < 3 * 0.05


@scenario
def test_a_rate_cut_to_a_quarter_is_found_with_its_queue(link: Link) -> None:
    """Within a second; what is available is what is left; and over when the rate is back."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        sender.mark("rate cut")
        usual(link, "ab", rate_bps=RATE_BPS / 4)
        cut = sender.watch(2.0)
        totals = sender.totals(cut)
        usual(link)
        sender.mark("over")
        sender.watch_until(lambda v: v.state is CLEAR and (v.available_bps or 0.0) > 0.85 * PACE_BPS)
    found = next(verdict for verdict in cut if verdict.state is CONGESTED)
    assert found.at_s - cut[0].at_s < 1.0
    assert found.cause is Cause.OTHERS
    assert "queue" in {item.signal for item in found.evidence}
    assert median(v.available_bps or 0.0 for v in cut[-25:]) == pytest.approx(RATE_BPS / 4, rel=0.3)
    assert totals["rtt_s"] > 0.080
    assert totals["retrans_bytes"] > 0


@scenario
def test_bursts_of_others_are_found_without_flapping(link: Link) -> None:
    """On and off for half a second each: no more alarms than bursts, and clear once they have gone."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        with link.cross("ab", cc="cubic", rate_bps=90e6, on_s=0.5, off_s=0.5):
            during = sender.watch(4.0)
        totals = sender.totals(during)
        sender.watch_until(lambda v: v.state is CLEAR)
    assert 1 <= states(during).count(CONGESTED) <= 6
    assert totals["rtt_s"] > 0.050


@scenario
def test_a_slow_receiver_is_not_congestion(link: Link) -> None:
    """Its window closes: host-limited, whatever the round trip does meanwhile."""
    with Watched(link, pace_bps=PACE_BPS, receiver={"read_bps": 5e6, "rcvbuf_bytes": 200_000}) as sender:
        verdicts = sender.watch(3.0)
        totals = sender.totals(verdicts)
    assert CONGESTED not in states(verdicts)
    assert share(verdicts[-50:], HOST) > 0.8
    assert 8 * totals["delivered_bytes"] / 3.0 < PACE_BPS / 2


@scenario
def test_small_send_buffers_are_not_congestion(link: Link) -> None:
    """What fits into them is less than a round trip of the pace."""
    with Watched(link, pace_bps=PACE_BPS, sndbuf_bytes=16_384) as sender:
        verdicts = sender.watch(3.0)
        totals = sender.totals(verdicts)
    assert CONGESTED not in states(verdicts)
    assert share(verdicts[-50:], HOST) > 0.8
    assert sent_again(totals) < 0.001


@scenario
def test_little_to_send_is_not_congestion(link: Link) -> None:
    """An application that offers a quarter of the pace."""
    with Watched(link, pace_bps=PACE_BPS, write_bps=4e6) as sender:
        verdicts = sender.watch(3.0)
        totals = sender.totals(verdicts)
    assert not {CONGESTED, BUILDING} & set(states(verdicts))
    assert share(verdicts[-50:], APP) > 0.8
    took_s = verdicts[-1].at_s - verdicts[0].at_s
    assert 8 * totals["delivered_bytes"] / took_s == pytest.approx(16e6, rel=0.25)


@scenario
def test_a_black_hole_is_down_and_what_it_cost_is_not_held_against_the_path(link: Link) -> None:
    """Down after a second of silence; up with the first acknowledgements, and clear, though much is sent again."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        sender.mark("black hole")
        link.set(loss=1.0)
        dead = sender.watch_until(lambda v: v.state is DOWN) + sender.watch(0.3)
        usual(link)
        sender.mark("over")
        back = sender.watch_until(lambda v: v.state is CLEAR)
        totals = sender.totals(dead + back)
    down = next(verdict for verdict in dead if verdict.state is DOWN)
    assert down.at_s - dead[0].at_s < 1.5
    assert dead[-1].state is DOWN
    assert totals["retrans_bytes"] > 0


@scenario
def test_marks_are_found_before_anything_is_lost(link: Link) -> None:
    """A queue that marks from a tenth of its size on: building or congested by ECN, and next to nothing sent again."""
    negotiate_marks(link, True)
    link.set("ab", mark_bytes=50_000)
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        with link.cross("ab", cc="cubic"):
            during = sender.watch(3.0)
        totals = sender.totals(during)
        sender.watch_until(lambda v: v.state is CLEAR)
    negotiate_marks(link, False)
    marked = [v for v in during if v.state in (BUILDING, CONGESTED)]
    assert any("ecn" in {item.signal for item in verdict.evidence} for verdict in marked)
    assert totals["marked"] > 0
    assert sent_again(totals) < 0.005


@scenario
def test_lost_acknowledgements_are_not_congestion(link: Link) -> None:
    """One in ten on the way back: every later one says the same."""
    with Watched(link, pace_bps=PACE_BPS) as sender:
        sender.watch(1.5)
        before = link.counters()["ba"].lost
        link.set("ba", loss=0.1)
        verdicts = sender.watch(3.0)
        totals = sender.totals(verdicts)
        lost = link.counters()["ba"].lost - before
    assert CONGESTED not in states(verdicts)
    assert share(verdicts, CLEAR) > 0.9
    assert lost > 0
    assert sent_again(totals) < 0.001


@scenario
def test_a_link_full_of_our_own_is_told_from_one_that_others_have_taken(link: Link) -> None:
    """Not paced, alone: a full queue, losses, and clear, of our own making; with eight others: congested, of theirs."""
    with Watched(link, pace_bps=None) as sender:
        alone = sender.watch(4.0)
        totals = sender.totals(alone)
        with link.cross("ab", cc="cubic", flows=8):
            crowded = sender.watch(3.0)
        sender.watch_until(lambda v: v.state is CLEAR)
    settled = [verdict for verdict in alone if verdict.at_s > alone[-1].at_s - 2.0]
    # A wire that stands still for a moment takes what we had, as others would.
    assert share(settled, CONGESTED) < 0.5
    assert sum(verdict.cause is Cause.OURS for verdict in settled) > 0.3 * len(settled)
    assert totals["rtt_s"] > 0.060
    assert totals["retrans_bytes"] > 0
    assert median(v.available_bps or 0.0 for v in settled) == pytest.approx(RATE_BPS, rel=0.25)
    assert share(crowded[-50:], CONGESTED) > max(0.5, 1.5 * share(settled, CONGESTED))
    assert all(verdict.cause is Cause.OTHERS for verdict in crowded if verdict.state is CONGESTED)
    assert median(v.available_bps or 0.0 for v in crowded[-50:]) < 0.75 * RATE_BPS
