"""A link in user space between two network namespaces. Root only.

Delay, jitter, rate, a byte queue, loss by segment, congestion marks; each way has its own, and they can change while
packets are under way. Run as ``python -m prfaas_net.bench.tunlink NS_A ADDRESS_A NS_B ADDRESS_B RATE_BPS DELAY_S LOSS
QUEUE_BYTES``, a rate of ``inf`` for no bottleneck. It makes a TUN device in each namespace, says ``{"ready": true}``,
and forwards until its stdin is closed; then it says what it did. On its stdin it takes JSON lines, each answered by
one: ``{"do": "set", "way": "there", "loss": 0.01}`` with any attributes of :class:`Direction`, and ``{"do":
"counters"}``.

TCP super-packets of 64 KiB pass whole, one read and one write, which is why Python is fast enough for a few gigabits.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import orjson

from prfaas_net.bench.segments import VNET_BYTES, cut, mark, segments_of

__all__ = ["DEVICE", "Direction"]

DEVICE = "lnk0"
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 1 | 2 | 4 | 8  # checksum, TSO over IPv4 and IPv6, ECN
_PR_SET_TIMERSLACK = 29
_MAX_PACKET_BYTES = 65600
_READS_A_TURN = 16


@dataclass(slots=True)
class _Packet:
    """On its way: when the bottleneck has sent it, and how long it flies from there."""

    sent_at_s: float
    flight_s: float
    wire_bytes: int
    data: bytes


@dataclass
class Direction:
    """One way of the link; packets in, packets out in order when their time has come.

    Attributes:
        read_fd, write_fd: devices.
        rate_bps: of the bottleneck; ``inf``: there is none, and no queue.
        queue_bytes: what may wait for the bottleneck; more is dropped.
        jitter_s: a packet takes up to so much less or more than ``delay_s``, evenly spread; order is kept.
        loss: share of segments; 1 is a black hole.
        mark_bytes: a packet that finds more than this waiting is marked (CE) if its sender understands marks.
    """

    read_fd: int
    write_fd: int
    rate_bps: float
    delay_s: float
    loss: float
    queue_bytes: float
    random: random.Random
    jitter_s: float = 0.0
    mark_bytes: float = math.inf

    def __post_init__(self) -> None:
        self._free_at = 0.0
        self._waiting: deque[_Packet] = deque()
        self._until_lost = self._gap()
        self.segments = self.bytes = self.lost = self.dropped = self.marked = 0
        self.late_s = self.longest_queue_bytes = 0.0

    def _gap(self) -> int:
        """Segments that pass before the next lost one: geometric."""
        if not self.loss:
            return 1 << 62
        if self.loss >= 1.0:
            return 0
        return int(math.log(1.0 - self.random.random()) / math.log1p(-self.loss))

    def set(self, now: float, **values: float) -> None:
        """Change attributes; what is in the queue leaves it at the new rate."""
        rate_bps = self.rate_bps
        for name, value in values.items():
            if name not in _SETTABLE:
                raise TypeError(f"a direction has no {name}")
            setattr(self, name, value)
        if "loss" in values:
            self._until_lost = self._gap()
        if self.rate_bps != rate_bps:
            at_s = now
            for packet in self._waiting:
                if packet.sent_at_s > now:
                    at_s += packet.wire_bytes * 8 / self.rate_bps
                    packet.sent_at_s = at_s
            self._free_at = at_s

    def counters(self) -> dict[str, float]:
        """Since the start: segments and bytes that came in, how many were lost, dropped and marked."""
        return {
            "segments": self.segments, "bytes": self.bytes, "lost": self.lost, "dropped": self.dropped,
            "marked": self.marked, "late_s": self.late_s, "longest_queue_bytes": self.longest_queue_bytes,
        }  # fmt: skip

    def push(self, packet: bytes, now: float) -> None:
        """A packet has entered the link."""
        n, segment_bytes, header_bytes = segments_of(packet)
        self.segments += n
        self.bytes += len(packet) - VNET_BYTES + (n - 1) * header_bytes
        start = 0
        while self._until_lost < n - start:
            lost = start + self._until_lost
            if lost > start:
                self._queue(cut(packet, start, lost), lost - start, segment_bytes, header_bytes, now)
            start = lost + 1
            self.lost += 1
            self._until_lost = self._gap()
        self._until_lost -= n - start
        if start < n:
            rest = cut(packet, start, n) if start else packet
            self._queue(rest, n - start, segment_bytes, header_bytes, now)

    def _queue(self, packet: bytes, n: int, segment_bytes: int, header_bytes: int, now: float) -> None:
        begins = max(self._free_at, now)
        wire_bytes = len(packet) - VNET_BYTES + (n - 1) * header_bytes
        if self.rate_bps != math.inf:
            waiting_bytes = (begins - now) * self.rate_bps / 8
            if wire_bytes > self.queue_bytes - waiting_bytes:
                fit = int((self.queue_bytes - waiting_bytes) // (segment_bytes + header_bytes)) if n > 1 else 0
                self.dropped += n - max(0, fit)
                if fit <= 0:
                    return
                n, packet = fit, cut(packet, 0, fit)
                wire_bytes = len(packet) - VNET_BYTES + (fit - 1) * header_bytes
            if waiting_bytes > self.mark_bytes and (marked := mark(packet)) is not None:
                packet = marked
                self.marked += n
            self.longest_queue_bytes = max(self.longest_queue_bytes, waiting_bytes + wire_bytes)
        self._free_at = begins + wire_bytes * 8 / self.rate_bps
        flight_s = self.delay_s
        if self.jitter_s:
            flight_s = max(0.0, flight_s + self.random.uniform(-self.jitter_s, self.jitter_s))
        self._waiting.append(_Packet(self._free_at, flight_s, wire_bytes, packet))

    def flush(self, now: float) -> float | None:
        """Deliver what is due; when the next packet will be."""
        waiting = self._waiting
        while waiting:
            packet = waiting[0]
            due = packet.sent_at_s + packet.flight_s
            if due > now:
                return due
            waiting.popleft()
            try:
                os.write(self.write_fd, packet.data)
            except OSError:
                self.dropped += 1
            self.late_s = max(self.late_s, now - due)
        return None


_SETTABLE = ("rate_bps", "delay_s", "jitter_s", "loss", "queue_bytes", "mark_bytes")


def _open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", VNET_BYTES))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


def _be_punctual() -> None:
    """Keep the delays true on a busy machine."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except OSError:
        pass  # then the report's "late" says so
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class _Control:
    """Commands on stdin."""

    def __init__(self, ways: dict[str, Direction]) -> None:
        self.ways = ways
        self.fd = sys.stdin.fileno()
        self._unread = b""

    def obey(self) -> bool:
        """Do what has come in; False once stdin is closed."""
        more = os.read(self.fd, 1 << 16)
        *lines, self._unread = (self._unread + more).split(b"\n")
        for line in lines:
            try:
                answer = self._do(**orjson.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                answer = {"error": repr(error)}
            say(answer)
        return bool(more)

    def _do(self, do: str, way: str | None = None, **values: float | None) -> dict[str, Any]:
        if do == "set":
            for name in (way,) if way else tuple(self.ways):
                # JSON has no infinity.
                known = {key: math.inf if value is None else float(value) for key, value in values.items()}
                self.ways[name].set(time.monotonic(), **known)
        elif do != "counters":
            raise ValueError(f"set or counters, not {do}")
        return self.totals()

    def totals(self) -> dict[str, Any]:
        """Of both ways."""
        return {name: way.counters() for name, way in self.ways.items()}


def say(answer: dict[str, Any]) -> None:
    """One line to whoever leads."""
    sys.stdout.write(orjson.dumps(answer).decode() + "\n")
    sys.stdout.flush()


def _forward(control: _Control) -> None:
    directions = tuple(control.ways.values())
    by_fd = {direction.read_fd: direction for direction in directions}
    while True:
        now = time.monotonic()
        due = [at for at in (direction.flush(now) for direction in directions) if at is not None]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable = select.select([*by_fd, control.fd], (), (), timeout_s)[0]
        for fd in readable:
            if fd == control.fd:
                if not control.obey():
                    return
                continue
            for _ in range(_READS_A_TURN):
                try:
                    packet = os.read(fd, _MAX_PACKET_BYTES)
                except BlockingIOError:
                    break
                by_fd[fd].push(packet, time.monotonic())


def _main(arguments: list[str]) -> None:
    space_a, address_a, space_b, address_b = arguments[:4]
    rate_bps, delay_s, loss, queue_bytes = map(float, arguments[4:8])
    fds = []
    sides = ((space_a, address_a, address_b), (space_b, address_b, address_a))
    for index, (space, address, peer) in enumerate(sides):
        name = f"tl{os.getpid() % 100000}{'ab'[index]}"
        fds.append(_open_tun(name))
        for command in (
            f"ip link set {name} netns {space} name {DEVICE}",
            f"ip -n {space} link set {DEVICE} mtu 1500 txqueuelen 10000 up",
            f"ip -n {space} addr add {address} peer {peer} dev {DEVICE}",
        ):
            subprocess.run(command.split(), check=True)
    there, back = (
        Direction(fds[i], fds[1 - i], rate_bps, delay_s, loss, queue_bytes, random.Random(i + 1)) for i in (0, 1)
    )
    say({"ready": True})
    _be_punctual()
    control = _Control({"there": there, "back": back})
    _forward(control)
    say(control.totals())


if __name__ == "__main__":
    _main(sys.argv[1:])
