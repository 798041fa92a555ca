"""A link in user space between two network namespaces: delay, rate, a byte queue, loss by segment. Root only.

Run as ``python -m prfaas_net.bench.tunlink NS_A ADDRESS_A NS_B ADDRESS_B RATE_BPS DELAY_S LOSS QUEUE_BYTES``. It
makes a TUN device in each namespace, says ``{"ready": true}``, and forwards until its stdin is closed; then it says
what it did.

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

import orjson

from prfaas_net.bench.segments import VNET_BYTES, cut, segments_of

__all__ = ["DEVICE", "Direction"]

DEVICE = "lnk0"
# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 1 | 2 | 4 | 8  # checksum, TSO over IPv4 and IPv6, ECN
_PR_SET_TIMERSLACK = 29
_MAX_PACKET_BYTES = 65600
_READS_A_TURN = 16


@dataclass
class Direction:
    """One way of the link; packets in, packets out when their time has come.

    Attributes:
        read_fd, write_fd: devices.
        queue_bytes: what may wait for the bottleneck; more is dropped.
    """

    read_fd: int
    write_fd: int
    rate_bps: float
    delay_s: float
    loss: float
    queue_bytes: float
    random: random.Random

    def __post_init__(self) -> None:
        self._free_at = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._until_lost = self._gap()
        self.segments = self.lost = self.dropped = 0
        self.late_s = 0.0

    def _gap(self) -> int:
        """Segments that pass before the next lost one: geometric."""
        if not self.loss:
            return 1 << 62
        return int(math.log(1.0 - self.random.random()) / math.log1p(-self.loss))

    def push(self, packet: bytes, now: float) -> None:
        """A packet has entered the link."""
        n, segment_bytes, header_bytes = segments_of(packet)
        self.segments += n
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
        room = self.queue_bytes - (begins - now) * self.rate_bps / 8
        if wire_bytes > room:
            fit = int(room // (segment_bytes + header_bytes)) if n > 1 else 0
            self.dropped += n - max(0, fit)
            if fit <= 0:
                return
            packet = cut(packet, 0, fit)
            wire_bytes = len(packet) - VNET_BYTES + (fit - 1) * header_bytes
        self._free_at = begins + wire_bytes * 8 / self.rate_bps
        self._waiting.append((self._free_at + self.delay_s, packet))

    def flush(self, now: float) -> float | None:
        """Deliver what is due; when the next packet will be."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= now:
            due, packet = waiting.popleft()
            try:
                os.write(self.write_fd, packet)
            except OSError:
                self.dropped += 1
            self.late_s = max(self.late_s, now - due)
        return waiting[0][0] if waiting else None


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


def _forward(directions: tuple[Direction, Direction], stop_fd: int) -> None:
    by_fd = {direction.read_fd: direction for direction in directions}
    while True:
        now = time.monotonic()
        due = [at for at in (direction.flush(now) for direction in directions) if at is not None]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else None
        readable = select.select([*by_fd, stop_fd], (), (), timeout_s)[0]
        if stop_fd in readable:
            return
        for fd in readable:
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
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    _be_punctual()
    _forward((there, back), sys.stdin.fileno())
    totals = {
        name: {"segments": way.segments, "lost": way.lost, "dropped": way.dropped, "late_s": way.late_s}
        for name, way in (("there", there), ("back", back))
    }
    sys.stdout.write(orjson.dumps(totals).decode() + "\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
