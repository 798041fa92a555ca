"""``prfaas bench``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from engine.__main__ import main as engine_main
from prfaas_net.bench import cache as cache_bench
from prfaas_net.bench import congestion_cases
from prfaas_net.bench import gateway as gateway_bench
from prfaas_net.bench.congestion import bench_congestion, show_congestion
from prfaas_net.bench.plan import FULL, QUICK, parse_path
from prfaas_net.bench.report import show
from prfaas_net.bench.scheduler import bench_scheduler, show_scheduler
from prfaas_net.bench.transport import bench_transport
from prfaas_net.cli.models import load_tokenizer

__all__ = ["app"]

app = typer.Typer(help="Measure, beside a reference taken in the same minute.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure, beside a reference taken in the same minute."""


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Tells people what is going on, on stderr."""
    console = Console(stderr=True)
    with console.status("starting ...") as status:

        def progress(what: str) -> None:
            if console.is_terminal:
                status.update(what)
            else:
                console.print(what, highlight=False)

        yield progress


def _answer(report: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    if as_json:
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        show(report, Console())


@app.command("transport")
def transport(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Also run the peers that are installed.")] = False,
    peer_python: Annotated[
        str | None, typer.Option("--peer-python", help="Interpreter that has the peers' packages; default: this one.")
    ] = None,
    link: Annotated[
        str | None, typer.Option("--link", help="Emulated path RATE,RTT,LOSS, such as 1Gbps,80ms,0.1%.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and smaller runs: under 2 minutes.")] = False,
) -> None:
    """The KV stream against iperf3 (and its peers): loopback, emulated paths, latency. Under 15 minutes."""
    plan = QUICK if quick else FULL
    if link is not None:
        plan = plan.with_path(parse_path(link))
    # What the bench has made outside of itself goes away with it, whoever ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _progress() as progress:
        report = bench_transport(plan, peers=peers, peer_python=peer_python, progress=progress)
    _answer(report, as_json, show)


@app.command("cache")
def cache(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the blocks: a few seconds.")] = False,
) -> None:
    """The global KVCache manager: a 128K prompt against a million blocks, rate of events, memory. Half a minute."""
    with _progress() as progress:
        report = cache_bench.bench_cache(cache_bench.QUICK if quick else cache_bench.FULL, progress)
    _answer(report, as_json, cache_bench.show)


@app.command("congestion")
def congestion(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Four paths, two seeds: under 5 minutes.")] = False,
    recordings: Annotated[
        Path | None,
        typer.Option("--recordings", help="Directory to keep recordings in; what it has is not made again."),
    ] = None,
) -> None:
    """Detectors of congestion on recorded paths: how soon, how often for nothing, how far off. Under 40 minutes."""
    plan = congestion_cases.QUICK if quick else congestion_cases.FULL
    # What the bench has made outside of itself goes away with it, whoever ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _progress() as progress:
        report = bench_congestion(plan, recordings=recordings, progress=progress)
    _answer(report, as_json, show_congestion)


@app.command("gateway")
def gateway(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    router_python: Annotated[
        str | None, typer.Option("--router-python", help="Interpreter that has vllm-router; default: this one.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer kinds of requests, shorter rounds: a minute.")] = False,
) -> None:
    """What the gateway adds to a request and carries on one core, beside vllm-router. Under 5 minutes."""
    # What the bench has started goes away with it, whoever ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = gateway_bench.QUICK if quick else gateway_bench.FULL
    with _progress() as progress:
        report = gateway_bench.bench_gateway(plan, load_tokenizer(None), router_python=router_python, progress=progress)
    _answer(report, as_json, gateway_bench.show_gateway)


@app.command("scheduler")
def scheduler(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    simulated: Annotated[int, typer.Option("--simulated", help="Requests of each simulated run.")] = 100_000,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of everything.")] = False,
) -> None:
    """Decisions of the router with 64 nodes and 10,000 requests in flight, and the simulator's speed. A minute."""
    part = 10 if quick else 1
    with _progress() as progress:
        report = bench_scheduler(decisions=20_000 // part, simulated=simulated // part, progress=progress)
    _answer(report, as_json, show_scheduler)


@app.command("engine")
def engine(
    models: Annotated[list[str] | None, typer.Argument(help="Which of the random models; default: all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a summary.")] = False,
    reference_python: Annotated[
        str | None, typer.Option("--reference-python", help="Interpreter that has torch and transformers.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="Threads of both sides.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter prompts and smaller batches.")] = False,
) -> None:
    """Prefill and decode of the engine beside transformers on torch CPU. Several minutes a model."""
    command = ["bench", *(models or []), "--threads", str(threads)]
    command += ["--json"] if as_json else []
    command += ["--quick"] if quick else []
    command += ["--reference-python", reference_python] if reference_python else []
    raise typer.Exit(engine_main(command))
