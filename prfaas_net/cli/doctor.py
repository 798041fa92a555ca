"""``prfaas doctor``."""

from __future__ import annotations

import sys
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.markup import escape

from prfaas_net.doctor.collect import collect
from prfaas_net.doctor.examine import examine, worst
from prfaas_net.doctor.findings import Finding, Level, LinkNeeds, parse_needs
from prfaas_net.units import format_bytes, format_duration, format_rate

__all__ = ["doctor"]

MARKS = {Level.OK: "[green]ok  [/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[red]fail[/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    link: Annotated[str, typer.Option("--link", help="The link that this host is to carry: RATE,RTT.")] = "10Gbps,20ms",
) -> None:
    """Say what this host's settings mean for a link, and how to fix what is wrong. Changes nothing.

    Exit code 1 only if something fails; a warning costs speed, not function.
    """
    needs = parse_needs(link)
    facts = collect()
    findings = examine(facts, needs)
    if as_json:
        report = {
            "link": {"rate_bps": needs.rate_bps, "rtt_ms": needs.rtt_s * 1e3, "bdp_bytes": needs.bdp_bytes},
            "level": worst(findings).value,
            "findings": [finding.to_json() for finding in findings],
            "facts": facts.to_json(),
        }
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _show(findings, needs, Console())
    if worst(findings) is Level.FAIL:
        raise typer.Exit(1)


def _show(findings: list[Finding], needs: LinkNeeds, console: Console) -> None:
    rate, rtt, bdp = format_rate(needs.rate_bps), format_duration(needs.rtt_s), format_bytes(needs.bdp_bytes)
    console.print(f"For a link of {rate} and {rtt}, which holds {bdp}:", highlight=False)
    for finding in findings:
        console.print(f"{MARKS[finding.level]} [bold]{finding.check}[/]: {escape(finding.found)}", highlight=False)
        if finding.level is not Level.OK:
            for name, text in (("expected", finding.expected), ("why", finding.why), ("fix", finding.fix)):
                if text:
                    console.print(f"       {name}: {escape(text)}", highlight=False, soft_wrap=True)
