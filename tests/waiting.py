"""Waiting for something that another thread or process does, with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Return as soon as ``condition()`` is true; TimeoutError if it does not become so in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nobody sets an event in another process
            await asyncio.sleep(0.002)
