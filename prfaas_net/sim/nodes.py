"""Prefill and decode nodes on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from prfaas_net.scheduling import NodeProfile
from prfaas_net.sim.loop import Loop

__all__ = ["SimDecode", "SimPrefill"]


@dataclass(eq=False)
class SimPrefill:
    """A node that computes one prompt after another, in the order in which they came.

    Args:
        speed: 1 is what its profile says, 2 twice as fast.
        noise: relative standard deviation of every prefill.
        begun, ended: told the job when its prefill begins (with its seconds) and when it ends.
    """

    loop: Loop
    node_id: str
    cluster: str
    profile: NodeProfile
    begun: Callable[[Any, float], None]
    ended: Callable[[Any], None]
    speed: float = 1.0
    noise: float = 0.0
    rng: Random | None = None
    queue: deque[tuple[Any, float]] = field(default_factory=deque)
    running: Any = None
    busy_s: float = 0.0
    epoch: int = 0

    def give(self, job: Any, tokens: float) -> None:
        """Queue a prompt of which so many tokens have to be computed."""
        seconds = self.profile.prefill_s(tokens) / self.speed
        if self.noise and self.rng is not None:
            seconds *= max(0.05, self.rng.gauss(1.0, self.noise))
        if self.running is None:
            self._start(job, seconds)
        else:
            self.queue.append((job, seconds))

    def fail(self) -> list[Any]:
        """The node dies; what it had is returned."""
        self.epoch += 1
        lost = ([self.running] if self.running is not None else []) + [job for job, _ in self.queue]
        self.running = None
        self.queue.clear()
        return lost

    def _start(self, job: Any, seconds: float) -> None:
        self.running = job
        self.busy_s += seconds
        self.begun(job, seconds)
        self.loop.after(seconds, self._end, self.epoch)

    def _end(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        job, self.running = self.running, None
        if self.queue:
            self._start(*self.queue.popleft())
        self.ended(job)


@dataclass(eq=False)
class SimDecode:
    """A node with room for landing prompts and places in a batch; both are given first come, first served.

    Args:
        room_bytes: for the KVCache of prompts that are on their way or running; None is room without end.
        ended: told the job when its last token is out.
    """

    loop: Loop
    node_id: str
    cluster: str
    profile: NodeProfile
    ended: Callable[[Any], None]
    room_bytes: float | None = None
    used_bytes: float = 0.0
    running: int = 0
    waiting: deque[tuple[Any, float]] = field(default_factory=deque)
    unreserved: deque[tuple[float, Callable[[Any], None], Any]] = field(default_factory=deque)

    def reserve(self, size_bytes: float, granted: Callable[[Any], None], job: Any) -> None:
        """Ask for room before anything is sent; ``granted(job)`` follows, at once if there is room."""
        if self.room_bytes is None:
            granted(job)
            return
        self.unreserved.append((size_bytes, granted, job))
        self._grant()

    def release(self, size_bytes: float) -> None:
        """Room that is needed no more."""
        if self.room_bytes is not None:
            self.used_bytes -= size_bytes
            self._grant()

    def withdraw(self, job: Any) -> bool:
        """A job that still waits for room does not want it any more; False if it does not wait."""
        kept = [entry for entry in self.unreserved if entry[2] is not job]
        found = len(kept) < len(self.unreserved)
        self.unreserved = deque(kept)
        return found

    def landed(self, job: Any, decode_s: float) -> None:
        """A prompt's KVCache is here whole; it decodes as soon as there is a place."""
        assert self.profile.decode is not None
        if self.running < self.profile.decode.max_batch:
            self._start(job, decode_s)
        else:
            self.waiting.append((job, decode_s))

    def _grant(self) -> None:
        assert self.room_bytes is not None
        while self.unreserved:
            size_bytes, granted, job = self.unreserved[0]
            # A prompt larger than all the room is let in alone: refusing it for ever would stop everything.
            if self.used_bytes > 0 and self.used_bytes + size_bytes > self.room_bytes:
                return
            self.unreserved.popleft()
            self.used_bytes += size_bytes
            granted(job)

    def _start(self, job: Any, decode_s: float) -> None:
        self.running += 1
        self.loop.after(decode_s, self._end, job)

    def _end(self, job: Any) -> None:
        self.running -= 1
        if self.waiting:
            self._start(*self.waiting.popleft())
        self.ended(job)
