"""``prfaas top``: a gateway's fleet in the terminal, live."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import orjson
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prfaas_net.errors import AuthError, LinkError, PeerError, PrfaasError
from prfaas_net.nodes.http_tls import ClientTlsSection
from prfaas_net.units import format_bytes, format_duration, format_rate

__all__ = ["frame", "top"]

ANSWER_WITHIN_S = 5.0
_COLOURS = {
    "clear": "green", "app-limited": "cyan", "idle": "bright_black", "host-limited": "magenta", "building": "yellow",
    "congested": "red", "down": "bold red",
}  # fmt: skip


def top(
    url: Annotated[str, typer.Option("--url", help="Of the gateway.")] = "http://127.0.0.1:8080",
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="PRFAAS_API_KEY", help="If the gateway asks for one.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", help="PEM file of the authority that signed the gateway's certificate.")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
) -> None:
    """Show links, queues, TTFT, offload share and threshold of a gateway; Ctrl-C ends it."""
    asyncio.run(_look(url.rstrip("/"), api_key, interval, Console(), once=once, ca=ca))


async def _look(
    url: str, api_key: str | None, interval_s: float, console: Console, *, once: bool, ca: Path | None = None
) -> None:
    """Ask and draw, once or until interrupted.

    Raises:
        PrfaasError: the first answer could not be had. Later ones may fail: the last frame stays, and says so.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    connector = aiohttp.TCPConnector(ssl=ClientTlsSection(ca=ca).context())
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        fleet = await _fleet(session, url)
        if once:
            console.print(frame(fleet))
            return
        with Live(frame(fleet), console=console, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                problem = None
                try:
                    fleet = await _fleet(session, url)
                except PrfaasError as error:
                    problem = error.line()
                live.update(frame(fleet, problem), refresh=True)


async def _fleet(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        async with session.get(f"{url}/v1/fleet") as answer:
            body = await answer.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise LinkError(
            f"no gateway answers at {url}",
            found=str(error) or type(error).__name__,
            do="start one, or name it with --url",
        ) from error
    if answer.status == 401:
        raise AuthError("the gateway asks for another API key", do="set PRFAAS_API_KEY")
    if answer.status != 200:
        raise PeerError(
            f"{url} answered {answer.status}", expected="a gateway", found=body[:200].decode(errors="replace")
        )
    fleet = orjson.loads(body)
    if not isinstance(fleet, dict):
        raise PeerError(f"{url} is no gateway", expected="an object", found=type(fleet).__name__)
    return fleet


def frame(fleet: dict[str, Any], problem: str | None = None) -> RenderableType:
    """One picture of an answer to ``GET /v1/fleet``.

    Args:
        problem: why it is not a new one.
    """
    parts: list[RenderableType] = [_head(fleet), *_planner(fleet), Text(), _links(fleet), Text(), _nodes(fleet)]
    if problem is not None:
        parts.append(Text(problem, style="bold red"))
    return Group(*parts)


def _head(fleet: dict[str, Any]) -> RenderableType:
    ttfts = sorted(request["ttft_s"] for request in fleet["requests"] if request["ttft_s"] is not None)
    share, threshold = fleet["offload_share"], fleet["threshold_tokens"]
    line = Text()
    line.append(f"{fleet['model']}  ", style="bold")
    line.append(f"policy {fleet['policy']}  ")
    line.append(f"t {'none' if threshold is None else f'{threshold:,} tokens'}\n")
    line.append(f"offloaded {'-' if share is None else f'{share:.0%}'}  ")
    for name, quantile in (("p50", 0.5), ("p90", 0.9)):
        at = min(len(ttfts) - 1, int(quantile * len(ttfts)))
        line.append(f"TTFT {name} {format_duration(ttfts[at]) if ttfts else '-'}  ")
    line.append(f"in flight {fleet['requests_in_flight']}")
    return line


def _planner(fleet: dict[str, Any]) -> list[RenderableType]:
    """What the planner wants, and what it is changing."""
    planner = fleet.get("planner")
    if planner is None or planner["mode"] == "off":
        return []
    line = Text()
    who = "acts" if planner["acting"] else "stands by" if planner["mode"] == "act" else "advises"
    line.append(f"planner {who}: ", style="bold" if planner["acting"] else "")
    line.append(planner["why"] or "")
    for change in planner["changing"]:
        text = f"\n  {change['node']}: {change['before']} → {change['after']}, {change['held']} calls to end"
        line.append(f"{text}, for {format_duration(change['for_s'])}", style="yellow")
    return [line]


def _links(fleet: dict[str, Any]) -> Table:
    table = Table(title="links", title_justify="left", box=None, pad_edge=False)
    table.add_column("from → to", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for name in ("goodput", "available", "RTT", "resent", "backlog"):
        table.add_column(name, justify="right", no_wrap=True)
    for link in fleet["links"]:
        table.add_row(
            f"{link['from']} → {link['to']}",
            Text(link["state"], style=_COLOURS.get(link["state"], "")),
            format_rate(link["goodput_bps"]),
            "-" if link["available_bps"] is None else format_rate(link["available_bps"]),
            "-" if link["rtt_s"] is None else format_duration(link["rtt_s"]),
            f"{link['retransmitted_share']:.2%}",
            format_bytes(link["backlog_bytes"]),
        )
    if not fleet["links"]:
        table.add_row("none is up", *[""] * 6)
    return table


def _nodes(fleet: dict[str, Any]) -> Table:
    table = Table(title="nodes", title_justify="left", box=None, pad_edge=False)
    for name in ("node", "cluster", "role"):
        table.add_column(name, overflow="fold")
    for name in ("queued", "running", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True)
    for node in fleet["nodes"]:
        table.add_row(
            node["node"],
            node["cluster"] or "-",
            f"{node['role'] or '-'}{' → ' + node['next_role'] if node.get('next_role') else ''}",
            f"{node['queue_tokens']:,}",
            f"{node['running_requests']:,}",
            "-" if node["cached_blocks"] is None else f"{node['cached_blocks']:,}",
            Text("up", style="green") if node["up"] else Text(f"down: {node['problem']}", style="bold red"),
        )
    return table
