"""The five processes of a local deployment, and how they find each other."""

from __future__ import annotations

import asyncio
import random
import socket
from dataclasses import dataclass
from pathlib import Path

from prfaas_net.localfleet.processes import Process, stop_all

__all__ = ["FleetPlan", "LocalFleet"]


@dataclass(frozen=True)
class FleetPlan:
    """What to start.

    Attributes:
        model: Hugging Face directory, or None for the demo model.
        port: of the gateway; 0 picks one.
        threshold_tokens: prompts with more uncached tokens than this go to the PrfaaS cluster.
        link_rate: of the link between the clusters, as text (``"100Mbps"``).
        link_rtt: its round-trip time (``"20ms"``).
    """

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    threshold_tokens: int = 2048
    link_rate: str = "100Mbps"
    link_rtt: str = "20ms"
    connections: int = 4
    arena: str = "256MiB"


def _free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel gives ports to outgoing connections: one out
    of that range may be somebody's between now and its use."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = random.randrange(10_000, max(low, 10_001 + 1000))
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue  # taken: try another


def _url(address: list[object]) -> str:
    return f"http://{address[0]}:{address[1]}"


class LocalFleet:
    """PrfaaS cluster (one prefill node), local PD cluster (one prefill, one decode node), link shaper, gateway.

    Use as an async context manager; leaving it ends every process.
    """

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.processes: dict[str, Process] = {}
        self.url = ""

    async def __aenter__(self) -> LocalFleet:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End every process; within 2 s."""
        await stop_all(tuple(self.processes.values()))

    async def failed(self) -> Process:
        """Wait until one of the processes ends by itself, and return it."""
        waits = {asyncio.create_task(process.wait()): process for process in self.processes.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()

    async def _start(self) -> None:
        plan = self.plan
        model = ["--model", plan.model] if plan.model else []
        # The decode node's tickets name the relay for senders of the other cluster, so the relay comes first and must
        # know the decode node's port.
        kv = f"127.0.0.1:{_free_port()}"
        shaper = await self._launch(
            "link shaper", ["relay", "--target", kv, "--rate", plan.link_rate, "--rtt", plan.link_rtt]
        )
        crossing = "{}:{}".format(*shaper.ready["address"])
        arena = ["--arena", plan.arena]
        connections = ["--connections", str(plan.connections)]
        prefills = [
            ("prefill", "--node-id", f"{cluster}-prefill-0", "--cluster", cluster, *connections, *arena, *model)
            for cluster in ("prfaas", "pd")
        ]
        decode = ("decode", "--node-id", "pd-decode-0", "--cluster", "pd", "--kv-listen", kv)
        nodes = await asyncio.gather(
            self._launch("PrfaaS prefill node", prefills[0]),
            self._launch("PD prefill node", prefills[1]),
            self._launch("PD decode node", (*decode, "--advertise", f"prfaas={crossing}", *arena, *model)),
        )
        urls = [item for node in nodes for item in ("--node", _url(node.ready["address"]))]
        gateway = await self._launch(
            "gateway",
            [
                "gateway", "--listen", f"{plan.host}:{plan.port}", "--threshold", str(plan.threshold_tokens),
                *urls, *model,
            ],
        )  # fmt: skip
        self.url = _url(gateway.ready["address"])

    async def _launch(self, name: str, command: list[str] | tuple[str, ...]) -> Process:
        process = await Process.start(name, command)
        self.processes[name] = process
        return process
