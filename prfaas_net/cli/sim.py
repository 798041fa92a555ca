"""``prfaas sim``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from prfaas_net.scheduling import PolicySettings, make_policy
from prfaas_net.sim.compare import LINKS, LOADS, ORACLE, PAPER_REQUESTS, WORKLOADS, cells, compare
from prfaas_net.sim.paper import analytic, relative_errors, sweeps
from prfaas_net.sim.paper_event import event_part
from prfaas_net.sim.plots import draw
from prfaas_net.sim.report import show_compare, show_paper

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
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time; 0: one a core.")] = 0,
) -> None:
    """The paper's case study, computed and simulated, beside what is printed."""
    report: dict[str, Any] = {"analytic": analytic()}
    if not analytic_only:
        report["event"] = event_part(scale=scale, seed=seed, jobs=jobs or os.cpu_count() or 1, progress=_progress())
    report["sweeps"] = sweeps()
    report["relative_errors"] = relative_errors(report)
    report["max_relative_error"] = max(report["relative_errors"].values())
    if as_json:
        _print(report)
    else:
        show_paper(report, Console())


@app.command("compare")
def compare_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    workload: Annotated[list[str] | None, typer.Option("--workload", help="paper or mooncake-conversation.")] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="A trace of your own instead: Mooncake .jsonl or Azure .csv, or .gz.")
    ] = None,
    link: Annotated[list[str] | None, typer.Option("--link", help="steady, drop or bursty. Repeatable.")] = None,
    load: Annotated[list[float] | None, typer.Option("--load", help="Share of capacity. Repeatable.")] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help="Repeatable; default: all.")] = None,
    requests: Annotated[int, typer.Option("--requests", help="Of every run, at most.")] = PAPER_REQUESTS,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and cross traffic.")] = 1,
    serial: Annotated[
        bool, typer.Option("--serial", help="Send the KVCache after the prefill, as the paper counts it.")
    ] = False,
    ticks: Annotated[bool, typer.Option("--ticks", help="Keep the 3 s ticks of Mooncake's clock.")] = False,
    detector: Annotated[
        bool,
        typer.Option(help="Links are judged by the congestion detector; else the router is told what they carry."),
    ] = True,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at a time; 0: one a core.")] = 0,
    plots: Annotated[Path | None, typer.Option("--plots", help="Directory for PNG plots; needs matplotlib.")] = None,
) -> None:
    """Every policy on the same arrivals: TTFT, goodput and offloaded share, over workloads, links and loads."""
    names = workload or ([trace.name] if trace else list(WORKLOADS))
    for name in policy or ():
        if name == ORACLE:
            continue
        make_policy(name, PolicySettings(rng=Random(seed)))
    todo = cells(
        names, link or LINKS, load or LOADS, policy, requests=requests, seed=seed, trace=str(trace) if trace else None,
        jitter=not ticks, pipelined=not serial, detector=detector,
    )  # fmt: skip
    report = compare(todo, jobs=jobs or os.cpu_count() or 1, progress=_progress())
    if plots is not None:
        report["plots"] = [str(path) for path in draw(todo, plots, report)]
    if as_json:
        _print(report)
    else:
        show_compare(report, Console())
