"""Every scenario does to a real TCP what its file says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from prfaas_net.congestion.samples import LinkSample, read_log
from tests.netem.conftest import PlayedOnce
from tests.netem.test_truth import CHOSEN
from tools.netlab.fixture import need_laboratory

pytestmark = [pytest.mark.netem, pytest.mark.timeout(120)]
ROOT = Path(__file__).parent.parent.parent


def moved(samples: list[LinkSample], field: str) -> int:
    """By how much a counter of the kernel grew over these samples, all flows together."""
    first, last = ({number: getattr(info, field) for number, info in s.connections} for s in (samples[0], samples[-1]))
    return sum(last[number] - first[number] for number in first)


def rtt_ms(samples: list[LinkSample]) -> float:
    """Mean of the smoothed round trip."""
    return fmean(info.rtt_us for sample in samples for _, info in sample.connections) / 1e3


def delivered_bps(samples: list[LinkSample]) -> float:
    """Acknowledged bytes."""
    return moved(samples, "bytes_acked") * 8 / (samples[-1].at_s - samples[0].at_s)


def test_delay_step(played: PlayedOnce) -> None:
    """The round trip grows by ten milliseconds, and nothing else does."""
    seen = played("delay-step")
    before, after = seen.between(1, 3), seen.between(4, 8)
    assert 6 < rtt_ms(after) - rtt_ms(before) < 20
    assert seen.counters["ab"].lost == seen.counters["ab"].dropped == 0


def test_loss_step(played: PlayedOnce) -> None:
    """Retransmits come with the loss and go with it."""
    seen = played("loss-step")
    during, after = seen.between(3.3, 6), seen.between(7.5, 9)
    assert seen.counters["ab"].lost > 20
    assert moved(during, "total_retrans") > 20
    assert moved(after, "total_retrans") < moved(during, "total_retrans") / 4


def test_rate_cut(played: PlayedOnce) -> None:
    """A queue builds, overflows, and what arrives falls to the new rate; then it is as before."""
    seen = played("rate-cut")
    before, during, after = seen.between(1, 3), seen.between(4, 7), seen.between(8, 10)
    assert delivered_bps(during) < 32e6 < 45e6 < delivered_bps(before)
    assert rtt_ms(during) > rtt_ms(before) + 20
    assert moved(seen.between(3, 7), "total_retrans") > 10
    assert delivered_bps(after) > 45e6


def test_bursty_cross(played: PlayedOnce) -> None:
    """While others burst, the queue overflows and our packets are lost in it."""
    seen = played("bursty-cross")
    assert seen.counters["ab"].dropped > 0
    assert [what for _, _, what in seen.events] == ["competitor comes", "competitor goes"]
    assert moved(seen.between(3, 8), "total_retrans") > moved(seen.between(0.5, 3), "total_retrans")


def test_slow_receiver(played: PlayedOnce) -> None:
    """The kernel says that it waits for the receiver's window; the link loses nothing."""
    seen = played("slow-receiver")
    steady = seen.between(2, 6)
    assert moved(steady, "rwnd_limited_us") > 0.5 * moved(steady, "busy_us")
    assert delivered_bps(steady) < 30e6
    assert seen.counters["ab"].dropped == 0


def test_small_buffers(played: PlayedOnce) -> None:
    """The kernel says that it waits for our own send buffer."""
    seen = played("small-buffers")
    steady = seen.between(2, 6)
    assert moved(steady, "sndbuf_limited_us") > 0.3 * moved(steady, "busy_us")
    assert delivered_bps(steady) < 80e6
    assert seen.counters["ab"].dropped == 0


def test_app_limited(played: PlayedOnce) -> None:
    """Most samples carry the kernel's flag, and what we offer arrives."""
    seen = played("app-limited")
    steady = [info for sample in seen.between(2, 6) for _, info in sample.connections]
    assert sum(info.app_limited for info in steady) > 0.5 * len(steady)
    assert 10e6 < delivered_bps(seen.between(2, 6)) < 22e6


def test_black_hole(played: PlayedOnce) -> None:
    """Nothing is acknowledged while it is there, timeouts rise, and then it flows again."""
    seen = played("black-hole")
    gone, back = seen.between(3.5, 4.9), seen.between(7.5, 9)
    assert moved(gone, "bytes_acked") == 0
    assert max(info.backoff for sample in gone for _, info in sample.connections) >= 1
    assert delivered_bps(back) > 10e6


def test_ecn_marks(played: PlayedOnce) -> None:
    """Marks rise with the competitor, and nothing is lost."""
    seen = played("ecn-marks")
    assert all(info.ecn for _, info in seen.samples[-1].connections)
    assert moved(seen.between(3, 6.2), "delivered_ce") > 20
    assert moved(seen.between(3, 6.2), "delivered_ce") > moved(seen.between(0.5, 3), "delivered_ce")
    assert seen.counters["ab"].dropped == 0


def test_reverse_loss(played: PlayedOnce) -> None:
    """A tenth of the acknowledgements is gone, and hardly anything is sent twice."""
    seen = played("reverse-loss")
    assert seen.counters["ba"].lost > 50
    assert seen.counters["ab"].lost == 0
    after = seen.between(3.2, 7)
    assert moved(after, "bytes_retrans") < 0.02 * moved(after, "bytes_sent")


def test_the_command_plays_a_clean_link_and_logs_it(tmp_path: Path) -> None:
    """As a person would run it: rows, counters, the backend said aloud, and a log that can be read again."""
    need_laboratory()
    log = tmp_path / "clean.jsonl"
    command = [sys.executable, "-m", "tools.netlab", "run", "clean", "--json", "--log", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] == CHOSEN
    assert f"backend {CHOSEN}" in done.stderr
    assert report["counters"]["ab"]["lost"] == report["counters"]["ab"]["dropped"] == 0
    assert all(row["rtt_ms"] > 20 for row in report["rows"])
    assert fmean(row["received_bps"] for row in report["rows"][2:]) > 40e6
    head, entries = read_log(log.read_bytes().splitlines())
    assert head.congestion_control == "cubic"
    assert sum(isinstance(entry, LinkSample) for entry in entries) > 30
