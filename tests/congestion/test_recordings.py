"""What real kernels said, replayed: the same verdicts every time, and the right ones.

The recordings are those of tests/netem/test_verdicts.py (set ``NETEM_RECORD`` to make them anew) and two of
``prfaas bench congestion``.
"""

from __future__ import annotations

import lzma
from itertools import groupby
from pathlib import Path

import pytest

from prfaas_net.congestion.detectors import DETECTORS, replay
from prfaas_net.congestion.samples import LinkSample, LogHead, Mark, read_log
from prfaas_net.congestion.verdict import LinkState

DATA = Path(__file__).parent / "data"
IDLE, CLEAR, BUILDING, CONGESTED = "idle", "clear", "building", "congested"
# In some of them whoever looked also changed the link, and looked late for that: what is seen just then is doubted.
DOUBT = "host-limited"
SEQUENCES = {
    "clean": [IDLE, CLEAR],
    "longer_route": [IDLE, CLEAR, DOUBT, BUILDING, CLEAR],
    "loss": [IDLE, CLEAR, CONGESTED, BUILDING, CLEAR],
    "rate_cut": [IDLE, CLEAR, DOUBT, CONGESTED, CLEAR],
    "slow_receiver": [IDLE, CLEAR, "host-limited"],
    "small_send_buffers": [IDLE, CLEAR, "host-limited"],
    "little_to_send": [IDLE, CLEAR, "app-limited"],
    "black_hole": [IDLE, CLEAR, DOUBT, "down", CLEAR],
    "marks": [IDLE, CLEAR, BUILDING, CONGESTED, BUILDING, CLEAR],
    "lost_acknowledgements": [IDLE, CLEAR],
    "competitor_cubic": [IDLE, CLEAR, BUILDING, CONGESTED, CLEAR],
    "competitor_bbr": [IDLE, CLEAR, BUILDING, CONGESTED, CLEAR],
}
NEVER_CONGESTED = ("clean", "longer_route", "slow_receiver", "small_send_buffers", "little_to_send", "black_hole",
                   "lost_acknowledgements")  # fmt: skip


def recording(name: str) -> tuple[LogHead, list[LinkSample | Mark]]:
    with lzma.open(DATA / f"{name}.jsonl.xz") as file:
        head, entries = read_log(file)
        return head, list(entries)


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_recording_has_its_sequence_of_verdicts(name: str) -> None:
    """As it was on the day it was made."""
    verdicts = replay("prfaas", *recording(name))
    assert [state.value for state, _ in groupby(verdict.state for verdict in verdicts)] == SEQUENCES[name]


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_replay_says_the_same_bit_for_bit(detector: str) -> None:
    """Every field of every verdict."""
    for name in ("rate_cut", "competitor_bbr"):
        log = recording(name)
        assert list(replay(detector, *log)) == list(replay(detector, *log))


def test_plain_thresholds_alarm_where_there_is_no_congestion() -> None:
    """Why there is more to it: a longer route and a slow receiver, by each detector."""
    alarmed = {
        name: {
            detector
            for detector in DETECTORS
            if LinkState.CONGESTED in {verdict.state for verdict in replay(detector, *recording(name))}
        }
        for name in NEVER_CONGESTED
    }
    assert "prfaas" not in set().union(*alarmed.values())
    assert alarmed["longer_route"] == alarmed["slow_receiver"] == {"rtt-1.25", "rtt-increasing"}
    assert alarmed["black_hole"] >= {"loss-2%"}


def test_a_competitor_is_found_before_anything_is_lost() -> None:
    """On a queue of one bandwidth-delay product, between its first byte and our first retransmission."""
    head, entries = recording("competitor_cubic")
    came_s = next(entry.at_s for entry in entries if isinstance(entry, Mark) and entry.what == "competitor-start")
    found = next(verdict for verdict in replay("prfaas", head, entries) if verdict.state is LinkState.CONGESTED)
    assert found.at_s > came_s
    assert found.retransmitted_share == 0.0
