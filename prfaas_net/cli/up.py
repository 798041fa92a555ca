"""``prfaas up``: a whole deployment on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prfaas_net.cli.measuring import write_quick_profile
from prfaas_net.cli.models import demo_documents, load_engine, load_tokenizer
from prfaas_net.errors import ConfigError
from prfaas_net.localfleet.fleet import ClusterPlace, FleetPlan
from prfaas_net.localfleet.show import Model, Show

__all__ = ["up"]

# Planner settings with which a person can watch: for real fleets the defaults are minutes.
WATCHABLE = {
    f"PRFAAS_GATEWAY__PLANNER__{name}": os.environ.get(f"PRFAAS_GATEWAY__PLANNER__{name}", value)
    for name, value in (
        ("PERIOD", "5s"), ("WINDOW", "30s"), ("LEAST_REQUESTS", "10"), ("DWELL", "15s"), ("DRAIN_LIMIT", "60s"),
    )
}  # fmt: skip


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
    policy: Annotated[str, typer.Option("--policy", help="How the gateway routes.")] = FleetPlan.policy,
    budget: Annotated[str | None, typer.Option("--budget", help="Egress budget of each link; paced to it.")] = None,
    link: Annotated[str, typer.Option("--link", help="Rate of the link between the clusters.")] = "100Mbps",
    rtt: Annotated[str, typer.Option("--rtt", help="Round-trip time of that link.")] = "20ms",
    prfaas_netns: Annotated[str | None, typer.Option(help="Network namespace of the PrfaaS cluster.")] = None,
    prfaas_address: Annotated[str, typer.Option(help="Address of its nodes there.")] = "127.0.0.1",
    pd_netns: Annotated[str | None, typer.Option(help="Network namespace of the PD cluster and the gateway.")] = None,
    pd_address: Annotated[str, typer.Option(help="Address of its nodes there.")] = "127.0.0.1",
    connections: Annotated[int, typer.Option("--connections", help="Data connections of each link.")] = 4,
    arena: Annotated[str, typer.Option("--arena", help="Host memory for KVCache of each node.")] = "256MiB",
    pd_nodes: Annotated[
        int, typer.Option("--pd-nodes", help="Nodes that prefill or decode, and change, in place of one of each.")
    ] = 0,
    planner: Annotated[
        str, typer.Option("--planner", help="off, advise or act: whether the gateway changes t and roles.")
    ] = "advise",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate for each document.")] = 48,
    output: Annotated[Path, typer.Option("--output", help="Where the table goes as JSON.")] = Path("build/demo.json"),
) -> None:
    """Start two clusters, a shaped link between them and a gateway; show two documents; keep serving.

    Five processes: one prefill node in a PrfaaS cluster, one prefill and one decode node in a local PD cluster, the
    link shaper, the gateway. Ctrl-C ends them all. Clusters in different network namespaces (root) have between them
    whatever joins those: then there is no shaper, and --link and --rtt say nothing.

    With --pd-nodes 3 --planner act the nodes' roles follow what is asked for, within half a minute: watch prfaas top.
    """
    if pd_nodes == 1:
        raise ConfigError("one node cannot both prefill and decode", expected="--pd-nodes 2 or more", found=1)
    directory = str(model) if model else None
    plan = FleetPlan(
        model=directory, host=host, port=port if port is not None else 0 if demo else 8080,
        threshold_tokens=threshold, policy=policy, budget=budget,
        link_rate=link, link_rtt=rtt, connections=connections, arena=arena,
        prfaas=ClusterPlace(prfaas_netns, prfaas_address), pd=ClusterPlace(pd_netns, pd_address, WATCHABLE),
        pd_nodes=pd_nodes, planner=planner,
    )  # fmt: skip
    if pd_nodes and planner != "off":
        # A planner has to know how fast nodes are; these are all on this machine.
        plan = replace(plan, profile=write_quick_profile(directory, output.with_name("profile.json")))
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
