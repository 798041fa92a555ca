"""An impaired link between two network namespaces of this machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ipaddress import IPv4Network
from typing import IO, Any

from prfaas_net.bench.namespaces import command, inside, make_space, owned, remove_space, write_settings
from prfaas_net.bench.pair import Place
from prfaas_net.bench.processes import Child
from prfaas_net.bench.tunlink import DEVICE
from prfaas_net.errors import ConfigError
from prfaas_net.units import MiB
from tools.netlab.backends.base import Backend, End
from tools.netlab.choosing import BACKENDS, choose, why_not
from tools.netlab.flows import Load
from tools.netlab.names import PREFIX, sweep
from tools.netlab.settings import WAYS, Counters, Way, change
from tools.netlab.traffic import Traffic

__all__ = ["Link", "link"]

ADDRESSES = ("10.203.8.1", "10.203.8.2")
# Out of these come the addresses of doors to this host.
_DOORS = IPv4Network("10.203.64.0/18")
# A long fat link must not be limited by the host's maximum (often 4 MiB).
BUFFER_BYTES = 128 * MiB
# net.ipv4.tcp_ecn: 1 asks for marks, 2 takes them if the peer asks, which is what kernels come with.
_ECN = {True: "1", False: "2"}
_numbers = itertools.count()


def _marks(ways: Mapping[str, Way]) -> bool:
    return any(way.mark_bytes is not None for way in ways.values())


class Link:
    """Two namespaces, ``a`` and ``b``, and what is between them. Use :func:`link` to make one.

    Attributes:
        a, b: namespace and address of each side; the device is ``lnk0`` on both.
        backend: name of the one in use.
        ways: settings in force, by ``"ab"`` and ``"ba"``.
    """

    def __init__(self, backend: Backend, sysctls: Mapping[str, str], *, gso: bool) -> None:
        self.backend = backend.name
        self.ways = {way: Way() for way in WAYS}
        self._backend = backend
        self._sysctls = {
            "tcp_no_metrics_save": "1",
            "tcp_wmem": f"4096 65536 {BUFFER_BYTES}",
            "tcp_rmem": f"4096 131072 {BUFFER_BYTES}",
            **sysctls,
        }
        self._gso = gso
        self._stem = f"{owned(PREFIX)}{next(_numbers)}"
        self.a, self.b = (End(f"{self._stem}-{side}", at) for side, at in zip("ab", ADDRESSES, strict=True))
        self._router = f"{self._stem}-r"
        self._children: list[Child | subprocess.Popen[Any]] = []
        # A schedule changes the link from its own thread.
        self._lock = threading.RLock()

    # -- life ---------------------------------------------------------------------------------------------------

    def _start(self, ways: dict[str, Way]) -> None:
        for space in (self.a.space, self.b.space):
            make_space(space, self._sysctls)
        make_space(self._router, {})
        self._backend.start(self._router, (self.a, self.b))
        if not self._gso:
            for end in (self.a, self.b):
                command("ip", "-n", end.space, "link", "set", DEVICE, "gso_max_segs", "1")
        self._backend.apply(ways)
        self.ways = ways

    def close(self) -> None:
        """End what was started in the namespaces, and take everything away."""
        self.end_processes()
        self._backend.close()
        for space in (self.a.space, self.b.space, self._router):
            remove_space(space)

    def end_processes(self) -> None:
        """End what was started on both sides."""
        for child in self._children:
            if isinstance(child, Child):
                child.close()
            elif child.poll() is None:
                child.kill()
                child.wait()
        self._children.clear()

    # -- the link -----------------------------------------------------------------------------------------------

    def set(self, way: str | None = None, **changes: Any) -> None:
        """Change settings of :class:`Way` while the link is in use; in force when it returns.

        Args:
            way: ``"ab"`` or ``"ba"``; None: both.
        """
        with self._lock:
            ways = change(self.ways, way, changes)
            self._backend.apply(ways)
            self.ways = ways

    def reset(self, *, ecn: bool = False, **ways: Mapping[str, Any]) -> None:
        """As if it were new: whatever was started on its sides is ended, and each way has only the given settings.

        Args:
            ecn: new connections negotiate congestion marks.
            ways: settings by way, ``ab={...}`` and ``ba={...}``.
        """
        self.end_processes()
        fresh = {way: Way() for way in WAYS}
        for way, settings in ways.items():
            fresh = change(fresh, way, dict(settings))
        with self._lock:
            self._backend.apply(fresh)
            self.ways = fresh
        for end in (self.a, self.b):
            write_settings(end.space, {"tcp_ecn": _ECN[ecn or _marks(fresh)]})

    def counters(self) -> dict[str, Counters]:
        """What passed, by way, since the link stands."""
        with self._lock:
            return self._backend.counters()

    # -- its sides ----------------------------------------------------------------------------------------------

    def end(self, side: str) -> End:
        """``"a"`` or ``"b"``."""
        if side not in ("a", "b"):
            raise ConfigError("no such side of a link", expected="a or b", found=repr(side))
        return self.a if side == "a" else self.b

    def prefix(self, side: str) -> tuple[str, ...]:
        """What to put in front of a command to run it on a side."""
        return ("ip", "netns", "exec", self.end(side).space)

    def inside(self, side: str) -> AbstractContextManager[None]:
        """The calling thread is on this side; a socket made here stays there for life."""
        return inside(self.end(side).space)

    def run_in(self, side: str, argv: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on a side to its end; its output is kept, its exit code not judged."""
        command_line = [*self.prefix(side), *argv]
        return subprocess.run(command_line, capture_output=True, text=True, timeout=timeout_s, check=False)

    def start_in(
        self,
        side: str,
        argv: Sequence[str],
        *,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[Any]:
        """Start a command on a side; it is killed when the link goes, if it still runs then."""
        process = subprocess.Popen([*self.prefix(side), *argv], stdout=stdout, stderr=stderr, start_new_session=True)
        self._children.append(process)
        return process

    def child(self, side: str, module: str, *args: str) -> Child:
        """Start a module that obeys JSON lines on a side; it ends when the link goes."""
        child = Child(module, *args, prefix=self.prefix(side))
        self._children.append(child)
        return child

    def traffic(self, way: str = "ab", load: Load | None = None, **options: Any) -> Traffic:
        """Start TCP flows along a way; see :class:`Traffic` for the options. Stop them with its ``stop``, or use it as
        a context manager."""
        return Traffic(self, way, load or Load(), **options)

    def cross(self, way: str = "ab", *, flows: int = 1, seed: int = 1, **load: Any) -> Traffic:
        """Start competing traffic along a way, described by the fields of :class:`Load`: ``cc``, ``rate_bps``, ``on_s``
        and ``off_s``, ``ramp_s``."""
        return self.traffic(way, Load(**load), flows=flows, seed=seed)

    def door(self, side: str) -> str:
        """Make a side reachable from this host, past the impaired link; the side's address there. It goes with the
        link."""
        end, number = self.end(side), next(_numbers)
        taken = command("ip", "-4", "-o", "addr", "show")
        net = next(net for net in _DOORS.subnets(new_prefix=30) if f" {net[1]}/" not in taken)
        here, there = f"nl{os.getpid()}d{number}", f"door{number}"
        command("ip", "link", "add", here, "type", "veth", "peer", there, "netns", end.space)
        command("ip", "addr", "add", f"{net[1]}/30", "dev", here)
        command("ip", "link", "set", here, "up")
        command("ip", "-n", end.space, "addr", "add", f"{net[2]}/30", "dev", there)
        command("ip", "-n", end.space, "link", "set", there, "up")
        return str(net[2])

    def place(self, sender: str = "a") -> Place:
        """For :class:`prfaas_net.bench.pair.Pair`: a KV sender on one side, its receiver on the other."""
        receiver = "b" if sender == "a" else "a"
        return Place(
            self.end(receiver).address,
            device=DEVICE,
            receiver_prefix=self.prefix(receiver),
            sender_prefix=self.prefix(sender),
        )


@contextmanager
def link(
    *,
    backend: str | None = None,
    ab: Mapping[str, Any] | None = None,
    ba: Mapping[str, Any] | None = None,
    ecn: bool = False,
    gso: bool = True,
    sysctls: Mapping[str, str] | None = None,
    **both: Any,
) -> Iterator[Link]:
    """A link between two new namespaces, taken away again at the end.

    Args:
        backend: ``netem``, ``uml`` or ``tun``; None chooses, and says on stderr which and why.
        both: settings of :class:`Way` for both ways, such as ``rate_bps``, ``delay_ms``, ``loss``, ``queue_bytes``.
        ab, ba: settings of one way, over those.
        ecn: connections on both sides negotiate congestion marks; also on when a way marks.
        gso: False makes every packet one segment: then netem loses and drops as exactly as a real path, at up to
            about 0.3 Gbps.
        sysctls: files under ``/proc/sys/net/ipv4`` of both namespaces.

    Raises:
        ConfigError: this machine does not allow it, or a setting cannot be.
    """
    ways = change({way: Way() for way in WAYS}, None, both)
    for way, own in (("ab", ab), ("ba", ba)):
        ways = change(ways, way, dict(own or {}))
    reason = why_not()
    if reason is not None:
        raise ConfigError("no laboratory here", found=reason)
    sweep()
    choice = choose(backend)
    if backend is None:
        sys.stderr.write(choice.line() + "\n")
    ecn = ecn or _marks(ways)
    made = Link(BACKENDS[choice.name](), {"tcp_ecn": _ECN[ecn], **(sysctls or {})}, gso=gso)
    try:
        made._start(ways)
        yield made
    finally:
        made.close()
