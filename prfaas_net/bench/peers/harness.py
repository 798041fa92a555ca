"""The frame around a peer: one process of a pair, led by JSON lines. Imports nothing beyond NumPy."""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["REGION_BYTES", "Peer", "Windows", "main"]

# As large as what our own ends send from and land in.
REGION_BYTES = 256 << 20

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Peer:
    """One end. The receiver offers, both join, then bytes go around the region, piece after piece.

    Attributes:
        piece_bytes: what measured best for this peer.
    """

    piece_bytes = 16 << 20

    def __init__(self, *, receives: bool, host: str, here: str, region: Array) -> None:
        self.receives = receives
        self.host = host
        self.here = here
        self.region = region

    def offer(self) -> dict[str, Any]:
        """Receiver: what the sender has to know."""
        return {}

    def join(self, offer: dict[str, Any]) -> None:
        """Connect."""

    def receive(self, n_bytes: int) -> None:
        """Receiver: until all has landed; nothing to do where the sender writes into our memory."""

    def send(self, n_bytes: int) -> None:
        """Sender: until it knows that all has landed."""
        raise NotImplementedError

    def pieces(self, n_bytes: int) -> Iterator[int]:
        """Offsets in the region, around it as often as needed."""
        return (at % REGION_BYTES for at in range(0, n_bytes, self.piece_bytes))


class Windows:
    """Groups of pieces that go together."""

    def __init__(self, pieces: Iterator[int], size: int) -> None:
        self._pieces = list(pieces)
        self._size = size

    def __iter__(self) -> Iterator[list[int]]:
        return (self._pieces[i : i + self._size] for i in range(0, len(self._pieces), self._size))


def _region(fill: bool) -> Array:
    area = mmap.mmap(-1, REGION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    region: Array = np.frombuffer(area, dtype=np.uint8)
    region[:] = np.frombuffer(np.random.default_rng(7).bytes(REGION_BYTES), np.uint8) if fill else 0
    return region


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _digest(region: Array, n_bytes: int) -> int:
    return zlib.crc32(memoryview(region[:n_bytes]))  # type: ignore[arg-type]


def main(kind: type[Peer]) -> None:
    """Obey until stdin is closed. ``argv``: role, the receiver's address, our address."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    role, host, here = sys.argv[1:4]
    region = _region(role == "send")
    peer: Peer | None = None
    cpu_before_s = 0.0
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if peer is None:
                peer = kind(receives=role == "receive", host=host, here=here, region=region)
            match request["do"]:
                case "offer":
                    answer = peer.offer()
                case "join":
                    peer.join(request["offer"])
                case "receive":
                    region[:] = 0
                    cpu_before_s = _cpu_s()
                    answers.write("{}\n")
                    answers.flush()
                    peer.receive(request["n_bytes"])
                case "landed":
                    answer = {"cpu_s": _cpu_s() - cpu_before_s, "digest": _digest(region, request["n_bytes"])}
                case "send":
                    cpu_before_s, began_s = _cpu_s(), time.perf_counter()
                    peer.send(request["n_bytes"])
                    took_s = time.perf_counter() - began_s
                    answer = {"took_s": took_s, "cpu_s": _cpu_s() - cpu_before_s}
                    answer["digest"] = _digest(region, request["n_bytes"])
        except Exception as error:  # whatever a peer raises is its result
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # some of them do not end otherwise
