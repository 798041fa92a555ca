"""Memory that KVCache passes through on its way out of or into an engine's pages."""

from __future__ import annotations

import asyncio

from prfaas_net.connectors.plan import PagePlan
from prfaas_net.errors import BusyError
from prfaas_net.transport import Arena, ArenaBlock

__all__ = ["Room", "views_of"]


class Room:
    """An arena with a queue in front. On one loop."""

    def __init__(self, total_bytes: int) -> None:
        self.arena = Arena(total_bytes)
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def reserve(self, n_bytes: int) -> ArenaBlock:
        """Wait for so much memory, first come first served. The caller bounds the wait.

        Raises:
            RefusedError: there is not so much in all.
        """
        async with self._turn:
            while True:
                self._freed.clear()
                try:
                    return self.arena.reserve(n_bytes)
                except BusyError:
                    await self._freed.wait()

    def release(self, block: ArenaBlock) -> None:
        block.release()
        self._freed.set()


def views_of(plan: PagePlan, block: ArenaBlock) -> list[memoryview]:
    """Each chunk's bytes in a block of memory, one after the other."""
    pairs = zip(plan.table.offsets, plan.table.lengths, strict=True)
    return [block.view[start : start + length] for start, length in pairs]
