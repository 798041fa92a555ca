"""The detector's promises, each on a link that shows one thing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import pytest

from prfaas_net.congestion.path import PathDetector
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.verdict import Cause, LinkState, Verdict
from tests.congestion.fluid import MBPS, Fluid

BUILDING, CONGESTED, CLEAR = LinkState.BUILDING, LinkState.CONGESTED, LinkState.CLEAR


def watch(detector: PathDetector, looks: Iterable[LinkSample]) -> list[Verdict]:
    return [detector.observe(look) for look in looks]


def sequence(verdicts: list[Verdict]) -> list[LinkState]:
    """States, each once as long as it lasted."""
    return [state for state, _ in groupby(verdict.state for verdict in verdicts)]


def settled(link: Fluid, congestion_control: str = "cubic") -> PathDetector:
    """A detector that has seen the link for three seconds."""
    detector = PathDetector(congestion_control)
    watch(detector, link.run(3.0))
    return detector


def test_a_paced_link_below_its_rate_is_clear() -> None:
    """From the first looks on, for as long as it lasts."""
    link = Fluid()
    verdicts = watch(PathDetector("cubic"), link.run(60.0))[1:]
    assert set(sequence(verdicts)) == {CLEAR}
    assert verdicts[-1].available_bps == pytest.approx(140 * MBPS, rel=0.05)
    assert verdicts[-1].confidence > 0.9


@pytest.mark.parametrize("queue_s", [0.04, 0.16], ids=["one BDP", "four BDP"])
def test_others_that_take_the_link_are_found_within_300_ms(queue_s: float) -> None:
    """And named as others, with what says so."""
    link = Fluid(queue_limit_s=queue_s)
    detector = settled(link)
    link.others_bps = 160 * MBPS
    verdicts = watch(detector, link.run(0.3))
    assert verdicts[0].state is CLEAR
    assert verdicts[-1].state is CONGESTED
    assert verdicts[-1].cause is Cause.OTHERS
    assert {"queue"} <= {item.signal for item in verdicts[-1].evidence}
    assert all(item.strength >= 1 for item in verdicts[-1].evidence)


def test_it_is_over_a_second_after_they_have_left() -> None:
    """One change each way: no flapping."""
    link = Fluid()
    detector = settled(link)
    link.others_bps = 160 * MBPS
    during = watch(detector, link.run(5.0))
    link.others_bps = 0.0
    after = watch(detector, link.run(2.0))
    assert [state for state in sequence(during + after) if state is not BUILDING] == [CLEAR, CONGESTED, CLEAR]
    assert during[-1].available_bps == pytest.approx(link.rate_bps * 140 / 300, rel=0.15)
    assert after[50].state is CLEAR


def test_our_own_unpaced_sending_is_not_congestion() -> None:
    """Queue full, four percent lost, rate at its best: the link is full of what we send."""
    link = Fluid(paced=False, offered_bps=208 * MBPS)
    verdicts = watch(PathDetector("cubic"), link.run(20.0))[1:]
    assert set(sequence(verdicts)) == {CLEAR}
    assert verdicts[-1].cause is Cause.OURS
    assert verdicts[-1].queueing_delay_s > 0.03


def test_a_budget_above_what_the_path_carries_is_our_own_doing_too() -> None:
    """Nobody else is there, so nobody else is to blame."""
    link = Fluid(offered_bps=300 * MBPS)
    verdicts = watch(PathDetector("cubic"), link.run(10.0))
    assert CONGESTED not in sequence(verdicts)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({"host_limited": True, "queue_s": 0.03, "others_bps": 60 * MBPS, "lost_share": 0.03}, LinkState.HOST_LIMITED),
        ({"app_limited": True, "offered_bps": 30 * MBPS}, LinkState.APP_LIMITED),
        ({"app_limited": True, "offered_bps": 30 * MBPS, "paced": False, "lost_share": 0.05}, LinkState.APP_LIMITED),
    ],
    ids=["slow receiver", "little to send", "little to send, not paced"],
)
def test_what_only_looks_like_congestion_has_its_own_name(change: dict[str, float], state: LinkState) -> None:
    """With a queue, with loss, with a lower rate: it is the host or the application."""
    link = Fluid()
    detector = settled(link)
    for name, value in change.items():
        setattr(link, name, value)
    verdicts = watch(detector, link.run(5.0))
    assert CONGESTED not in sequence(verdicts)
    assert verdicts[-1].state is state


def test_a_longer_route_is_not_a_queue() -> None:
    """The round trip jumps and then does not move: something is building for a while, then the base is a new one."""
    link = Fluid()
    detector = settled(link)
    link.base_s = 0.06
    verdicts = watch(detector, link.run(5.0))
    assert sequence(verdicts) == [CLEAR, BUILDING, CLEAR]
    assert verdicts[-1].base_rtt_s == pytest.approx(0.06, rel=0.01)
    assert verdicts[-1].queueing_delay_s < 0.001


def test_a_dead_path_is_down_within_a_second_and_up_again_with_the_first_acknowledgement() -> None:
    """Nothing comes back, timeouts follow each other, and then something does."""
    link = Fluid()
    detector = settled(link)
    link.connected = False
    dead = watch(detector, link.run(1.0))
    assert dead[-1].state is LinkState.DOWN
    assert {"stalled"} <= {item.signal for item in dead[-1].evidence}
    link.connected = True
    assert watch(detector, link.run(1.0))[-1].state is not LinkState.DOWN


def test_a_peer_that_has_left_is_down_at_once() -> None:
    """The link itself knows."""
    link = Fluid()
    detector = settled(link)
    link.alive = False
    assert watch(detector, link.run(0.02))[-1].state is LinkState.DOWN


def test_loss_without_a_queue_is_congestion_where_it_is_more_than_the_control_makes_itself() -> None:
    """Five percent: too much for cubic, nothing special for BBR."""
    states = {}
    for control in ("cubic", "bbr"):
        link = Fluid()
        detector = settled(link, control)
        link.lost_share = 0.05
        states[control] = watch(detector, link.run(2.0))[-1].state
    assert states == {"cubic": CONGESTED, "bbr": CLEAR}


@pytest.mark.parametrize(("share", "state"), [(0.2, BUILDING), (0.9, CONGESTED)])
def test_congestion_marks_count_where_both_ends_use_them(share: float, state: LinkState) -> None:
    """A few say that a queue is growing; most segments marked, that it is full."""
    link = Fluid()
    detector = settled(link)
    link.marked_share = share
    assert watch(detector, link.run(1.0))[-1].state is state


def test_nothing_to_send_is_idle() -> None:
    """And the estimate of the link stays."""
    link = Fluid()
    detector = settled(link)
    link.offered_bps, link.backlog_bytes = 0.0, 0
    last = watch(detector, link.run(1.0))[-1]
    assert last.state is LinkState.IDLE
    assert last.available_bps == pytest.approx(140 * MBPS, rel=0.05)
    assert last.drain_s == 0.0


def test_the_backlog_drains_at_what_is_available() -> None:
    """Ten megabytes at 140 Mbit/s."""
    link = Fluid()
    detector = settled(link)
    last = watch(detector, link.run(0.1))[-1]
    assert last.drain_s == pytest.approx(8 * 10_000_000 / (140 * MBPS), rel=0.05)
    assert last.to_json()["state"] == "clear"


def test_a_link_that_was_never_filled_is_not_known_to_be_thin() -> None:
    """A few requests of a few kilobytes are no measurement; and an old measurement is none either."""
    link = Fluid(offered_bps=5 * MBPS, app_limited=True)
    detector = PathDetector("cubic")
    assert {verdict.available_bps for verdict in watch(detector, link.run(10.0))} == {None}
    link.offered_bps, link.app_limited = 140 * MBPS, False
    assert watch(detector, link.run(3.0))[-1].available_bps == pytest.approx(140 * MBPS, rel=0.05)
    link.offered_bps, link.backlog_bytes = 0.0, 0
    after = watch(detector, link.run(40.0))
    assert after[0].available_bps is not None
    assert after[-1].available_bps is None
    assert after[-1].drain_s == 0.0
