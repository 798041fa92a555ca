"""``prfaas probe``."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from prfaas_net.config import load_config, parse_address
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.transport.probing import ProbeReport, probe
from prfaas_net.units import format_rate

__all__ = ["command"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def command(
    address: Annotated[str, typer.Argument(help="KV port to probe, HOST:PORT.")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A prefill node's TOML file, for its keys and link options.")
    ] = None,
    connections: Annotated[str, typer.Option("--connections", help="Numbers of connections to try.")] = "1,2,4",
    congestion: Annotated[
        str, typer.Option("--congestion", help="Congestion controls to compare, such as bbr,cubic.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Measure the way to a decode node: reachability, authentication, round trip, segment size, goodput.

    Exits with 1 if something failed.
    """
    settings = load_config(NodeConfig, config, flags={"role": "prefill"}, env_prefix="PRFAAS_PREFILL__").kv
    console = Console()
    counts = [int(part) for part in connections.split(",") if part.strip().isdigit() and int(part) > 0] or [1]
    with console.status("") as status:
        report = asyncio.run(
            probe(
                parse_address(address),
                security=settings.security(),
                options=settings.options(),
                connections=counts,
                congestion_controls=[name.strip() for name in congestion.split(",") if name.strip()],
                on_step=lambda step: status.update(f"probing {address}: {step}"),
            )
        )
    if as_json:
        typer.echo(orjson.dumps(asdict(report)).decode())
    else:
        _print(console, report)
    raise typer.Exit(1 if report.failed else 0)


def _print(console: Console, report: ProbeReport) -> None:
    for finding in report.findings:
        console.print(
            f"[{_COLOURS[finding.status]}]{finding.status:<4}[/] {finding.check}: {finding.found}", highlight=False
        )
        if finding.fix and finding.status != "ok":
            console.print(f"     {finding.fix}", highlight=False)
    if report.goodput:
        table = Table("connections", "congestion control", "goodput", "retransmitted")
        for row in report.goodput:
            share = f"{row.retransmitted_share:.2%}"
            table.add_row(str(row.connections), row.congestion_control, format_rate(row.goodput_bps), share)
        console.print(table)
