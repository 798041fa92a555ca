"""Making state visible in the buffer, and telling of it, in the order in which it was computed.

Where arrays are views of the buffer there is nothing to do but tell. On a device, each layer's new state is
copied to pinned host memory by the device's own copy engine while the next layer computes, then into the buffer;
only then is it told of. At most a few copies are under way, so the pinned memory is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from engine.backend import Array, Backend
from engine.state import SequenceState

__all__ = ["Copier", "PendingCopy", "Publisher"]

# Layers whose state is on its way at one time.
MAX_PENDING = 8


class PendingCopy(Protocol):
    """A copy from the device to pinned memory that was started."""

    def done(self) -> bool: ...

    def result(self) -> np.ndarray[Any, Any]:
        """Wait for it; the pinned array, until :meth:`release`."""
        ...

    def release(self) -> None:
        """The pinned memory may be used again."""
        ...


class Copier(Protocol):
    """Starts copies that run beside the computation."""

    def start(self, array: Array) -> PendingCopy:
        """Copy what ``array`` will hold when the work queued so far is done."""
        ...


class Publisher:
    """Publishes the state of one sequence.

    Args:
        tell: called with (layer, stop token) once a layer's state is in the buffer.
    """

    def __init__(self, state: SequenceState, backend: Backend, tell: Callable[[int, int], None]) -> None:
        self._state = state
        self._backend = backend
        self._tell = tell
        self._copier: Copier | None = None if backend.new_copier is None else backend.new_copier()
        self._pending: deque[tuple[list[tuple[PendingCopy, np.ndarray[Any, Any]]], int, int]] = deque()

    def publish(self, layer_index: int, start: int, stop: int) -> None:
        """One layer has computed its state for tokens ``start`` to ``stop``."""
        if self._backend.shares_host_memory:
            self._tell(layer_index, stop)
            return
        pieces = self._state.pieces(layer_index, start, stop)
        if self._copier is None:
            for array, target in pieces:
                target[...] = self._backend.to_host(array)
            self._tell(layer_index, stop)
            return
        self._pending.append(([(self._copier.start(array), target) for array, target in pieces], layer_index, stop))
        self.poll()

    def poll(self) -> None:
        """Tell of what has arrived; wait only if too much is under way."""
        while self._pending:
            copies, _, _ = self._pending[0]
            if len(self._pending) <= MAX_PENDING and not all(copy.done() for copy, _ in copies):
                return
            self._land()

    def finish(self) -> None:
        """Wait for everything that is under way, and tell of it."""
        while self._pending:
            self._land()

    def abandon(self) -> None:
        """Wait for what is under way without telling: nothing writes into the buffer afterwards."""
        while self._pending:
            copies, _, _ = self._pending.popleft()
            for copy, _ in copies:
                copy.result()
                copy.release()

    def write_now(self, layer_index: int) -> None:
        """Bring one layer's window or linear state into the buffer at once, telling nobody."""
        if not self._backend.shares_host_memory:
            for array, target in self._state.pieces(layer_index, 0, 0):
                target[...] = self._backend.to_host(array)

    def _land(self) -> None:
        copies, layer_index, stop = self._pending.popleft()
        for copy, target in copies:
            target[...] = copy.result()
            copy.release()
        self._tell(layer_index, stop)
