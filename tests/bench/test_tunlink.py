"""One way of the userspace link, under a clock of our own: what goes in comes out in order, in time, or is counted."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator

import pytest

from prfaas_net.bench.segments import VNET_BYTES
from prfaas_net.bench.tunlink import Direction

PACKET = bytes(VNET_BYTES) + b"\x45" + bytes(999)  # 1,000 bytes of IPv4, one segment
RATE_BPS = 8e6  # a packet takes a millisecond


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Where packets come out."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def a_way(pipe: tuple[int, int], **settings: float) -> Direction:
    values = {"rate_bps": math.inf, "delay_s": 0.0, "loss": 0.0, "queue_bytes": math.inf} | settings
    return Direction(-1, pipe[1], random=random.Random(1), **values)


def out(pipe: tuple[int, int]) -> int:
    """Packets that have come out since."""
    try:
        return len(os.read(pipe[0], 1 << 16)) // len(PACKET)
    except BlockingIOError:
        return 0


def test_a_packet_takes_its_turn_and_its_delay(pipe: tuple[int, int]) -> None:
    """The bottleneck first, one after the other, then the flight."""
    way = a_way(pipe, rate_bps=RATE_BPS, delay_s=0.010)
    for _ in range(3):
        way.push(PACKET, 1.0)
    for at_s, n in ((1.0105, 0), (1.0115, 1), (1.0125, 1), (1.0135, 1)):
        way.flush(at_s)
        assert out(pipe) == n
    assert way.flush(2.0) is None


def test_what_waits_leaves_at_the_new_rate(pipe: tuple[int, int]) -> None:
    """A cut to a tenth makes the rest of the queue ten times as long."""
    way = a_way(pipe, rate_bps=RATE_BPS)
    for _ in range(10):
        way.push(PACKET, 0.0)
    way.flush(0.0051)
    assert out(pipe) == 5
    way.set(0.0051, rate_bps=RATE_BPS / 10)
    way.flush(0.0149)
    assert out(pipe) == 0
    way.flush(0.0552)
    assert out(pipe) == 5
    way.push(PACKET, 0.060)
    assert way.flush(0.060) == pytest.approx(0.070)


def test_a_shorter_delay_overtakes_nobody(pipe: tuple[int, int]) -> None:
    """What is sent later comes later, however short its way has become."""
    way = a_way(pipe, delay_s=0.100)
    way.push(PACKET, 0.0)
    way.set(0.01, delay_s=0.001)
    way.push(PACKET, 0.01)
    way.flush(0.05)
    assert out(pipe) == 0
    way.flush(0.1)
    assert out(pipe) == 2


def test_a_full_queue_drops_and_counts(pipe: tuple[int, int]) -> None:
    """To the byte: three packets of a thousand fit in 3,000."""
    way = a_way(pipe, rate_bps=RATE_BPS, queue_bytes=3000)
    for _ in range(5):
        way.push(PACKET, 0.0)
    assert (way.segments, way.dropped, way.lost, way.longest_queue_bytes) == (5, 2, 0, 3000)
    way.flush(1.0)
    assert out(pipe) == 3


def test_a_black_hole_takes_everything_until_it_ends(pipe: tuple[int, int]) -> None:
    """A loss of one, and back to none."""
    way = a_way(pipe, loss=1.0)
    for _ in range(20):
        way.push(PACKET, 0.0)
    assert way.lost == 20
    way.set(0.0, loss=0.0)
    way.push(PACKET, 0.0)
    way.flush(0.0)
    assert (out(pipe), way.lost) == (1, 20)


def test_marks_begin_where_they_should(pipe: tuple[int, int]) -> None:
    """With more than the threshold waiting, and only for senders that understand them."""
    way = a_way(pipe, rate_bps=RATE_BPS, queue_bytes=100_000, mark_bytes=1500)
    understands = PACKET[:VNET_BYTES] + b"\x45\x02" + PACKET[VNET_BYTES + 2 :]
    for packet in (understands, understands, understands, PACKET, understands):
        way.push(packet, 0.0)
    assert way.marked == 2


def test_a_setting_that_there_is_not_is_refused(pipe: tuple[int, int]) -> None:
    """And nothing of the object can be reached that way."""
    with pytest.raises(TypeError, match="no write_fd"):
        a_way(pipe).set(0.0, write_fd=3)
