"""Bare TCP flows over an emulated path, recorded as a link would see them: the two ends, each in a process of its own.

Run as ``python -m prfaas_net.bench.congestion_flows receive`` and ``... send``; JSON lines in, JSON lines out. Bare
sockets, and not links, so that the load is what the case says, to the bit: the kernel's TCP is what is looked at.
"""

from __future__ import annotations

import gzip
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from prfaas_net.congestion.samples import LinkSample, LogHead, Mark, write_head, write_mark, write_sample
from prfaas_net.transport.options import LinkOptions, pace, tune
from prfaas_net.transport.stats import read_tcp_info
from prfaas_net.units import KiB

__all__ = ["Case", "Competitor", "Flow", "record"]

# As links look at their sockets.
LOOK_S = (0.010, 0.030)
# A ramping competitor begins with so much of its rate, and is paced anew so often.
RAMP_FROM, RAMP_EVERY_S = 0.02, 0.02
_BLOCK = bytes(256 * KiB)


@dataclass(frozen=True)
class Competitor:
    """Other traffic on the path.

    Attributes:
        kind: ``none``; ``abrupt``: one flow that sends all it can; ``ramping``: one that is paced to more and more, up
            to ``rate_bps`` after ``ramp_s``.
    """

    kind: str
    start_s: float = 0.0
    stop_s: float = 0.0
    rate_bps: float = 0.0
    ramp_s: float = 0.0
    congestion_control: str = "cubic"


@dataclass(frozen=True)
class Case:
    """One recording.

    Attributes:
        pace_bps: of all our flows together.
        about: goes into the head of the log.
    """

    congestion_control: str
    connections: int
    pace_bps: int
    duration_s: float
    competitor: Competitor
    seed: int
    about: dict[str, Any] = field(default_factory=dict)


class Flow:
    """One connection that always has something to send, until it is stopped."""

    def __init__(self, endpoint: tuple[str, int], options: LinkOptions) -> None:
        self.sock = socket.create_connection(endpoint, timeout=10.0)
        self.sock.settimeout(None)
        self._options = options
        tune(self.sock, options, data=True)
        pace(self.sock, options, options.connections)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            while True:
                self.sock.sendall(_BLOCK)
        except OSError:
            pass  # stopped

    def pace(self, rate_bps: float) -> None:
        """Send so much from now on."""
        pace(self.sock, LinkOptions(budget_bps=int(rate_bps)), 1)

    def stop(self) -> None:
        """Throw away what is not sent yet."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        self._thread.join(5.0)
        self.sock.close()


class _Recorder:
    """Looks at our flows at jittered intervals, and at the competitor beside them."""

    def __init__(self, case: Case, flows: list[Flow]) -> None:
        self._random = random.Random(case.seed)
        self._flows = flows
        head = LogHead(case.congestion_control, case.about)
        self.lines = [write_head(head)]
        self.competitor: Flow | None = None
        self._others_bytes: float | None = None
        self._others_at_s = 0.0

    def look(self) -> None:
        now = time.monotonic()
        infos = ((number, read_tcp_info(flow.sock)) for number, flow in enumerate(self._flows, 1))
        rows = tuple((number, info) for number, info in infos if info is not None)
        self.lines.append(write_sample(LinkSample(now, True, sum(i.notsent_bytes for _, i in rows), rows)))
        if self.competitor is None:
            self._others_bytes = None
            return
        info = read_tcp_info(self.competitor.sock)
        if info is None:
            return
        # What it has put on the wire: that is what meets our own traffic at the bottleneck.
        sent = float(info.bytes_sent)
        if self._others_bytes is not None and now > self._others_at_s:
            rate_bps = 8 * (sent - self._others_bytes) / (now - self._others_at_s)
            self.lines.append(write_mark(Mark(now, "others-sent-bps", rate_bps)))
        self._others_bytes, self._others_at_s = sent, now

    def mark(self, what: str) -> None:
        self.lines.append(write_mark(Mark(time.monotonic(), what)))

    def wait_s(self) -> float:
        return self._random.uniform(*LOOK_S)


def record(case: Case, endpoint: tuple[str, int], path: str) -> int:
    """Make one recording; how many lines it has."""
    options = LinkOptions(
        connections=case.connections, congestion_control=case.congestion_control, budget_bps=case.pace_bps
    )
    flows = [Flow(endpoint, options) for _ in range(case.connections)]
    recorder, rival = _Recorder(case, flows), case.competitor
    began_s = time.monotonic()
    try:
        while (at_s := time.monotonic() - began_s) < case.duration_s:
            wanted = rival.kind != "none" and rival.start_s <= at_s < rival.stop_s
            if wanted and recorder.competitor is None:
                recorder.competitor = _begin(rival, endpoint)
                recorder.mark("competitor-start")
            elif not wanted and recorder.competitor is not None:
                recorder.competitor.stop()
                recorder.competitor = None
                recorder.mark("competitor-stop")
            if recorder.competitor is not None and rival.kind == "ramping":
                share = min(1.0, (at_s - rival.start_s) / rival.ramp_s)
                recorder.competitor.pace(rival.rate_bps * max(RAMP_FROM, share))
            recorder.look()
            time.sleep(recorder.wait_s())
    finally:
        for flow in (*flows, *((recorder.competitor,) if recorder.competitor else ())):
            flow.stop()
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.writelines(recorder.lines)
    return len(recorder.lines)


def _begin(rival: Competitor, endpoint: tuple[str, int]) -> Flow:
    budget = int(rival.rate_bps * RAMP_FROM) if rival.kind == "ramping" else None
    return Flow(endpoint, LinkOptions(connections=1, congestion_control=rival.congestion_control, budget_bps=budget))


def _drain(sock: socket.socket) -> None:
    buffer = bytearray(512 * KiB)
    with sock:
        try:
            while sock.recv_into(buffer):
                pass
        except OSError:
            pass  # the sender has thrown away what it had


def _serve(server: socket.socket) -> None:
    while True:
        sock, _ = server.accept()
        threading.Thread(target=_drain, args=(sock,), daemon=True).start()


def _receive(host: str) -> dict[str, Any]:
    server = socket.create_server((host, 0), backlog=64)
    threading.Thread(target=_serve, args=(server,), daemon=True).start()
    return {"endpoint": server.getsockname()}


def _send(case: dict[str, Any], endpoint: tuple[str, int], path: str) -> dict[str, Any]:
    rival = Competitor(**case.pop("competitor"))
    return {"lines": record(Case(competitor=rival, **case), (endpoint[0], endpoint[1]), path)}


def _main(role: str) -> None:
    commands: dict[str, Callable[..., dict[str, Any]]] = {"receive": _receive, "send": _send}
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        request.pop("do")
        try:
            answer = commands[role](**request)
        except OSError as error:
            answer = {"error": repr(error)}
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)  # threads may sit in system calls for as long as their peers like


if __name__ == "__main__":
    _main(sys.argv[1])
