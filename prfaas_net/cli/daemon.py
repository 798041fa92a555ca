"""Running a long-lived process: the loop, signals, the ready line, and dying with whoever started it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
import uvloop

from prfaas_net.localfleet.processes import PARENT_VARIABLE

__all__ = ["Stoppable", "run_daemon"]


_PR_SET_PDEATHSIG = 1


class Stoppable(Protocol):
    """Something that runs until it is closed."""

    async def close(self) -> None: ...


def _die_with_parent() -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(0)  # it was gone before we asked


async def _serve(start: Callable[[], Awaitable[tuple[Stoppable, dict[str, Any]]]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server, ready = await start()
    # One JSON line on stdout: whoever started us learns that we serve, and where.
    sys.stdout.write(orjson.dumps({"ready": True, "pid": os.getpid(), **ready}).decode() + "\n")
    sys.stdout.flush()
    await stop.wait()
    await server.close()


def run_daemon(start: Callable[[], Awaitable[tuple[Stoppable, dict[str, Any]]]]) -> None:
    """Start, say so, serve until SIGINT or SIGTERM, close.

    Args:
        start: returns what to close, and what the ready line should say.
    """
    _die_with_parent()
    uvloop.run(_serve(start))
