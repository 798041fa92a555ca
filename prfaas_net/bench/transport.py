"""The transport's bench, whole."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

from prfaas_net.bench import iperf3, loopback, rivals
from prfaas_net.bench.pair import Pair
from prfaas_net.bench.plan import Plan
from prfaas_net.bench.wan import wan

__all__ = ["bench_transport"]


def bench_transport(
    plan: Plan, *, peers: bool = False, peer_python: str | None = None, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure; the report has the keys that ``docs/bench.md`` gives.

    Raises:
        PrfaasError: a process of the bench failed.
    """
    notes: list[str] = []
    if not iperf3.available():
        notes.append("iperf3 is not installed: no reference (apt-get install iperf3)")
    report: dict[str, Any] = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cpus": os.cpu_count(), "kernel": platform.release(), "load_1min": os.getloadavg()[0]},
        "rows": [],
        "loop_lateness_p99_ms": {},
        "first_byte": {},
        "peers": [],
        "wan": [],
        "exposed": [],
        "notes": notes,
    }
    with Pair() as pair:
        if not pair.has_tls:
            notes.append("no TLS rows: there is no openssl command to make a certificate with")
        report["rows"] = loopback.rows(pair, plan, progress)
        report["congestion_control"] = pair.congestion_control
        report["loop_lateness_p99_ms"] = loopback.loop_lateness(pair, plan, progress)
        report["first_byte"] = loopback.first_byte(pair, plan, progress)
        if peers:
            report["peers"] = rivals.rows(pair, plan, peer_python, progress, notes)
    report["wan"], report["exposed"] = wan(
        plan, progress, notes, peer_python=(peer_python or sys.executable) if peers and plan.peers_on_paths else None
    )
    return report
