"""Sums and extremes over the last so many seconds, in constant time a step."""

from __future__ import annotations

from collections import deque

__all__ = ["WindowedMax", "WindowedSums"]


class WindowedSums:
    """Sums of integers over a window whose length may change from step to step.

    Args:
        n: how many numbers each step brings.
    """

    def __init__(self, n: int) -> None:
        self.sums = [0] * n
        self.time_s = 0.0
        self._steps: deque[tuple[float, float, tuple[int, ...]]] = deque()

    def add(self, at_s: float, dt_s: float, values: tuple[int, ...], *, window_s: float) -> None:
        """Take a step that ended at ``at_s`` and lasted ``dt_s``; forget what lies wholly before the window.

        At least the newest step stays, however long it was.
        """
        steps, sums = self._steps, self.sums
        steps.append((at_s, dt_s, values))
        for index, value in enumerate(values):
            if value:
                sums[index] += value
        self.time_s += dt_s
        while len(steps) > 1 and self.time_s - steps[0][1] >= window_s:
            _, gone_s, old = steps.popleft()
            self.time_s -= gone_s
            for index, value in enumerate(old):
                if value:
                    sums[index] -= value
        if len(steps) == 1:
            self.time_s = dt_s  # what rounding has left over goes


class WindowedMax:
    """The largest of the values of the last so many seconds. (For a minimum, negate.)"""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()

    def add(self, at_s: float, value: float, *, window_s: float) -> None:
        """Take a value, and forget those before the window."""
        values = self._values
        while values and values[-1][1] <= value:
            values.pop()
        values.append((at_s, value))
        while values[0][0] < at_s - window_s:
            values.popleft()

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()

    @property
    def value(self) -> float | None:
        return self._values[0][1] if self._values else None
