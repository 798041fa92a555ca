"""The processes of a local deployment, and how they find each other."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prfaas_net.config import is_loopback
from prfaas_net.localfleet.processes import Process, stop_all

__all__ = ["ClusterPlace", "FleetPlan", "LocalFleet"]

API_KEYS_VARIABLE = "PRFAAS_GATEWAY__API_KEYS"


@dataclass(frozen=True)
class ClusterPlace:
    """Where the processes of a cluster run.

    Attributes:
        netns: a network namespace, by its name for ``ip netns``; None is that of this process.
        address: that its nodes listen on, there.
        environ: variables of its processes, for settings that have no flag; the gateway is a process of the PD cluster.
    """

    netns: str | None = None
    address: str = "127.0.0.1"
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetPlan:
    """What to start.

    Attributes:
        model: Hugging Face directory, or None for the demo model.
        port: of the gateway; 0 picks one.
        threshold_tokens: prompts with more uncached tokens than this go to the PrfaaS cluster.
        policy: how the gateway routes. By the threshold unless told otherwise: on one machine both clusters are equally
            fast, and whoever looks for what is ready sooner need never cross the link.
        budget: egress budget of each link (``"150Mbps"``), to which it is paced; None leaves it unpaced.
        host: of the gateway, which runs where the PD cluster does; this process must reach it.
        link_rate: of the link between the clusters, as text (``"100Mbps"``).
        link_rtt: its round-trip time (``"20ms"``).
        decode_nodes: how many the PD cluster has, beside its prefill node; each has a link shaper of its own.
        pd_nodes: instead of those, so many nodes that can change their role; the first one prefills at first.
        planner: what the gateway's planner may do: ``"off"``, ``"advise"`` or ``"act"``.
        profile: how fast a node is, as ``python -m engine profile`` writes it: the same for all of them.
        prfaas, pd: where the clusters run. In different namespaces, what is between those is the link, and nothing
            shapes it.
    """

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    threshold_tokens: int = 2048
    policy: str = "threshold"
    budget: str | None = None
    link_rate: str = "100Mbps"
    link_rtt: str = "20ms"
    connections: int = 4
    arena: str = "256MiB"
    decode_nodes: int = 1
    pd_nodes: int = 0
    planner: str | None = None
    profile: Path | None = None
    prfaas: ClusterPlace = ClusterPlace()
    pd: ClusterPlace = ClusterPlace()

    @property
    def shaped(self) -> bool:
        """Whether a link shaper stands in for a link."""
        return self.prfaas.netns == self.pd.netns

    @property
    def open(self) -> bool:
        """Whether others than processes of this host may knock, so that keys are needed."""
        return not all(map(is_loopback, (self.host, self.prfaas.address, self.pd.address)))


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
    """PrfaaS cluster (one prefill node), local PD cluster, link shapers, gateway.

    Use as an async context manager; leaving it ends every process.

    Attributes:
        url: of the gateway; ``api_key`` for it, where one is needed.
    """

    def __init__(self, plan: FleetPlan) -> None:
        self.plan = plan
        self.processes: dict[str, Process] = {}
        self.url = ""
        self.api_key: str | None = None
        self._environ: dict[str, str] = {}

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

    def _make_keys(self) -> None:
        """Fresh ones, for this fleet alone; an API key that the environment has is kept."""
        node_key, kv_key = secrets.token_hex(16), secrets.token_hex(16)
        given = os.environ.get(API_KEYS_VARIABLE)
        self.api_key = given.split(",")[0].strip() if given else secrets.token_hex(8)
        self._environ = {"PRFAAS_GATEWAY__NODE_KEY": node_key, API_KEYS_VARIABLE: given or self.api_key}
        for role in ("PREFILL", "DECODE", "PD"):
            self._environ |= {f"PRFAAS_{role}__NODE_KEY": node_key, f"PRFAAS_{role}__KV__SHARED_KEY": kv_key}

    async def _start(self) -> None:
        plan = self.plan
        if plan.open:
            self._make_keys()
        if plan.shaped:
            # Prefixes between prefill nodes would go around the shaper.
            self._environ |= {"PRFAAS_PREFILL__CACHE__SHARE": "false"}
        model = ["--model", plan.model] if plan.model else []
        common = [*model, *(["--profile", str(plan.profile)] if plan.profile else [])]
        starts = [self._launch("PrfaaS prefill node", [*self._prefill("prfaas", plan.prfaas), *common], plan.prfaas)]
        if plan.pd_nodes:
            starts += [self._pd(number, common) for number in range(plan.pd_nodes)]
        else:
            starts.append(self._launch("PD prefill node", [*self._prefill("pd", plan.pd), *common], plan.pd))
            starts += [self._decode(number, common) for number in range(plan.decode_nodes)]
        nodes = await asyncio.gather(*starts)
        urls = [item for node in nodes for item in ("--node", _url(node.ready["address"]))]
        listen = [
            "--listen",
            f"{plan.host}:{plan.port}",
            "--threshold",
            str(plan.threshold_tokens),
            "--policy",
            plan.policy,
            *(["--planner", plan.planner] if plan.planner else []),
        ]
        gateway = await self._launch("gateway", ["gateway", *listen, *urls, *model], plan.pd)
        self.url = _url(gateway.ready["address"])

    async def _decode(self, number: int, common: list[str]) -> Process:
        """A decode node, behind a link shaper if there are any."""
        name = f"PD decode node{f' {number + 1}' if number else ''}"
        where = await self._landing(number)
        return await self._launch(name, ["decode", "--node-id", f"pd-decode-{number}", *where, *common], self.plan.pd)

    async def _pd(self, number: int, common: list[str]) -> Process:
        """A node that can change its role, behind a link shaper if there are any."""
        plan, role = self.plan, "decode" if number else "prefill"
        where = await self._landing(number)
        budget = ["--budget", plan.budget] if plan.budget else []
        command = [
            "pd", "--role", role, "--node-id", f"pd-{number}", *where, "--connections", str(plan.connections), *budget,
        ]  # fmt: skip
        return await self._launch(f"PD node {number + 1}", [*command, *common], plan.pd)

    async def _landing(self, number: int) -> list[str]:
        """Where a node of the PD cluster listens, and what its tickets name.

        That is the shaper to senders of the other cluster, so it comes first and must know the node's port.
        """
        plan = self.plan
        kv = f"{plan.pd.address}:{_free_port()}"
        crossing: list[str] = []
        if plan.shaped:
            suffix = f" {number + 1}" if number else ""
            shape = ["--rate", plan.link_rate, "--rtt", plan.link_rtt]
            shaper = await self._launch(f"link shaper{suffix}", ["relay", "--target", kv, *shape], plan.pd)
            crossing = ["--advertise", "prfaas={}:{}".format(*shaper.ready["address"])]
        return [
            "--cluster", "pd", "--listen", f"{plan.pd.address}:0", "--kv-listen", kv, *crossing, "--arena", plan.arena,
        ]  # fmt: skip

    def _prefill(self, cluster: str, place: ClusterPlace) -> list[str]:
        plan = self.plan
        return [
            "prefill", "--node-id", f"{cluster}-prefill-0", "--cluster", cluster, "--listen", f"{place.address}:0",
            "--connections", str(plan.connections), "--arena", plan.arena,
            *(["--budget", plan.budget] if plan.budget else []),
        ]  # fmt: skip

    async def _launch(self, name: str, command: list[str], place: ClusterPlace) -> Process:
        process = await Process.start(name, command, netns=place.netns, environ={**self._environ, **place.environ})
        self.processes[name] = process
        return process
