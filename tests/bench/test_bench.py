"""The bench: one tiny real round has every key and figures that can be true; no figure is compared with a clock."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from prfaas_net.bench import iperf3, loopback
from prfaas_net.bench.emulation import emulate, why_not
from prfaas_net.bench.figures import Case, Comparison, Sample, mean_sample
from prfaas_net.bench.pair import Pair
from prfaas_net.bench.plan import QUICK, Path, Plan, parse_path
from prfaas_net.bench.processes import Child
from prfaas_net.bench.report import show
from prfaas_net.bench.wan import ideal_exposed_s
from prfaas_net.errors import ConfigError, PeerError
from prfaas_net.units import MiB

TINY = Plan(
    cases=(Case(1, MiB, True), Case(1, MiB, False), Case(2, MiB, True, tls=True)),
    rounds=1, run_bytes=64 * MiB, lateness_runs=1, first_byte_runs=5, paths=(), path_rounds=1, path_s=1.0,
    exposures=(), peer_rounds=1, peer_bytes=MiB, peers_on_paths=False,
)  # fmt: skip
ROW_KEYS = {
    "connections", "chunk_bytes", "checksum", "tls", "goodput_bps", "iperf3_bps", "goodput_over_iperf3",
    "goodput_over_iperf3_range", "cpu_s_per_gib", "cpu_over_iperf3",
}  # fmt: skip


def quiet(what: str) -> None:
    """Progress nobody looks at."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Pair() as both:
        yield both


def test_rows_have_their_keys_and_possible_figures(pair: Pair) -> None:
    """Every case is measured; where iperf3 is installed the ratio lies inside its range."""
    rows = loopback.rows(pair, TINY, quiet)
    assert len(rows) == (3 if pair.has_tls else 2)
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert 1e6 < row["goodput_bps"] < 1e13
        assert row["cpu_s_per_gib"] > 0
        if iperf3.available():
            low, high = row["goodput_over_iperf3_range"]
            assert low <= row["goodput_over_iperf3"] <= high
        else:
            assert row["goodput_over_iperf3"] is None


def test_lateness_and_first_byte_have_their_keys(pair: Pair) -> None:
    """Both come from the processes that moved the bytes."""
    late = loopback.loop_lateness(pair, TINY, quiet)
    assert late.keys() >= {"idle", "bulk"}
    assert min(late.values()) >= 0
    first = loopback.first_byte(pair, TINY, quiet)
    assert 0 < first["tcp_p50_us"] < first["confirmed_p50_us"]


def test_switched_off_checksums_still_deliver_every_byte(pair: Pair) -> None:
    """A run fails unless what landed equals what was sent, hashed or not."""
    pair.run(Case(2, MiB, False), 16 * MiB)
    pair.run(Case(2, MiB, True), 16 * MiB)


def test_a_prefill_exposes_less_than_its_whole_time(pair: Pair) -> None:
    """Chunks leave while others are still being made."""
    pair.connect(1)
    run = pair.prefill(8 * MiB, MiB, 0.2)
    pair.hang_up()
    # Eight megabytes take milliseconds here: only if nothing left before its end could so much be exposed.
    assert 0 < run["exposed_s"] < run["prefill_s"]


def test_a_failing_process_says_why() -> None:
    """Not a hang and not a traceback."""
    with Child("prfaas_net.bench.ends", "idle") as child, pytest.raises(PeerError, match="failed"):
        child.ask("checksums", loud=True)
    with Child("prfaas_net.bench.no_such_module") as child, pytest.raises(PeerError, match="ended"):
        child.ask("checksums")


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down by half slows both down, and the ratio stays."""
    comparison = Comparison(Case(1, MiB, True))
    for speed in (1.0, 0.5, 0.25):
        comparison.add(Sample(9e9 * speed, 0.2, 0.2), Sample(10e9 * speed, 0.1, 0.1))
    row = comparison.to_json()
    assert row["goodput_over_iperf3"] == 0.9
    assert row["goodput_over_iperf3_range"] == [0.9, 0.9]
    assert row["cpu_over_iperf3"] == 2.0
    assert mean_sample([]) is None


def test_ideal_exposure_is_what_remains_and_a_round_trip() -> None:
    """A slow prefill leaves its last chunk, a fast one what the path could not carry meanwhile."""
    chunks = [MiB] * 100
    rate_bps = 8.0 * 10 * MiB  # ten chunks a second
    assert ideal_exposed_s(chunks, prefill_s=20.0, rate_bps=rate_bps, rtt_s=0.5) == pytest.approx(0.1 + 0.5)
    assert ideal_exposed_s(chunks, prefill_s=5.0, rate_bps=rate_bps, rtt_s=0.5) == pytest.approx(5.0 + 0.05 + 0.5)


@pytest.mark.parametrize("text", ["1Gbps", "1Gbps,80ms,lots", "1Gbps,80ms,1.5", "fast,80ms"])
def test_a_path_that_cannot_be_read_is_refused(text: str) -> None:
    """With one line that says what a path looks like."""
    with pytest.raises(ConfigError):
        parse_path(text)


def test_a_path_is_read() -> None:
    """Loss as a share or in percent."""
    assert parse_path("1Gbps,80ms,0.1%") == Path(10**9, 0.08, 0.001)
    assert parse_path("200Mbps, 40ms") == Path(2 * 10**8, 0.04, 0.0)
    assert QUICK.with_path(Path(1, 1.0, 0.0)).paths == (Path(1, 1.0, 0.0),)


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_an_emulated_path_delays_and_leaves_nothing_behind() -> None:
    """Both ends run inside it; afterwards its namespaces are gone, also after an interruption."""
    with emulate(Path(10**8, 0.02, 0.001)) as place, Pair(place) as pair:
        pair.connect(1)
        assert pair.send(MiB, MiB)["took_s"] > 0.02
        pair.hang_up()
    with pytest.raises(KeyboardInterrupt), emulate(Path(10**8, 0.02, 0.0)):
        raise KeyboardInterrupt
    assert f"-{os.getpid()}-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_every_table_is_printed(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """With figures missing where there was no reference."""
    from rich.console import Console

    row: dict[str, Any] = Comparison(Case(1, MiB, True)).to_json()
    path = {"rate_bps": 1e9, "rtt_ms": 80.0, "loss": 0.001}
    report = {
        "rows": [row],
        "peers": [{"name": "other", "goodput_bps": None, "ours_over_peer": None, "note": "failed"}],
        "wan": [{**path, "connections": 4, "goodput_over_path": 0.9, "peers": {"iperf3": None}, "buffers": "host"}],
        "exposed": [
            {**path, "kv_bytes": MiB, "prefill_s": 1.0, "exposed_s": 0.1, "ideal_s": 0.1, "exposed_over_ideal": 1.0}
        ],
        "loop_lateness_p99_ms": {},
        "first_byte": {},
        "notes": ["iperf3 is not installed"],
    }
    show(report, Console(width=160))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("1.00 MiB", "other", "0.10%", "iperf3 is not installed"))


def test_peers_need_nothing_of_ours_but_their_harness() -> None:
    """So that an interpreter that has the peer, and not our dependencies, can run it."""
    code = (
        "import sys, prfaas_net.bench.peers.gloo, prfaas_net.bench.peers.nixl, prfaas_net.bench.peers.mooncake, "
        "prfaas_net.bench.peers.pyzmq; print(sorted(set(sys.modules) & {'orjson', 'uvloop', 'xxhash', 'torch', 'zmq'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
