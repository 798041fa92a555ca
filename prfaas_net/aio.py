"""Small asyncio pieces that several shells need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["see_through"]

_T = TypeVar("_T")


async def see_through(work: Awaitable[_T]) -> _T:
    """Await ``work`` to its end, however often this task is cancelled meanwhile; then be cancelled.

    For cleaning up that must not be left half done, such as waiting for a thread that still writes into memory
    which is about to be given to somebody else. The work itself must be bounded.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
