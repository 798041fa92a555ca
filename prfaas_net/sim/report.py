"""Simulation reports as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas_net.sim.case_study import paper
from prfaas_net.units import format_bytes

__all__ = ["show_compare", "show_paper", "show_plan"]

TTFTS = ("ttft_s", "ttft_pipelined_s")


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


def show_compare(report: dict[str, Any], console: Console) -> None:
    """The report of ``prfaas sim compare``."""
    names = ("workload", "link", "load", "policy", "mean", "P90", "P99", "goodput", "offloaded")
    table = _table(f"TTFT in seconds, goodput in requests/s; the default policy is {report['default_policy']}", *names)
    before = None
    for row in report["rows"]:
        group = (row["workload"], row["link"], row["load"])
        if before is not None and group != before:
            table.add_section()
        before = group
        table.add_row(
            row["workload"], row["link"], str(row["load"]), row["policy"],
            f"{row['ttft_mean_s']:.2f} ± {row['ttft_mean_ci95_s']:.2f}", f"{row['ttft_p90_s']:.2f}",
            f"{row['ttft_p99_s']:.2f}", f"{row['goodput_req_s']:.2f}", f"{row['offloaded_share']:.0%}",
        )  # fmt: skip
    console.print(table)
    for row in report["rows"]:
        if row["policy"] == report["default_policy"] and "drop_oracle_req_s" in row:
            console.print(
                f"{row['workload']} at {row['load']}: {row['drop_throughput_req_s']:.2f} requests/s through the drops, "
                f"{row['drop_throughput_req_s'] / row['drop_oracle_req_s']:.1%} of the re-optimised threshold's"
            )


def show_plan(report: dict[str, Any], console: Console) -> None:
    """The report of ``prfaas plan``."""
    sizes = _table(f"KVCache of {report['model']}", "tokens", "size", "prefill", "KV throughput")
    for row in report["kv"]["rows"]:
        sizes.add_row(
            f"{row['tokens']:,}", format_bytes(row["kv_bytes"]), f"{row['prefill_s']:.2f} s",
            f"{row['phi_gbps']:.2f} Gbps",
        )  # fmt: skip
    console.print(sizes)
    table = _table(
        "Deployments; TTFT without load, mean / P90", "", "prefill : decode", "requests/s", "t", "offloaded", "egress",
        "TTFT", "pipelined", "binds",
    )  # fmt: skip
    for key in ("best", "homogeneous", "homogeneous_equal_cost", "naive"):
        row = report[key]
        table.add_row(
            key.replace("_", ", "), f"{row['n_p']} : {row['n_d']}", f"{row['lambda_max']:.3f}",
            "–" if row["t_tokens"] is None else f"{row['t_tokens']:,}", f"{row['offloaded_share']:.0%}",
            f"{row['egress_gbps']:.2f} Gbps", *(f"{row[k][0]:.2f} / {row[k][1]:.2f}" for k in TTFTS), row["bottleneck"],
        )  # fmt: skip
    console.print(table)
    for reason in report["verdict"]["reasons"]:
        console.print(f"• {reason}")
    longest = report["breaks_even"]["output_tokens"]
    if longest is not None:
        console.print(f"• beyond {longest:,.0f} output tokens it carries less than as many PD instances")
    console.print(f"prefill times: {report['profiles']['prefill']}; PD: {report['profiles']['pd']}")
    verdict = "it pays" if report["verdict"]["pays"] else "it does not pay at equal cost"
    console.print(f"[bold]{verdict}[/bold]")
