"""Simulation reports as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas_net.sim.case_study import paper

__all__ = ["show_paper"]


def _table(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right")
    return table


def show_paper(report: dict[str, Any], console: Console) -> None:
    """The report of ``prfaas sim paper``."""
    found, printed = report["analytic"], paper()["expected"]["table_6"]
    table = _table("Table 6, computed | printed", "", "PrfaaS-PD", "homogeneous", "naive")
    names = ("prfaas_pd", "homogeneous", "naive")
    table.add_row("requests/s", *[f"{found['lambda_max'][n]:.3f} | {printed['lambda_max'][n]}" for n in names])
    for i, what in enumerate(("mean TTFT", "P90 TTFT")):
        table.add_row(what, *[f"{found['ttft_s'][n][i]:.3f} | {printed['ttft_s'][n][i]}" for n in names])
    console.print(table)
    console.print(
        f"t = {found['t_tokens']:,} tokens, instances {found['n_prfaas']} / {found['n_p']} / {found['n_d']}, "
        f"{found['offloaded_share']:.1%} offloaded, l_long {found['l_long_tokens'] / 1024:.2f} Ki, "
        f"egress {found['egress_gbps']:.2f} Gbps"
    )
    if "event" in report:
        _show_event(report["event"], console)
    errors = _table("Largest relative error", "part", "error")
    for name, error in report["relative_errors"].items():
        errors.add_row(name, f"{error:.2%}")
    console.print(errors)


def _show_event(event: dict[str, Any], console: Console) -> None:
    expected = paper()["expected"]["event"]
    table = _table("Simulated | expected", "load", "system", "mean TTFT", "P90 TTFT")
    for load, row in event["ttft_s"].items():
        for name, (mean, p90) in row.items():
            mean_ci, p90_ci = event["ttft_ci95_s"][load][name]
            wanted = expected["ttft_s"][load][name]
            table.add_row(
                load, name, f"{mean:.2f} ± {mean_ci:.2f} | {wanted[0]}", f"{p90:.2f} ± {p90_ci:.2f} | {wanted[1]}"
            )
    console.print(table)
    rates = ", ".join(f"{n} {r:.3f} | {expected['saturation_req_s'][n]}" for n, r in event["saturation_req_s"].items())
    console.print(f"saturation, requests/s: {rates}")
