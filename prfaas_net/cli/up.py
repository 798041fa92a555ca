"""``prfaas up``: a whole deployment on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prfaas_net.cli.models import demo_documents, load_engine, load_tokenizer
from prfaas_net.localfleet.fleet import ClusterPlace, FleetPlan
from prfaas_net.localfleet.show import Model, Show

__all__ = ["up"]


def up(
    model: Annotated[
        Path | None, typer.Option("--model", help="Hugging Face directory; default: the demo model that ships along.")
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Stop after the documents; exit 0 only if every output is identical.")
    ] = False,
    host: Annotated[str, typer.Option("--host", help="Address of the gateway.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option("--port", help="Port of the gateway; 8080, or any with --demo.")] = None,
    threshold: Annotated[int, typer.Option("--threshold", help="t, in tokens.")] = 2048,
    policy: Annotated[str, typer.Option("--policy", help="How the gateway routes.")] = "threshold",
    budget: Annotated[str | None, typer.Option("--budget", help="Egress budget of each link; paced to it.")] = None,
    link: Annotated[str, typer.Option("--link", help="Rate of the link between the clusters.")] = "100Mbps",
    rtt: Annotated[str, typer.Option("--rtt", help="Round-trip time of that link.")] = "20ms",
    prfaas_netns: Annotated[str | None, typer.Option(help="Network namespace of the PrfaaS cluster.")] = None,
    prfaas_address: Annotated[str, typer.Option(help="Address of its nodes there.")] = "127.0.0.1",
    pd_netns: Annotated[str | None, typer.Option(help="Network namespace of the PD cluster and the gateway.")] = None,
    pd_address: Annotated[str, typer.Option(help="Address of its nodes there.")] = "127.0.0.1",
    connections: Annotated[int, typer.Option("--connections", help="Data connections of each link.")] = 4,
    arena: Annotated[str, typer.Option("--arena", help="Host memory for KVCache of each node.")] = "256MiB",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate for each document.")] = 48,
    output: Annotated[Path, typer.Option("--output", help="Where the table goes as JSON.")] = Path("build/demo.json"),
) -> None:
    """Start two clusters, a shaped link between them and a gateway; show two documents; keep serving.

    Five processes: one prefill node in a PrfaaS cluster, one prefill and one decode node in a local PD cluster, the
    link shaper, the gateway. Ctrl-C ends them all. Clusters in different network namespaces (root) have between them
    whatever joins those: then there is no shaper, and --link and --rtt say nothing.
    """
    directory = str(model) if model else None
    plan = FleetPlan(
        model=directory, host=host, port=port if port is not None else 0 if demo else 8080,
        threshold_tokens=threshold, policy=policy, budget=budget,
        link_rate=link, link_rtt=rtt, connections=connections, arena=arena,
        prfaas=ClusterPlace(prfaas_netns, prfaas_address), pd=ClusterPlace(pd_netns, pd_address),
    )  # fmt: skip
    tokenizer = load_tokenizer(directory)
    show = Show(
        plan,
        demo_documents(),
        Model(lambda: load_engine(directory), tokenizer),
        Console(),
        max_tokens=max_tokens,
        output=output,
    )
    code = asyncio.run(_until_done_or_interrupted(show, stay=not demo))
    sys.stdout.flush()
    # A single-process run that was interrupted still computes in a thread that nobody needs any more.
    os._exit(code)


async def _until_done_or_interrupted(show: Show, *, stay: bool) -> int:
    running = asyncio.create_task(show.run(stay=stay))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    try:
        return await running
    except asyncio.CancelledError:
        return 130
