"""``prfaas sim``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from prfaas_net.sim.paper import analytic, relative_errors, sweeps
from prfaas_net.sim.paper_event import event_part
from prfaas_net.sim.report import show_paper

__all__ = ["app"]

app = typer.Typer(help="Simulate fleets with the very scheduler that gateways run.", no_args_is_help=True)


@app.callback()
def _sim() -> None:
    """Simulate fleets with the very scheduler that gateways run."""


def _progress() -> Callable[[str], None]:
    """Tells on stderr how far a long run is."""
    console = Console(stderr=True)
    return lambda what: console.print(what, highlight=False)


def _print(report: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")


@app.command("paper")
def paper_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    analytic_only: Annotated[bool, typer.Option("--analytic", help="Leave out the event simulation.")] = False,
    scale: Annotated[
        float, typer.Option("--scale", help="Requests of every simulated run, times this; 1 takes some minutes.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals and lengths.")] = 1,
) -> None:
    """The paper's case study, computed and simulated, beside what is printed."""
    report: dict[str, Any] = {"analytic": analytic()}
    if not analytic_only:
        report["event"] = event_part(scale=scale, seed=seed, progress=_progress())
    report["sweeps"] = sweeps()
    report["relative_errors"] = relative_errors(report)
    report["max_relative_error"] = max(report["relative_errors"].values())
    if as_json:
        _print(report)
    else:
        show_paper(report, Console())
