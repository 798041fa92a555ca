"""How long the machine stood still: what tests on a shared one have to know before they blame the code."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Stalls"]

_NAP_S = 0.005
# A round trip of the tests' paths, more or less; and a share of the time that no busy desktop reaches.
STALL_S, LATE_SHARE = 0.03, 0.05


@dataclass
class Stalls:
    """A thread that naps, and notes by how much it overslept. A context manager.

    Attributes:
        worst_s: the longest time by which it overslept; ``late_s``: all of them together, of ``watched_s``.
    """

    worst_s: float = 0.0
    late_s: float = 0.0
    watched_s: float = 0.0

    def __enter__(self) -> Stalls:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._nap, name="stalls", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _nap(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(_NAP_S):
            now = time.monotonic()
            late_s = now - last_s - _NAP_S
            self.worst_s = max(self.worst_s, late_s)
            self.late_s += max(0.0, late_s)
            self.watched_s += now - last_s
            last_s = now

    @property
    def serious(self) -> bool:
        """Whether a test of tens of milliseconds could have failed of it."""
        return self.worst_s > STALL_S or self.late_s > LATE_SHARE * self.watched_s

    def line(self) -> str:
        """For people."""
        return f"for up to {1e3 * self.worst_s:.0f} ms, {self.late_s:.1f} of {self.watched_s:.0f} s in all"
