"""The order in which ready chunks leave a link.

Earliest deadline first, so that an urgent transfer overtakes a bulky one in the middle; among transfers whose
deadlines fall into the same slot, the one that has sent the fewest bytes, which shares the link evenly. Free
connections pull the next chunk; no chunk belongs to a connection before it is pulled.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

__all__ = ["SendQueue"]

# Deadlines closer together than this count as equal, so that transfers admitted together share the link instead
# of running one after the other.
DEADLINE_SLOT_S = 1.0


@dataclass(slots=True)
class _Lane:
    """One transfer's chunks that are ready and not yet pulled."""

    slot: int
    lengths: tuple[int, ...]
    chunks: deque[int] = field(default_factory=deque)
    queued: set[int] = field(default_factory=set)
    served_bytes: int = 0
    in_heap: bool = False


class SendQueue:
    """Ready chunks of all transfers of one link."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}
        self._open: set[int] = set()
        self._heap: list[tuple[int, int, int]] = []

    def add_transfer(self, handle: int, lengths: tuple[int, ...], *, deadline: float) -> None:
        """Known from now on; its chunks stay back until :meth:`release`."""
        self._lanes[handle] = _Lane(int(deadline // DEADLINE_SLOT_S), lengths)

    def release(self, handle: int) -> None:
        """Its chunks may leave."""
        self._open.add(handle)
        self._enter(handle)

    def drop(self, handle: int) -> None:
        """Forget the transfer and all of its chunks."""
        self._lanes.pop(handle, None)
        self._open.discard(handle)

    def push(self, handle: int, chunk: int, *, front: bool = False) -> bool:
        """A chunk is ready (``front``: it has to go again); False if it waits already."""
        lane = self._lanes[handle]
        if chunk in lane.queued:
            return False
        lane.queued.add(chunk)
        if front:
            lane.chunks.appendleft(chunk)
        else:
            lane.chunks.append(chunk)
        self._enter(handle)
        return True

    def discard(self, handle: int, chunk: int) -> None:
        """The chunk need not go any more: it has landed after all."""
        lane = self._lanes[handle]
        if chunk in lane.queued:
            lane.queued.remove(chunk)
            lane.chunks.remove(chunk)

    def pop(self) -> tuple[int, int] | None:
        """(handle, chunk) that should leave next, or None."""
        if not self.waiting():
            return None
        _, _, handle = heapq.heappop(self._heap)
        lane = self._lanes[handle]
        lane.in_heap = False
        chunk = lane.chunks.popleft()
        lane.queued.remove(chunk)
        lane.served_bytes += lane.lengths[chunk]
        self._enter(handle)
        return handle, chunk

    def waiting(self) -> bool:
        """Whether :meth:`pop` would return a chunk."""
        while self._heap:
            handle = self._heap[0][2]
            lane = self._lanes.get(handle)
            if lane is not None and lane.chunks and handle in self._open:
                return True
            heapq.heappop(self._heap)  # dropped, or its chunks have landed after all
            if lane is not None:
                lane.in_heap = False
        return False

    def _enter(self, handle: int) -> None:
        lane = self._lanes[handle]
        if not lane.in_heap and lane.chunks and handle in self._open:
            lane.in_heap = True
            heapq.heappush(self._heap, (lane.slot, lane.served_bytes, handle))
