"""Whatever a kernel may say, and logs of it: nothing raises, nothing is not a number, a replay says the same."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_net.congestion.detectors import DETECTORS, make_detector, replay
from prfaas_net.congestion.samples import LinkSample, LogHead, Mark, read_log, write_head, write_mark, write_sample
from prfaas_net.congestion.signals import SignalTracker
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.congestion.verdict import LinkState, Verdict
from prfaas_net.errors import ConfigError, UsageError
from tests.congestion.fluid import Fluid, info

CUTS = (0, 8, 72, 104, 148, 150, 160, 192, 200, 215, 216, 280)


def counter(rng: random.Random, bits: int) -> int:
    """Small, close to where it wraps, or anything."""
    top = 1 << bits
    return rng.choice((rng.randrange(10_000), top - 1 - rng.randrange(2000), rng.randrange(top)))


def some_struct(rng: random.Random) -> TcpInfo:
    """As a kernel gives it, cut off anywhere."""
    words = struct.pack("<24I", *(counter(rng, 32) for _ in range(24)))
    longs = struct.pack("<14Q", *(counter(rng, 64) for _ in range(14)))
    return TcpInfo.parse((rng.randbytes(8) + words + longs)[: rng.choice(CUTS)])


def moved_on(rng: random.Random, info: TcpInfo) -> TcpInfo:
    """The same connection a little later, with counters that wrap."""
    return TcpInfo._make(
        (value + rng.choice((0, 0, 1, 1448, 10**6))) % (1 << (64 if value >= 1 << 32 else 32)) for value in info
    )


@st.composite
def looks(draw: st.DrawFn) -> list[LinkSample]:
    """Times that stand still, run backwards or leap; connections that come, go, move on and restart."""
    rng = random.Random(draw(st.integers(0, 1 << 40)))
    at_s, made = rng.uniform(-1e6, 1e9), []
    rows: dict[int, TcpInfo] = {}
    for _ in range(draw(st.integers(1, 40))):
        at_s += rng.choice((0.0, 1e-9, 0.02, 0.02, 0.02, rng.uniform(0, 0.1), rng.uniform(-1e3, 1e7)))
        for number in range(1, 4):
            fate = rng.random()
            if fate < 0.1:
                rows.pop(number, None)
            elif fate < 0.3 or number not in rows:
                rows[number] = some_struct(rng)
            else:
                rows[number] = moved_on(rng, rows[number])
        made.append(LinkSample(at_s, rng.random() < 0.9, counter(rng, 63), tuple(rows.items())))
    return made


def numbers_of(value: Any) -> list[float]:
    """Every number in a verdict, however deep."""
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in numbers_of(item)]
    return [value] if isinstance(value, (int, float)) else []


def check(verdict: Verdict) -> None:
    assert all(math.isfinite(number) for number in numbers_of(astuple(verdict)))
    assert 0 <= verdict.confidence <= 1
    assert 0 <= verdict.retransmitted_share <= 1
    assert verdict.queueing_delay_s >= 0
    assert verdict.goodput_bps >= 0
    assert verdict.drain_s is None or verdict.drain_s >= 0


@settings(max_examples=150, deadline=None)
@given(looks(), st.sampled_from(["cubic", "bbr", "reno", ""]))
def test_no_sequence_of_looks_raises_or_makes_a_nan(sequence: list[LinkSample], control: str) -> None:
    """Wrapping counters, zero intervals, shrinking structs, restarts."""
    for name in DETECTORS:
        detector = make_detector(name, control)
        for look in sequence:
            check(detector.observe(look))


@settings(max_examples=50, deadline=None)
@given(looks())
def test_any_log_reads_back_as_it_was_written(sequence: list[LinkSample]) -> None:
    """And the verdicts of what was read are those of what was written, bit for bit."""
    head = LogHead("cubic", {"seed": 7})
    lines = [write_head(head), *map(write_sample, sequence), write_mark(Mark(1.5, "competitor", 2.5))]
    found, entries = read_log(lines)
    read = list(entries)
    assert found == head
    assert read == [*sequence, Mark(1.5, "competitor", 2.5)]
    for name in DETECTORS:
        detector = make_detector(name, "cubic")
        assert list(replay(name, found, read)) == [detector.observe(look) for look in sequence]


def test_a_log_of_another_kernel_has_zeros_for_what_it_lacks() -> None:
    """Fields are found by name, in whatever order and number."""
    lines = [
        b'{"format":"prfaas-telemetry","version":1,"congestion_control":"bbr","about":{},"fields":["rtt_us","future"]}',
        b"[1.0,true,5,[[1,40000,9]]]",
    ]
    _, entries = read_log(lines)
    assert list(entries) == [LinkSample(1.0, True, 5, ((1, info(rtt_us=40_000, mss_bytes=0)),))]


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"nothing", b'{"format":"prfaas-telemetry","version":2}', b"[1.0,true,5,[]]"]
)
def test_what_is_not_a_log_is_refused(line: bytes) -> None:
    """At the first line."""
    with pytest.raises(UsageError):
        read_log([line])


@pytest.mark.parametrize("line", [b"[1.0,true]", b"{}", b"[", b"[1.0,true,5,[[1,2]]]", b"7"])
def test_a_broken_line_is_refused_where_it_stands(line: bytes) -> None:
    """With what it was."""
    with pytest.raises(UsageError):
        list(read_log([write_head(LogHead("cubic")), line])[1])


def test_an_unknown_detector_is_refused_with_the_names_there_are() -> None:
    """The first is the one that links use."""
    with pytest.raises(ConfigError, match="rtt-increasing"):
        make_detector("none", "cubic")


def test_counters_of_32_bits_may_wrap() -> None:
    """What arrived across the wrap is counted once."""
    tracker = SignalTracker("cubic")
    before = info(delivered=(1 << 32) - 10, bytes_acked=1000, bytes_sent=1000, unacked=1)
    after = info(delivered=20, bytes_acked=44_440, bytes_sent=44_440, unacked=1)
    assert tracker.add(LinkSample(1.0, True, 0, ((1, before),))) is None
    step = tracker.add(LinkSample(1.1, True, 0, ((1, after),)))
    assert step is not None
    assert step.delivered_bytes == 30 * 1448


def test_a_connection_that_was_replaced_brings_nothing_of_its_predecessor() -> None:
    """Its counters begin again; the difference would be nonsense."""
    tracker = SignalTracker("cubic")
    tracker.add(LinkSample(1.0, True, 0, ((1, info(delivered=500, bytes_acked=10**6, bytes_sent=10**6)),)))
    step = tracker.add(LinkSample(1.1, True, 0, ((1, info(delivered=3, bytes_acked=4344, bytes_sent=4344)),)))
    assert step is not None
    assert (step.delivered_bytes, step.sent_bytes, step.stalled_s) == (0, 0, 0.0)


def test_a_kernel_without_byte_counters_still_shows_loss() -> None:
    """Linux before 4.19: retransmitted segments, as many bytes as a segment has."""
    tracker = SignalTracker("cubic")
    tracker.add(LinkSample(1.0, True, 0, ((1, info(total_retrans=5, bytes_acked=10**6)),)))
    step = tracker.add(LinkSample(1.1, True, 0, ((1, info(total_retrans=8, bytes_acked=2 * 10**6)),)))
    assert step is not None
    assert (step.retrans_bytes, step.sent_bytes) == (3 * 1448, 10**6 + 3 * 1448)


def test_simple_detectors_alarm_on_their_one_signal() -> None:
    """A competitor makes a queue and losses: each of them sees it, and none sees anything before."""
    for name in ("rtt-1.25", "loss-2%", "rtt-increasing"):
        link, detector = Fluid(), make_detector(name, "cubic")
        before = [detector.observe(look).state for look in link.run(3.0)]
        link.others_bps = 160e6
        during = [detector.observe(look).state for look in link.run(2.0)]
        assert LinkState.CONGESTED not in before
        assert during[-1] is LinkState.CONGESTED
