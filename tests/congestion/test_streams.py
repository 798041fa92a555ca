"""The number of connections: found on links of several kinds, bounded, and given back when more does not help."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas_net.congestion.streams import StreamSample, StreamTuner


def drive(
    tuner: StreamTuner,
    rate_of: Callable[[int], float],
    *,
    loss_of: Callable[[int], float] = lambda n: 0.0,
    busy: float = 1.0,
    seconds: int = 240,
    start_s: float = 0.0,
) -> list[int]:
    """Feed a link whose throughput (bytes/s) and loss follow the number of connections; the counts over time."""
    counts = []
    for tick in range(seconds * 2):
        n = tuner.streams
        sample = StreamSample(start_s + tick / 2, int(rate_of(n) / 2), loss_of(n), busy, 0.04)
        counts.append(tuner.add(sample))
    return counts


def settled(counts: list[int]) -> float:
    """Mean over the last third."""
    tail = counts[-len(counts) // 3 :]
    return sum(tail) / len(tail)


def test_window_limited_connections_are_multiplied() -> None:
    """Each carries 80 MB/s of a 1.25 GB/s path: the climb goes to where the path is full."""
    counts = drive(StreamTuner(start=1), lambda n: min(n * 80e6, 1.25e9))
    assert 12 <= settled(counts) <= 16


def test_one_is_enough_where_one_fills_the_path() -> None:
    """More connections that bring nothing are given back."""
    counts = drive(StreamTuner(start=4), lambda n: 125e6)
    assert settled(counts) <= 2


def test_loss_that_grows_with_connections_stops_the_climb() -> None:
    """Throughput still rises a little, but every byte is paid for with retransmissions."""
    counts = drive(StreamTuner(start=1), lambda n: 100e6 * (1 - 0.5**n), loss_of=lambda n: 0.004 * n)
    assert settled(counts) <= 5


def test_a_link_that_was_idle_says_nothing() -> None:
    """Without chunks waiting there is no evidence, and nothing changes."""
    counts = drive(StreamTuner(start=3), lambda n: 1e6, busy=0.2)
    assert set(counts) == {3}


def test_a_link_that_changes_is_followed() -> None:
    """A path that first needs many connections and then is filled by one."""
    tuner = StreamTuner(start=1)
    many = drive(tuner, lambda n: min(n * 80e6, 1.0e9))
    few = drive(tuner, lambda n: 60e6, seconds=600, start_s=240.0)
    assert settled(many) >= 9
    assert settled(few) <= 4


@pytest.mark.parametrize(("lowest", "highest"), [(1, 1), (2, 5), (4, 64)])
def test_the_bounds_hold(lowest: int, highest: int) -> None:
    """Whatever the link does."""
    for rate_of in (lambda n: n * 1e6, lambda n: 1e6 / n, lambda n: 0.0):
        counts = drive(StreamTuner(start=3, lowest=lowest, highest=highest), rate_of)
        assert lowest <= min(counts)
        assert max(counts) <= highest
