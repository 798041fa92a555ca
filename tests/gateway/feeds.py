"""Endless answers of pretend nodes, as a test wants them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from tests.gateway.fakes import FakeNode

__all__ = ["FeedScript"]


class FeedScript:
    """Answers ``GET path`` on a node with what it is told to say.

    Attributes:
        listeners: how often it was asked.
    """

    def __init__(self, node: FakeNode, path: str) -> None:
        self.node = node
        self.listeners = 0
        self._events: asyncio.Queue[bytes | None] = asyncio.Queue()
        node.extra_routes.append(web.get(path, self._handle))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.listeners += 1
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self._events.get()) is not None:
            await response.write(line)
        return response

    def say(self, event: dict[str, Any]) -> None:
        self._events.put_nowait(orjson.dumps(event) + b"\n")

    def end(self) -> None:
        """End the answer that is open."""
        self._events.put_nowait(None)
