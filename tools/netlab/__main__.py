"""``python -m tools.netlab``: scenarios, and two clusters at the two ends of an impaired link."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from prfaas_net.config import load_config
from prfaas_net.congestion.samples import LogHead, Mark, write_head, write_mark, write_sample
from prfaas_net.errors import PrfaasError
from prfaas_net.units import format_rate
from tools.netlab import choosing
from tools.netlab.closed_loop import ARMS, Experiment, play_arm, write_closed_loop_model
from tools.netlab.closed_loop_report import draw, need_matplotlib, report
from tools.netlab.fleet import watch
from tools.netlab.link import link
from tools.netlab.measure import measure
from tools.netlab.names import sweep
from tools.netlab.play import DETECTOR, Played, Row, play
from tools.netlab.scenario import Scenario, load_scenario, names, set_up
from tools.netlab.schedule import WaySection, load_schedule

__all__ = ["app"]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Impaired links on one machine. Root only.")
Backend = Annotated[
    str | None, typer.Option("--backend", help="netem, uml or tun; default: the first that can be had.")
]
HEAD = f"{'s':>6}  {'state':<13}{'received':>11}  {'rtt ms':>8}  {'retrans':>8}  "


@app.command("list")
def list_() -> None:
    """Show the scenarios that come along, and the backends that this machine can have."""
    for name in names():
        print(f"{name:<16} {load_scenario(name).title}")
    for name, missing in choosing.available().items():
        print(f"backend {name:<8} {missing or 'can be had'}")


@app.command()
def run(
    scenario: Annotated[str, typer.Argument(help="Name of a scenario, or a .toml file.")],
    backend: Backend = None,
    detector: Annotated[str, typer.Option("--detector", help="Whose verdicts are shown.")] = DETECTOR,
    log: Annotated[Path | None, typer.Option("--log", help="Write every look as a log that can be replayed.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document in the end instead of rows.")] = False,
) -> None:
    """Play a scenario with its own traffic, and show what the link does and what a detector says of it."""
    plan = load_scenario(scenario)
    console = Console(stderr=json, highlight=False, soft_wrap=True)
    console.print(f"[bold]{plan.title}[/]\n{plan.about}\n")
    with set_up(plan, backend=backend) as stage:
        console.print(HEAD)
        played = play(stage, detector=detector, on_row=lambda row: console.print(_line(row), markup=False))
        counters = {way: vars(of) for way, of in played.counters.items()}
        name = stage.link.backend
    if json:
        sys.stdout.write(orjson.dumps(_report(plan, name, played)).decode() + "\n")
    for way, of in counters.items():
        console.print(f"{way}: " + ", ".join(f"{what} {n:,}" for what, n in of.items()))
    if log is not None:
        _write_log(log, plan, played)


def _line(row: Row) -> str:
    rate = format_rate(row.received_bps)
    line = f"{row.at_s:6.1f}  {row.verdict.state.value:<13}{rate:>11}  {row.rtt_ms:8.1f}  {row.retransmits:8}  "
    return line + "; ".join(row.happened)


def _report(plan: Scenario, backend: str, played: Played) -> dict[str, Any]:
    rows = [
        {
            "at_s": round(row.at_s, 3), "state": row.verdict.state.value, "received_bps": round(row.received_bps),
            "rtt_ms": round(row.rtt_ms, 3), "retransmits": row.retransmits, "happened": row.happened,
        }
        for row in played.rows
    ]  # fmt: skip
    counters = {way: vars(of) for way, of in played.counters.items()}
    return {"title": plan.title, "backend": backend, "rows": rows, "counters": counters, "events": played.events}


def _write_log(path: Path, plan: Scenario, played: Played) -> None:
    marks = [Mark(played.began_s + actual_s, what) for _, actual_s, what in played.events]
    with path.open("wb") as file:
        file.write(write_head(LogHead(plan.traffic.cc, {"scenario": plan.title})))
        for sample in played.samples:
            while marks and marks[0].at_s <= sample.at_s:
                file.write(write_mark(marks.pop(0)))
            file.write(write_sample(sample))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    rate: Annotated[str | None, typer.Option("--rate", help="Of the bottleneck, each way.")] = "200Mbps",
    delay: Annotated[str, typer.Option("--delay", help="One way.")] = "20ms",
    jitter: Annotated[str, typer.Option("--jitter", help="More or less than the delay.")] = "0ms",
    loss: Annotated[float, typer.Option("--loss", help="Share of packets, each way.")] = 0.0,
    queue: Annotated[str | None, typer.Option("--queue", help="Bytes that may wait for the bottleneck.")] = None,
    schedule: Annotated[Path | None, typer.Option("--schedule", help="What happens to the link: a TOML file.")] = None,
    backend: Backend = None,
) -> None:
    """Run `prfaas up`, its PrfaaS cluster at one end of an impaired link, its PD cluster and gateway at the other.

    Options that are not ours go to `prfaas up`. Type to change the link meanwhile. Ctrl-C ends it all.
    """
    texts = {"rate": rate, "delay": delay, "jitter": jitter, "loss": loss, "queue": queue}
    settings = load_config(WaySection, flags=texts).changes()
    steps = load_schedule(schedule) if schedule is not None else ()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with link(backend=backend, **settings) as made:
        code = watch(made, context.args, steps, lambda line: console.print(f"netlab: {line}", markup=False))
    sys.exit(code)


@app.command("closed-loop")
def closed_loop(
    arm: Annotated[list[str] | None, typer.Option("--arm", help=f"Of {', '.join(ARMS)}; default: all.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it into this PNG or SVG.")] = None,
    model: Annotated[Path, typer.Option("--model", help="Where the random model is kept.")] = Path("build/loop-model"),
    arena: Annotated[str, typer.Option("--arena", help="Memory of each node for KVCache.")] = Experiment.arena,
    backend: Backend = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything, timelines too, as JSON.")] = False,
) -> None:
    """Serve on a link of which a competitor takes most for half a minute, once for each way of routing (90 s each)."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if plot is not None:
        need_matplotlib()  # before minutes have passed
    if not (model / "tokenizer.json").exists():
        write_closed_loop_model(model)
    experiment, arms = Experiment(arena=arena), []
    for name in arm or ARMS:
        console.print(f"netlab: {name}, {experiment.total_s:.0f} s")
        with link(backend=backend, **experiment.link()) as made:
            arms.append(play_arm(name, experiment, made, model))
    body = report(arms)
    shown = body if json else {**body, "arms": {name: _figures(one) for name, one in body["arms"].items()}}
    option = 0 if json else orjson.OPT_INDENT_2
    sys.stdout.write(orjson.dumps(shown, option=option | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
    sys.stdout.flush()
    if plot is not None:
        draw(body, plot)


def _figures(arm: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arm.items() if name != "timeline"}


@app.command("measure")
def measure_(backend: Backend = None) -> None:
    """Measure the backends of this machine (half a minute each): start-up, accuracy, highest rate. Prints JSON."""
    can = [backend] if backend else [name for name, missing in choosing.available().items() if missing is None]
    reports = [measure(name) for name in can]
    sys.stdout.write(orjson.dumps(reports, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode() + "\n")


@app.command("sweep")
def sweep_() -> None:
    """Take away what laboratories that were killed have left. Every start does so too."""
    for name in sweep():
        print(f"removed {name}")


def main() -> None:
    """Errors of ours are one line."""
    try:
        app(prog_name="python -m tools.netlab")
    except PrfaasError as error:
        sys.stderr.write(f"netlab: {error.line()}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
