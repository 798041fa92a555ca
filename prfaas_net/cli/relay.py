"""``prfaas relay``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prfaas_net.cli.daemon import Stoppable, run_daemon
from prfaas_net.config import parse_address
from prfaas_net.transport.relay import Relay, Shape
from prfaas_net.units import parse_bytes, parse_duration, parse_rate

__all__ = ["relay"]


def relay(
    target: Annotated[str, typer.Option("--target", help="Where to forward, HOST:PORT.")],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT; port 0 picks one.")] = "127.0.0.1:0",
    rate: Annotated[str | None, typer.Option("--rate", help="Rate limit of each direction, such as 100Mbps.")] = None,
    rtt: Annotated[str, typer.Option("--rtt", help="Round-trip time to add, such as 20ms.")] = "0ms",
    queue: Annotated[str, typer.Option("--queue", help="Bytes that may wait for the bottleneck.")] = "256KiB",
) -> None:
    """Run a link shaper: a TCP relay that adds delay and a rate limit."""
    shape = Shape(parse_rate(rate) if rate else None, parse_duration(rtt) / 2, parse_bytes(queue))
    host, port = parse_address(listen)
    goal = parse_address(target)

    async def start() -> tuple[Stoppable, dict[str, Any]]:
        server = Relay(goal, shape, shape)
        await server.start(host, port)
        return server, {"address": server.address}

    run_daemon(start)
