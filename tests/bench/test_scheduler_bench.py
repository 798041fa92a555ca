"""The scheduler's bench: its rows have their keys, and what it decided is accounted for."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from prfaas_net.bench.scheduler import IN_FLIGHT, NODES, bench_scheduler, show_scheduler
from prfaas_net.scheduling import policy_names


def test_every_policy_decides_with_64_nodes_and_10_000_requests_in_flight() -> None:
    """And the simulator finishes what it was given."""
    report = bench_scheduler(decisions=50, simulated=100)
    assert [row["policy"] for row in report["decisions"]] == policy_names()
    for row in report["decisions"]:
        assert (row["nodes"], row["in_flight"]) == (NODES, IN_FLIGHT)
        assert 0 < row["p50_us"] <= row["p99_us"]
    # With the detector, which is slower, a tenth.
    assert [(run["detector"], run["requests"]) for run in report["simulator"]] == [
        (False, 100),
        (False, 100),
        (True, 10),
    ]
    out = StringIO()
    show_scheduler(report, Console(file=out, width=200))
    assert "earliest-finish" in out.getvalue()
