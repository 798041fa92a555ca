"""Virtual time: a heap of things to do, done in order, ties in the order in which they were asked for."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Loop"]


class Loop:
    """The clock of a simulation and what is due on it.

    Attributes:
        now: seconds since the simulation began.
        done: how many things were done.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._asked = 0

    def at(self, when_s: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Do ``call(argument)`` at a time; what is already past is done next."""
        self._asked += 1
        heapq.heappush(self._heap, (when_s if when_s > self.now else self.now, self._asked, call, argument))

    def after(self, delay_s: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Do ``call(argument)`` in a while."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._asked, call, argument))

    def run(self) -> None:
        """Until nothing is left to do."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call, argument = pop(heap)
            self.done += 1
            call(argument)
