"""Which entry is worth least: LRU among equals, and dear ones stay longer (GreedyDual-Size).

The priority of an entry is ``base + cost / bytes``: what it would cost to make again, for each byte that it holds,
on top of a base that rises with every eviction to the priority of what was evicted. Using an entry lifts its base to
the present one. So an entry that is twice as dear survives about twice as many evictions unused; where all are equally
dear it is plain LRU (Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from prfaas_net.cache.prefix_tree import Entry

__all__ = ["EvictionQueue"]


class EvictionQueue:
    """Candidates for eviction, cheapest first.

    A heap whose items are checked when they come up: whoever was used or grew dearer since is put back where it belongs
    now, whoever is no candidate any more is dropped. What grew *cheaper* would come up too late: it is offered again.

    Args:
        evictable: whether an entry may go now.
        worth: cost per byte of an entry; None if nothing could ever use it: such go first, whenever they were used.
    """

    def __init__(self, evictable: Callable[[Entry], bool], worth: Callable[[Entry], float | None]) -> None:
        self._evictable = evictable
        self._worth = worth
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._n_queued = 0
        self._base = 0.0
        self._touches = 0

    def touch(self, entry: Entry) -> None:
        """It was used."""
        self._touches += 1
        entry.touched = self._touches
        entry.base = self._base

    def offer(self, entry: Entry, *, cheaper: bool = False) -> None:
        """It may have become a candidate, or a cheaper one than it was."""
        if (entry.queued and not cheaper) or not self._evictable(entry):
            return
        self._n_queued += not entry.queued
        entry.queued = True
        entry.ticket += 1  # what lies in the heap under an older one does not count any more
        heapq.heappush(self._heap, (self._priority(entry), entry.touched, entry.ticket, entry))
        if len(self._heap) > 2 * self._n_queued + 64:
            self._heap = [item for item in self._heap if item[3].queued and item[2] == item[3].ticket]
            heapq.heapify(self._heap)

    def pop(self) -> Entry | None:
        """Take out the candidate that is worth least, or None if there is none."""
        while self._heap:
            priority, touched, ticket, entry = heapq.heappop(self._heap)
            if ticket != entry.ticket or not entry.queued:
                continue
            entry.queued = False
            self._n_queued -= 1
            if not self._evictable(entry):
                continue
            now = self._priority(entry)
            if (now, entry.touched) > (priority, touched):
                self.offer(entry)
                continue
            self._base = max(self._base, priority)
            return entry
        return None

    def clear(self) -> None:
        """Forget all candidates."""
        for *_, entry in self._heap:
            entry.queued = False
        self._heap.clear()
        self._n_queued = 0

    def _priority(self, entry: Entry) -> float:
        worth = self._worth(entry)
        return -1.0 if worth is None else entry.base + worth
