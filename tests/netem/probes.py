"""Datagrams through a link, stamped on both sides with the one clock that both have."""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass

from tools.netlab import Link

__all__ = ["HEADERS_BYTES", "Passed", "datagrams"]

# IPv4 and UDP; what a queue counts beside the payload, and on Ethernet devices 14 more.
HEADERS_BYTES = 28
_STAMP = struct.Struct("<Qd")


@dataclass(frozen=True)
class Passed:
    """What came through.

    Attributes:
        numbers: of the datagrams, in order of arrival.
        took_ms: each one's time from side to side.
    """

    sent: int
    numbers: list[int]
    took_ms: list[float]


def datagrams(
    link: Link, way: str, n: int, *, every_s: float = 0.0, payload_bytes: int = 100, patience_s: float = 1.0
) -> Passed:
    """Send so many; how many come, when, and in which order.

    Args:
        patience_s: how long to wait for the next one before it is said to be lost.
    """
    with link.inside(way[1]):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with link.inside(way[0]):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with receiver, sender:
        receiver.setsockopt(socket.SOL_SOCKET, 33, 32 << 20)  # SO_RCVBUFFORCE: nothing is lost here
        receiver.bind((link.end(way[1]).address, 0))
        receiver.settimeout(patience_s)
        sender.connect(receiver.getsockname())
        sending = threading.Thread(target=_send, args=(sender, n, every_s, payload_bytes), daemon=True)
        sending.start()
        passed = Passed(n, [], [])
        while len(passed.numbers) < n:
            try:
                data = receiver.recv(2048)
            except TimeoutError:
                if sending.is_alive():
                    continue
                break
            number, at_s = _STAMP.unpack_from(data)
            passed.numbers.append(number)
            passed.took_ms.append((time.monotonic() - at_s) * 1e3)
        sending.join()
    return passed


def _send(sender: socket.socket, n: int, every_s: float, payload_bytes: int) -> None:
    due_s = time.monotonic()
    for number in range(n):
        sender.send(_STAMP.pack(number, time.monotonic()).ljust(payload_bytes, b"\0"))
        if every_s:
            due_s += every_s
            time.sleep(max(0.0, due_s - time.monotonic()))
