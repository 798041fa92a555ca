"""Endless answers: what a node tells to any number of gateways, as JSON lines, as it happens.

``GET /v1/cache/events``: what its prefix cache holds (:mod:`prfaas_net.cache.events`).
``GET /v1/state/events``: its queue and its links (:mod:`prfaas_net.nodes.node_state`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import orjson
from aiohttp import web

__all__ = ["BEAT_S", "Feed", "Listener", "Source"]

Listener = Callable[[dict[str, Any]], None]

# A gateway that is so many events behind is cut off, and starts anew; bounds what it can make us hold.
MAX_BACKLOG = 10_000
# Something is said at least so often, so that silence means that the node is gone.
BEAT_S = 2.0
# A listener that takes nothing for so long is gone.
WRITE_TIMEOUT_S = 10.0


class Source(Protocol):
    """Something with a state that changes."""

    def listen(self, listener: Listener) -> dict[str, Any]:
        """The state now, as an event; every later one goes to ``listener``, from any thread."""
        ...

    def unlisten(self, listener: Listener) -> None:
        """No more events to this one."""
        ...


class Feed:
    """Answers listeners of one source.

    Args:
        head: said along with the first event.
        beat: what is said when nothing else was for ``beat_s``.
    """

    def __init__(
        self,
        source: Source,
        head: dict[str, Any],
        *,
        beat_s: float = BEAT_S,
        beat: Callable[[], dict[str, Any]] = lambda: {"event": "beat"},
    ) -> None:
        self._source = source
        self._head = head
        self._beat_s = beat_s
        self._beat = beat
        self._queues: set[asyncio.Queue[dict[str, Any] | None]] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One listener, until it leaves or falls behind."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(event: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        event: dict[str, Any] | None = self._source.listen(put) | self._head
        self._queues.add(queue)
        try:
            while event is not None and queue.qsize() < MAX_BACKLOG:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(orjson.dumps(event) + b"\n")
                try:
                    async with asyncio.timeout(self._beat_s):
                        event = await queue.get()
                except TimeoutError:
                    event = self._beat()
        except (ConnectionResetError, TimeoutError):
            pass  # the listener left, or takes nothing
        finally:
            self._queues.discard(queue)
            self._source.unlisten(put)
        return response

    def close(self) -> None:
        """End every answer."""
        for queue in self._queues:
            queue.put_nowait(None)
