"""The congestion bench: what it records replays, what it judges has every key and figures that can be true."""

from __future__ import annotations

import gzip
import io
import lzma
import threading
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from prfaas_net.bench.congestion import show_congestion
from prfaas_net.bench.congestion_cases import FULL, QUICK, cases_of
from prfaas_net.bench.congestion_cost import telemetry_cost
from prfaas_net.bench.congestion_flows import Case, Competitor, record
from prfaas_net.bench.congestion_judge import Recording, judge, read_recording
from prfaas_net.bench.processes import Child
from prfaas_net.congestion.detectors import DETECTORS

DATA = Path(__file__).parent.parent / "congestion" / "data"
KEYS = {
    "cc", "rtt_ms", "queue_bdp", "competitor", "detector", "detect_ms_p50", "detect_ms_p90", "false_alarms_per_hour",
    "clear_ms_p50", "bandwidth_error_p50", "retransmitted_share_at_detection",
}  # fmt: skip


def recorded(name: str, tmp_path: Path) -> Recording:
    """One of the recordings that tests replay."""
    path = tmp_path / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(lzma.decompress((DATA / f"{name}.jsonl.xz").read_bytes())))
    return read_recording(path)


def test_a_row_for_every_detector_has_every_key(tmp_path: Path) -> None:
    """A competitor that every detector but the one on loss finds, after the path was overloaded."""
    rows = judge([recorded("competitor_bbr", tmp_path), recorded("competitor_cubic", tmp_path)])
    assert {row["detector"] for row in rows} == set(DETECTORS)
    assert {row["cc"] for row in rows} == {"bbr", "cubic"}
    for row in rows:
        assert row.keys() >= KEYS
        assert row["missed"] == int(row["detector"] == "loss-2%")
        assert row["overload_ms_p50"] > 0
        assert 0.5 < row["kept_share_p50"] <= 1.0
        if not row["missed"]:
            assert 0 < row["detect_ms_p50"] <= row["detect_ms_p90"] < 1000
            assert row["clear_ms_p50"] >= 0
    ours = [row for row in rows if row["detector"] == "prfaas"]
    assert {row["false_alarms_per_hour"] for row in ours} == {0.0}
    assert all(0 <= row["bandwidth_error_p50"] < 0.15 for row in ours)


def test_a_recording_of_real_flows_is_read_back(tmp_path: Path) -> None:
    """Two flows over loopback and a competitor that comes and leaves."""
    threads = threading.active_count()
    about = {"rate_bps": 1e9, "rtt_ms": 1, "queue_bdp": 1.0, "competitor": "ramping", "load": 0.02, "seed": 1}
    rival = Competitor("ramping", 0.2, 0.4, rate_bps=20e6, ramp_s=0.1)
    case = Case("cubic", 2, 20_000_000, 0.6, rival, 1, about)
    with Child("prfaas_net.bench.congestion_flows", "receive") as receiver:
        host, port = receiver.ask("listen", host="127.0.0.1")["endpoint"]
        n_lines = record(case, (host, port), str(tmp_path / "one.jsonl.gz"))
    found = read_recording(tmp_path / "one.jsonl.gz")
    assert found.about == about
    assert found.start_s is not None
    assert found.stop_s is not None
    assert found.samples[0].at_s < found.start_s < found.stop_s < found.samples[-1].at_s
    assert n_lines == 3 + len(found.samples) + len(found.others)
    assert [len(sample.connections) for sample in found.samples] == [2] * len(found.samples)
    assert threading.active_count() == threads


def test_every_case_has_a_name_of_its_own_and_the_same_seed_makes_the_same_case() -> None:
    """So that recordings can be kept, and others made beside them."""
    for plan in (QUICK, FULL):
        names = [name for spot in plan.spots for name, _ in cases_of(plan, spot)]
        assert len(set(names)) == len(names)
    one, again, other = (
        list(cases_of(replace(QUICK, seeds=seeds), QUICK.spots[0])) for seeds in ((1, 2), (1, 2), (3, 4))
    )
    assert one == again
    assert not {case.seed for _, case in one} & {case.seed for _, case in other}


def test_the_report_is_printed(tmp_path: Path) -> None:
    """With figures missing where there are none."""
    rows = judge([recorded("competitor_cubic", tmp_path)])
    printed = io.StringIO()
    show_congestion({"rows": rows, "telemetry": telemetry_cost(rounds=3)}, Console(file=printed, width=200))
    assert "rtt-increasing" in printed.getvalue()
    assert "of a core to look" in printed.getvalue()
