"""A machine that stands still makes queues of its own: they are its doing, and the path's are found nevertheless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from prfaas_net.congestion.path import PathDetector
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.verdict import LinkState, Verdict
from tests.congestion.fluid import EVERY_S, MBPS, Fluid

TROUBLE = {LinkState.BUILDING, LinkState.CONGESTED}


def stalled(link: Fluid, stall_s: float, *, seen_late: bool) -> Iterator[LinkSample]:
    """The machine stands still: what was sent waits, and drains afterwards; whoever looks has waited too, or not."""
    if seen_late:
        link.now += stall_s - EVERY_S
    for tick in range(8):
        (look,) = link.run(EVERY_S)
        behind_s = stall_s * max(0.0, 1 - tick / 6)
        (number, info), *_ = look.connections
        yield look._replace(connections=((number, info._replace(rtt_us=info.rtt_us + round(1e6 * behind_s))),))


def play(detector: PathDetector, *, seen_late: bool) -> list[Verdict]:
    link = Fluid()
    verdicts = [detector.observe(look) for look in link.run(3.0)]
    for _ in range(10):
        verdicts += [detector.observe(look) for look in stalled(link, 0.06, seen_late=seen_late)]
        verdicts += [detector.observe(look) for look in link.run(1.0)]
    return verdicts


def test_round_trips_that_grow_while_the_machine_stands_still_are_its_own() -> None:
    """Whoever looks came late, too: waiting for the host, with the evidence, and never trouble of the path."""
    verdicts = play(PathDetector("cubic"), seen_late=True)
    assert not TROUBLE & {verdict.state for verdict in verdicts}
    late = [verdict for verdict in verdicts if verdict.state is LinkState.HOST_LIMITED]
    assert late
    assert all("late" in {item.signal for item in verdict.evidence} for verdict in late)
    assert verdicts[-1].state is LinkState.CLEAR


def test_the_same_round_trips_seen_in_time_are_the_path_s() -> None:
    """Else nothing would ever be found."""
    assert TROUBLE & {verdict.state for verdict in play(PathDetector("cubic"), seen_late=False)}


@pytest.mark.parametrize("stall_s", [0.06, 0.15])
def test_others_are_found_on_a_machine_that_stands_still_every_half_second(stall_s: float) -> None:
    """Later than on a quiet one, and within a second."""
    link, detector = Fluid(), PathDetector("cubic")
    for _ in range(6):
        for look in (*link.run(0.5), *stalled(link, stall_s, seen_late=True)):
            detector.observe(look)
    link.others_bps = 160 * MBPS
    came_s, states = link.now, []
    while link.now < came_s + 1.0:
        for look in (*stalled(link, stall_s, seen_late=True), *link.run(0.5)):
            states.append((look.at_s, detector.observe(look).state))
    assert next(at_s for at_s, state in states if state is LinkState.CONGESTED) < came_s + 1.0


def test_what_loses_segments_is_beyond_doubt() -> None:
    """A machine that stands still loses next to nothing."""
    link, detector = Fluid(), PathDetector("cubic")
    for look in link.run(3.0):
        detector.observe(look)
    link.lost_share = 0.08
    seen = [detector.observe(look).state for _ in range(4) for look in stalled(link, 0.1, seen_late=True)]
    assert LinkState.CONGESTED in seen


def test_an_idle_link_is_looked_at_seldom_and_not_late() -> None:
    """The first looks after it are not doubted for that."""
    link, detector = Fluid(offered_bps=0.0, backlog_bytes=0), PathDetector("cubic")
    for _ in range(20):
        link.now += 0.25
        detector.observe(replace(link).run(EVERY_S)[0])
    link.offered_bps, link.backlog_bytes = 140 * MBPS, 10_000_000
    verdicts = [detector.observe(look) for look in link.run(1.0)]
    assert not any(item.signal == "late" for verdict in verdicts[2:] for item in verdict.evidence)
