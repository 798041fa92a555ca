"""What the laboratory says of a link is what packets find there. Ranges are wide: machines under test are busy."""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial

import pytest

from tests.netem.probes import HEADERS_BYTES, datagrams
from tools.netlab import Link, Load
from tools.netlab.choosing import choose, why_not
from tools.netlab.qdisc import burst_bytes
from tools.netlab.schedule import Event, Player

pytestmark = [pytest.mark.netem, pytest.mark.timeout(90)]
CHOSEN = choose().name if why_not() is None else "tun"
BACKENDS = list(dict.fromkeys((CHOSEN, "tun")))
on_every_backend = pytest.mark.parametrize("netlab_link", BACKENDS, indirect=True)
# Later than set: scheduling, on a machine that does other things too. Never earlier.
LATE_MS = 8.0


def delay_ms(link: Link, way: str) -> float:
    """Median of what datagrams take."""
    return statistics.median(datagrams(link, way, 40, every_s=0.005).took_ms)


@on_every_backend
def test_the_delay_is_the_delay_each_way(netlab_link: Link) -> None:
    """Asymmetric settings are kept apart, and no packet is early."""
    netlab_link.set("ab", delay_ms=30)
    netlab_link.set("ba", delay_ms=5)
    there, back = (datagrams(netlab_link, way, 40, every_s=0.005) for way in ("ab", "ba"))
    assert len(there.numbers) == len(back.numbers) == 40
    assert min(there.took_ms) >= 29.9
    assert min(back.took_ms) >= 4.9
    assert statistics.median(there.took_ms) < 30 + LATE_MS
    assert statistics.median(back.took_ms) < 5 + LATE_MS


@on_every_backend
def test_jitter_spreads_and_keeps_order(netlab_link: Link) -> None:
    """Within what was said on both sides of the delay."""
    netlab_link.set(delay_ms=20, jitter_ms=10)
    passed = datagrams(netlab_link, "ab", 200, every_s=0.002)
    assert passed.numbers == sorted(passed.numbers)
    assert len(passed.numbers) == 200
    assert 9.9 <= min(passed.took_ms) < 20
    assert max(passed.took_ms) > 24


@on_every_backend
def test_the_rate_is_the_rate(netlab_link: Link) -> None:
    """A flow that sends all it can gets it, less headers, and never more."""
    netlab_link.set(rate_bps=50e6, delay_ms=5, queue_bytes=256 << 10)
    with netlab_link.traffic("ab", Load(cc="cubic")) as traffic:
        time.sleep(1.0)
        began_s, before = traffic.received()
        time.sleep(2.0)
        ended_s, after = traffic.received()
    goodput_bps = (after - before) * 8 / (ended_s - began_s)
    assert 0.7 * 50e6 < goodput_bps < 50e6


@on_every_backend
def test_the_queue_takes_what_it_should_and_drops_the_rest(netlab_link: Link) -> None:
    """To a few packets: those that the bottleneck sends while they come, and the token bucket of tbf."""
    payload_bytes, rate_bps, queue_bytes = 1000, 2e6, 100_000
    netlab_link.set(rate_bps=rate_bps, queue_bytes=queue_bytes)
    before = netlab_link.counters()["ab"]
    passed = datagrams(netlab_link, "ab", 400, payload_bytes=payload_bytes)
    counted = netlab_link.counters()["ab"] - before
    in_queue = queue_bytes / (payload_bytes + HEADERS_BYTES + 14)
    at_once = burst_bytes(rate_bps) / payload_bytes
    assert in_queue - 1 <= len(passed.numbers) <= in_queue + at_once + 40
    assert counted.dropped == 400 - len(passed.numbers)
    assert counted.lost == 0
    # Drop-tail: the first ones came in while there was room.
    assert passed.numbers[:90] == list(range(90))


@on_every_backend
def test_loss_loses_and_is_counted(netlab_link: Link) -> None:
    """Five percent of 4,000 packets, within five standard deviations; none is missing that was not counted."""
    netlab_link.set("ab", loss=0.05)
    before = netlab_link.counters()["ab"]
    passed = datagrams(netlab_link, "ab", 4000, every_s=0.0003)
    lost = 4000 - len(passed.numbers)
    assert lost == (netlab_link.counters()["ab"] - before).lost
    assert abs(lost - 200) < 5 * (4000 * 0.05 * 0.95) ** 0.5


@on_every_backend
def test_loss_one_way_leaves_the_other_whole(netlab_link: Link) -> None:
    """Asymmetric loss."""
    netlab_link.set("ba", loss=0.5)
    assert len(datagrams(netlab_link, "ab", 200, every_s=0.001).numbers) == 200
    assert 40 < len(datagrams(netlab_link, "ba", 200, every_s=0.001).numbers) < 160


@on_every_backend
def test_a_black_hole_swallows_everything_and_the_link_comes_back(netlab_link: Link) -> None:
    """Both ways."""
    netlab_link.set(delay_ms=2, loss=1.0)
    for way in ("ab", "ba"):
        assert datagrams(netlab_link, way, 20, every_s=0.001, patience_s=0.2).numbers == []
    netlab_link.set(loss=0.0)
    for way in ("ab", "ba"):
        assert len(datagrams(netlab_link, way, 20, every_s=0.001).numbers) == 20


@on_every_backend
def test_changes_in_place_lose_and_reorder_nothing(netlab_link: Link) -> None:
    """Rate and delay go up and down while packets are under way."""
    netlab_link.set(rate_bps=20e6, delay_ms=10, queue_bytes=1 << 20)
    slow = partial(netlab_link.set, "ab", rate_bps=5e6, delay_ms=25)
    fast = partial(netlab_link.set, "ab", rate_bps=20e6, delay_ms=5)
    events = [Event(0.1 * (i + 1), "change", slow if i % 2 else fast) for i in range(10)]
    with Player(events) as player:
        passed = datagrams(netlab_link, "ab", 1200, every_s=0.001, payload_bytes=500, patience_s=2.0)
        player.wait(10.0)
    assert passed.numbers == list(range(1200))


def test_loss_shows_in_what_the_kernel_says(netlab_link: Link) -> None:
    """Retransmits of a real TCP move with it, and not before."""
    netlab_link.set(rate_bps=50e6, delay_ms=5, queue_bytes=1 << 20)
    with netlab_link.traffic("ab", Load(cc="bbr", rate_bps=25e6)) as traffic:
        time.sleep(1.0)
        clean = traffic.look()["0"]
        netlab_link.set("ab", loss=0.03)
        time.sleep(1.5)
        lossy = traffic.look()["0"]
    assert clean["bytes_retrans"] * 100 < clean["bytes_sent"]
    sent, again = (lossy[name] - clean[name] for name in ("bytes_sent", "bytes_retrans"))
    assert 0.005 < again / sent < 0.15


def test_a_delay_shows_in_what_the_kernel_says(netlab_link: Link) -> None:
    """The smallest round trip is both delays together, and not much more."""
    netlab_link.set("ab", delay_ms=15)
    netlab_link.set("ba", delay_ms=5)
    with netlab_link.traffic("ab", Load(cc="cubic", rate_bps=10e6)) as traffic:
        time.sleep(1.0)
        assert 20_000 <= traffic.look()["0"]["min_rtt_us"] < 20_000 + LATE_MS * 1000


@on_every_backend
def test_marks_take_the_place_of_losses(netlab_link: Link) -> None:
    """A sender that asks for marks gets them; the link counts them, and drops nothing."""
    netlab_link.reset(ecn=True, ab={"rate_bps": 50e6, "delay_ms": 5, "queue_bytes": 1 << 20, "mark_bytes": 64 << 10})
    with netlab_link.traffic("ab", Load(cc="cubic")) as traffic:
        before = netlab_link.counters()["ab"]
        time.sleep(2.0)
        said = traffic.look()["0"]
        counted = netlab_link.counters()["ab"] - before
    assert said["options"] & 8  # both ends have agreed
    assert said["delivered_ce"] > 0
    assert counted.marked > 0
    assert counted.dropped == 0
    # Acknowledgements that come late on a busy machine make a tail probe now and then.
    assert said["total_retrans"] * 100 < said["delivered"]


def test_a_sender_that_does_not_ask_gets_no_marks(netlab_link: Link) -> None:
    """What it cannot understand is not said to it."""
    netlab_link.set("ab", rate_bps=20e6, delay_ms=5, queue_bytes=256 << 10, mark_bytes=32 << 10)
    with netlab_link.traffic("ab", Load(cc="cubic")) as traffic:
        time.sleep(1.5)
        said = traffic.look()["0"]
    assert not said["options"] & 8
    assert said["delivered_ce"] == 0


def test_a_competitor_takes_its_share_and_goes(netlab_link: Link) -> None:
    """A flow that is paced to 40 of 50 Mbps keeps it alone, and loses a part of it to two others."""
    netlab_link.set(rate_bps=50e6, delay_ms=5, queue_bytes=128 << 10)
    with netlab_link.traffic("ab", Load(cc="cubic", rate_bps=40e6)) as ours:
        shares = []
        with netlab_link.cross("ab", cc="cubic", flows=0) as theirs:
            for flows in (0, 3, 0):
                for _ in range(flows):
                    theirs.add(Load(cc="cubic"))
                time.sleep(1.0)
                began_s, before = ours.received()
                time.sleep(1.5)
                ended_s, after = ours.received()
                shares.append((after - before) * 8 / (ended_s - began_s) / 50e6)
                theirs.stop()
            assert theirs.received()[1] > 1 << 20
    assert shares[0] > 0.65
    assert shares[1] < shares[0] - 0.15
    assert shares[2] > shares[1] + 0.15


def test_bursts_come_and_pause(netlab_link: Link) -> None:
    """In tenths of a second there is traffic, and there is none."""
    netlab_link.set(rate_bps=50e6, delay_ms=2, queue_bytes=128 << 10)
    with netlab_link.cross("ab", cc="cubic", rate_bps=20e6, on_s=0.4, off_s=0.4) as cross:
        seen = [cross.received()[1]]
        for _ in range(30):
            time.sleep(0.1)
            seen.append(cross.received()[1])
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert sum(step == 0 for step in steps) >= 4
    assert sum(step > 100_000 for step in steps) >= 4
