"""``prfaas gateway``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prfaas_net.cli.configured import Check, read_gateway, show_gateway
from prfaas_net.cli.daemon import Stoppable, run_daemon
from prfaas_net.cli.models import load_tokenizer, model_directory
from prfaas_net.config import parse_address
from prfaas_net.gateway import Gateway
from prfaas_net.logs import secrets_of, set_up_logs
from prfaas_net.scheduling import policy_names

__all__ = ["gateway"]


def gateway(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file, of this gateway or of a fleet; flags go over it.")
    ] = None,
    check: Check = False,
    model: Annotated[
        Path | None, typer.Option("--model", help="Hugging Face directory, for its tokenizer; default: the demo model.")
    ] = None,
    name: Annotated[str | None, typer.Option("--served-model-name", help="Name that clients ask for.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", help="HOST:PORT; port 0 picks one.")] = None,
    node: Annotated[list[str] | None, typer.Option("--node", help="URL of a node's control port. Repeatable.")] = None,
    threshold: Annotated[
        int | None, typer.Option("--threshold", help="t: prompts with more uncached tokens are prefilled remotely.")
    ] = None,
    planner: Annotated[
        str | None, typer.Option("--planner", help="off, advise (the default) or act: change t and roles of nodes.")
    ] = None,
    policy: Annotated[str | None, typer.Option("--policy", help=f"One of {', '.join(policy_names())}.")] = None,
) -> None:
    """Run a gateway: OpenAI-compatible HTTP over a fleet of nodes."""
    directory = str(model) if model else None
    flags: dict[str, Any] = {"threshold_tokens": threshold, "policy": policy, "model": name}
    if planner:
        flags["planner"] = {"mode": planner}
    if listen:
        flags["http"] = dict(zip(("host", "port"), parse_address(listen), strict=True))
    if node:
        flags["nodes"] = [{"url": url} for url in node]
    if config is None and name is None:
        flags["model"] = model_directory(directory).name
    settings, fleet = read_gateway(config, flags)
    if check:
        show_gateway(settings, fleet, config)
    set_up_logs(settings.log, {"service": "prfaas-gateway"}, secrets_of(settings))
    tokenizer = load_tokenizer(directory or (fleet.model if fleet is not None else None))

    async def start() -> tuple[Stoppable, dict[str, Any]]:
        reread = None if config is None else lambda: read_gateway(config, flags)[0]
        server = Gateway(settings, tokenizer, reread=reread)
        await server.start()
        return _Closing(server), {"model": settings.model, "address": server.address}

    run_daemon(start)


class _Closing:
    """A gateway says ``stop``."""

    def __init__(self, server: Gateway) -> None:
        self._server = server

    async def drain(self) -> None:
        await self._server.drain()

    async def close(self) -> None:
        await self._server.stop()
