"""Running a long-lived process: the loop, signals, the ready line, and dying with whoever started it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, runtime_checkable

import orjson
import uvloop

from prfaas_net.localfleet.processes import PARENT_VARIABLE

__all__ = ["Drainable", "Stoppable", "run_daemon"]


_PR_SET_PDEATHSIG = 1
# Objects made, and not freed by their last reference, between two collections: some hundred requests' worth.
GC_THRESHOLD = 20_000


class Stoppable(Protocol):
    """Something that runs until it is closed."""

    async def close(self) -> None: ...


@runtime_checkable
class Drainable(Stoppable, Protocol):
    """Something that can be told to take no more work, and to finish what it has."""

    async def drain(self) -> None:
        """Until nothing is held, or its bound has passed."""
        ...


class _Orders:
    """What signals have asked for. SIGTERM: finish what is held; again, or SIGINT: stop now."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.now = asyncio.Event()

    def terminate(self) -> None:
        if self.leave.is_set():
            self.now.set()
        self.leave.set()

    def interrupt(self) -> None:
        self.leave.set()
        self.now.set()


def _die_with_parent() -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(0)  # it was gone before we asked


async def _serve(start: Callable[[], Awaitable[tuple[Stoppable, dict[str, Any]]]]) -> None:
    orders = _Orders()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, orders.interrupt)
    loop.add_signal_handler(signal.SIGTERM, orders.terminate)
    server, ready = await start()
    # One JSON line on stdout: whoever started us learns that we serve, and where.
    sys.stdout.write(orjson.dumps({"ready": True, "pid": os.getpid(), **ready}).decode() + "\n")
    sys.stdout.flush()
    # What is loaded by now stays: a collection that looked at it again would only hold requests up.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    await orders.leave.wait()
    if isinstance(server, Drainable):
        await _drain(server, orders.now)
    await server.close()


async def _drain(server: Drainable, now: asyncio.Event) -> None:
    """Let the server finish what it holds, unless it is to stop now."""
    waits = [asyncio.create_task(server.drain()), asyncio.create_task(now.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def run_daemon(start: Callable[[], Awaitable[tuple[Stoppable, dict[str, Any]]]]) -> None:
    """Start, say so, serve until SIGINT or SIGTERM, finish what is held after a SIGTERM, close.

    Args:
        start: returns what to close, and what the ready line should say.
    """
    _die_with_parent()
    uvloop.run(_serve(start))
