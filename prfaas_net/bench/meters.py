"""What a process measures about itself: CPU time, and how late its event loop is."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Lateness", "cpu_s", "percentile", "process_cpu_s"]

# Fine enough that a loop blocked for a millisecond is seen, coarse enough that measuring costs next to nothing.
TICK_S = 0.002


def cpu_s() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that is not below ``share`` of them; 0 without samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Lateness:
    """How late a timer of the running loop fires, again and again, until it is stopped."""

    def __init__(self) -> None:
        self._late_s: list[float] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s.append(max(0.0, time.perf_counter() - due))

    def stop(self) -> list[float]:
        """All samples, in seconds."""
        self._task.cancel()
        return self._late_s


def process_cpu_s(pid: int) -> float:
    """User and system time of another process so far, all threads, to a hundredth of a second."""
    # The name of the program, in parentheses, may have spaces; what follows has a fixed order (proc(5)).
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
