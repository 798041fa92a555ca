"""``GET /v1/cache/events``: what a node's prefix cache holds, and every change, for any number of gateways."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.nodes.kv_memory import KvMemory

__all__ = ["CacheFeed"]

# A gateway that is so many changes behind gets a new snapshot instead; bounds what it can make us hold.
MAX_BACKLOG = 10_000
# Something is said at least so often, so that silence means that the node is gone.
BEAT_S = 2.0


class CacheFeed:
    """Answers listeners.

    Args:
        head: what every snapshot says of the node: its id and boot.
    """

    def __init__(self, memory: KvMemory, head: dict[str, Any]) -> None:
        self._memory = memory
        self._head = head
        self._queues: set[asyncio.Queue[dict[str, Any] | None]] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One listener, until it leaves or falls behind."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(event: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        snapshot = self._memory.listen(put)
        self._queues.add(queue)
        try:
            await _write(response, snapshot | self._head)
            while queue.qsize() < MAX_BACKLOG:
                try:
                    async with asyncio.timeout(BEAT_S):
                        event = await queue.get()
                except TimeoutError:
                    event = {"event": "beat"}
                if event is None:
                    break
                await _write(response, event)
        except ConnectionResetError:
            pass  # the listener left
        finally:
            self._queues.discard(queue)
            self._memory.unlisten(put)
        return response

    def close(self) -> None:
        """End every answer."""
        for queue in self._queues:
            queue.put_nowait(None)


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    async with asyncio.timeout(BEAT_S * 5):
        await response.write(orjson.dumps(event) + b"\n")
