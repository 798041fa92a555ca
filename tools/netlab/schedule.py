"""A link that changes over time, and what else happens then: planned in a file, played by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from prfaas_net.config import Bytes, Duration, Rate, Section, load_config
from prfaas_net.errors import PrfaasError, UsageError

__all__ = ["Event", "Player", "ScheduleFile", "Step", "WaySection", "load_schedule"]


class WaySection(Section):
    """Settings of a link as people write them; what is left out keeps what it was.

    Attributes:
        rate, delay, jitter, loss, queue, mark: see :class:`tools.netlab.settings.Way`.
    """

    rate: Rate | None = None
    delay: Duration | None = None
    jitter: Duration | None = None
    loss: float | None = None
    queue: Bytes | None = None
    mark: Bytes | None = None

    def changes(self) -> dict[str, Any]:
        """For ``Link.set``."""
        named = {
            "rate_bps": self.rate,
            "delay_ms": None if self.delay is None else self.delay * 1e3,
            "jitter_ms": None if self.jitter is None else self.jitter * 1e3,
            "loss": self.loss,
            "queue_bytes": self.queue,
            "mark_bytes": self.mark,
        }
        return {name: value for name, value in named.items() if value is not None}


class Step(WaySection):
    """``[[at]]``: from ``t`` on, the way (or both) has these settings."""

    t: Duration
    way: str | None = None

    def line(self) -> str:
        """For people."""
        return f"{self.way or 'both ways'}: " + ", ".join(f"{name} {value:g}" for name, value in self.changes().items())


class ScheduleFile(Section):
    """A file of nothing but ``[[at]]`` tables."""

    at: tuple[Step, ...] = ()


def load_schedule(path: Path) -> tuple[Step, ...]:
    """Read a schedule.

    Raises:
        ConfigError: file, key and what is wrong.
    """
    return load_config(ScheduleFile, path).at


@dataclass(frozen=True)
class Event:
    """Something to do at a time, counted from the start of the player."""

    at_s: float
    what: str
    do: Callable[[], object]


class Player:
    """Does events when their time has come. A context manager: leaving it ends it, early or not.

    Attributes:
        done: (planned time, actual time, what) of what has happened; both in seconds since the start.
        began_s: when it started, on the monotonic clock.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.done: list[tuple[float, float, str]] = []
        self.began_s = time.monotonic()
        self._events = sorted(events, key=lambda event: event.at_s)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def __enter__(self) -> Player:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _play(self) -> None:
        try:
            for event in self._events:
                if self._stop.wait(max(0.0, self.began_s + event.at_s - time.monotonic())):
                    return
                event.do()
                self.done.append((event.at_s, time.monotonic() - self.began_s, event.what))
        except (PrfaasError, OSError) as error:
            self._error = error

    def wait(self, timeout_s: float) -> None:
        """Until the last event has happened.

        Raises:
            UsageError: one failed, or there was not enough time.
        """
        self._thread.join(timeout_s)
        if self._error is not None:
            raise UsageError("a schedule could not be played", found=str(self._error)) from self._error
        if self._thread.is_alive():
            raise UsageError("the schedule is longer than this wait", found=f"{timeout_s:g} s")
