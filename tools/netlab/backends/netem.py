"""sch_netem of the running kernel: end, veth, a namespace between them that forwards by redirect, veth, end."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from prfaas_net.bench.namespaces import command
from prfaas_net.bench.tunlink import DEVICE
from tools.netlab.backends.base import End
from tools.netlab.qdisc import counters_of, lines_for
from tools.netlab.settings import WAYS, Counters, Way

__all__ = ["Disciplined", "KernelNetem", "dress"]

# IPv4 address, prefix and queue of a link's device.
_PREFIX_BITS, _QUEUE_PACKETS = 24, 10_000


def dress(ends: tuple[End, End]) -> None:
    """Bring up the link's device in both namespaces, with its address, and what it would ask the other one (ARP) told:
    the first packet must not take longer than the others."""
    for number, end in enumerate(ends):
        peer = ends[1 - number]
        mine, theirs = (f"02:00:00:00:00:{each + 1:02x}" for each in (number, 1 - number))
        command("ip", "-n", end.space, "link", "set", DEVICE, "address", mine)
        command("ip", "-n", end.space, "link", "set", DEVICE, "txqueuelen", str(_QUEUE_PACKETS), "up")
        command("ip", "-n", end.space, "addr", "add", f"{end.address}/{_PREFIX_BITS}", "dev", DEVICE)
        command("ip", "-n", end.space, "neigh", "add", peer.address, "lladdr", theirs, "dev", DEVICE)


class Disciplined(ABC):
    """A backend whose ways are queueing disciplines, wherever their kernel runs.

    Attributes:
        devices: by way, where packets of that way leave the wire.
    """

    name: str
    devices: dict[str, str]

    def __init__(self) -> None:
        self._in_force: dict[str, Way] = {}
        # Counters start anew when disciplines are replaced.
        self._before = {way: Counters() for way in WAYS}

    @abstractmethod
    def _batch(self, lines: list[str]) -> None:
        """Give lines to ``tc -batch``."""

    @abstractmethod
    def _show(self, device: str) -> str:
        """``tc -s -j qdisc show dev DEVICE``."""

    def apply(self, ways: dict[str, Way]) -> None:
        lines = []
        for name, way in ways.items():
            before = self._in_force.get(name)
            if way == before:
                continue
            added = lines_for(self.devices[name], way, before)
            if before is not None and " del " in added[0]:
                self._before[name] = self._counters(name)
            lines += added
        if lines:
            self._batch(lines)
        self._in_force = dict(ways)

    def _counters(self, way: str) -> Counters:
        return self._before[way] + counters_of(json.loads(self._show(self.devices[way])))

    def counters(self) -> dict[str, Counters]:
        return {way: self._counters(way) for way in WAYS}


class KernelNetem(Disciplined):
    """Needs a kernel with sch_netem, sch_tbf, act_mirred and cls_matchall."""

    name = "netem"

    def __init__(self) -> None:
        super().__init__()
        self._router = ""

    def start(self, router: str, ends: tuple[End, End]) -> None:
        self._router = router
        # A packet from a arrives at port0 and leaves by port1.
        self.devices = {"ab": "port1", "ba": "port0"}
        for number, end in enumerate(ends):
            command(
                "ip",
                "link",
                "add",
                f"port{number}",
                "netns",
                router,
                "type",
                "veth",
                "peer",
                DEVICE,
                "netns",
                end.space,
            )
            command("ip", "-n", router, "link", "set", f"port{number}", "up")
        dress(ends)
        for number in (0, 1):
            command("tc", "-n", router, "qdisc", "add", "dev", f"port{number}", "ingress")
            command(
                *f"tc -n {router} filter add dev port{number} ingress protocol all matchall".split(),
                *f"action mirred egress redirect dev port{1 - number}".split(),
            )

    def _batch(self, lines: list[str]) -> None:
        command("tc", "-n", self._router, "-batch", "-", stdin="\n".join(lines) + "\n")

    def _show(self, device: str) -> str:
        return command("tc", "-n", self._router, "-s", "-j", "qdisc", "show", "dev", device)

    def close(self) -> None:
        """The kernel's part goes with the namespaces."""
