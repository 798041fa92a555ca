"""Time as an argument.

The cores (``wire``, ``scheduling``, later ``congestion`` and ``cache``) never read a clock: their methods take
``now`` in seconds on an arbitrary monotonic scale. Shells hold a :class:`Clock` and pass its reading in, so
the same objects run in production, in tests under virtual time and in the simulator.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Where a shell reads ``now`` from."""

    def now(self) -> float:
        """Seconds on a monotonic scale."""
        ...


class SystemClock:
    """The kernel's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> float:
        """Move forward and return the new time."""
        if by_s < 0:
            raise ValueError(f"time does not run backwards: advance({by_s})")
        self._now_s += by_s
        return self._now_s
