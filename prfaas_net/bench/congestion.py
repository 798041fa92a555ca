"""The congestion bench, whole: recordings of a matrix of paths, and what each detector makes of them."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas_net.bench.congestion_cases import CongestionPlan, cases_of
from prfaas_net.bench.congestion_cost import telemetry_cost
from prfaas_net.bench.congestion_judge import judge, read_recording
from prfaas_net.bench.congestion_record import record_all
from prfaas_net.bench.emulation import why_not
from prfaas_net.errors import ConfigError

__all__ = ["bench_congestion", "show_congestion"]


def bench_congestion(
    plan: CongestionPlan, *, recordings: Path | None = None, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Record and judge; the report has the keys that ``docs/congestion.md`` gives.

    Args:
        recordings: where to keep them; those that are there already are judged, not made again.

    Raises:
        PrfaasError: the host does not allow an emulated path, or a process of the bench failed.
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError("no congestion can be recorded here", found=reason)
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as scratch:
        directory = recordings or Path(scratch)
        record_all(plan, directory, progress)
        progress("judging")
        names = [name for spot in plan.spots for name, _ in cases_of(plan, spot)]
        rows = judge(read_recording(directory / f"{name}.jsonl.gz") for name in names)
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load_1min": os.getloadavg()[0]},
        "seeds": plan.seeds,
        "recordings": len(names),
        "rows": rows,
        "telemetry": telemetry_cost(),
    }


def _figure(value: float | None, text: str = "{:.0f}") -> str:
    return "–" if value is None else text.format(value)


def show_congestion(report: dict[str, Any], console: Console) -> None:
    """A table for people."""
    table = Table(title="Detection from the moment of overload, and alarms without cause")
    for name in ("control", "RTT", "queue", "competitor", "detector", "p50 ms", "p90 ms", "overload ms", "missed",
                 "alarms/h", "clear ms", "bandwidth off", "sent again"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["cc"], f"{row['rtt_ms']} ms", f"{row['queue_bdp']:g} BDP", row["competitor"], row["detector"],
            _figure(row["detect_ms_p50"]), _figure(row["detect_ms_p90"]), _figure(row["overload_ms_p50"]),
            "–" if row["competitor"] == "none" else f"{row['missed']}/{row['runs']}",
            _figure(row["false_alarms_per_hour"]), _figure(row["clear_ms_p50"]),
            _figure(row["bandwidth_error_p50"], "{:.1%}"), _figure(row["retransmitted_share_at_detection"], "{:.2%}"),
        )  # fmt: skip
    console.print(table)
    cost = report["telemetry"]
    console.print(
        f"{cost['connections']} connections on {cost['links']} links: {cost['poll_core_share']:.2%} of a core to look, "
        f"{cost['core_share']:.2%} with verdicts; all on one link: {cost['one_link_core_share']:.2%}"
    )
