"""An engine's answers off the wire: server-sent events, and bodies of bounded length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import aiohttp
import orjson

from prfaas_net.errors import LinkError, ProtocolError
from prfaas_net.gateway.calls import LineBuffer
from prfaas_net.gateway.engines.refusals import told

__all__ = ["EngineStream", "body_of", "reaching"]


@contextmanager
def reaching(node: str) -> Iterator[None]:
    """Turn whatever goes wrong on the way to an engine into a LinkError that names it."""
    try:
        yield
    except (aiohttp.ClientError, OSError) as error:
        raise LinkError(
            "an engine cannot be reached",
            found=str(error) or type(error).__name__,
            do="check that it runs and that its address is right",
            node=node,
        ) from error


class EngineStream:
    """The server-sent events of one call.

    Attributes:
        broken: the call itself failed, and not something that the engine told of.
        ended: nothing follows.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        node: str,
        limit_bytes: int,
        calling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.broken = False
        self.ended = False
        self._response = response
        self._node = node
        self._calling = calling
        self._buffer = LineBuffer(limit_bytes)
        self._lines: deque[bytes] = deque()

    async def next(self) -> dict[str, Any] | None:
        """The next event; None at the end.

        Raises:
            PrfaasError: the engine reported it.
            LinkError: the connection broke, or the answer ended without ``[DONE]``.
            ProtocolError: an event cannot be read.
        """
        while True:
            self.broken = True
            while not self._lines:
                with self._calling():
                    data = await self._response.content.readany()
                if not data:
                    raise LinkError(
                        "an engine ended its answer early", expected="data: [DONE]", do="see its log", node=self._node
                    )
                self._lines.extend(self._buffer.feed(data))
            line = self._lines.popleft()
            self.broken = False
            # Comments, event names and ids mean nothing here.
            if line.startswith(b"data:"):
                return self._event(line[5:].strip())

    def _event(self, data: bytes) -> dict[str, Any] | None:
        if data == b"[DONE]":
            self.ended = True
            return None
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            raise ProtocolError("an engine sent an event that is not one", found=repr(data[:80]), node=self._node)
        if event.get("error"):
            raise told(event, 500, self._node)
        return event

    def close(self) -> None:
        """Give the connection back if the call has ended, or break it: the engine then gives the request up."""
        if self.ended:
            self._response.release()
        else:
            self._response.close()


async def body_of(response: aiohttp.ClientResponse, limit_bytes: int, node: str) -> bytes:
    """A body of bounded length."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit_bytes:
            raise ProtocolError("an engine's answer is too long", expected=f"at most {limit_bytes} bytes", node=node)
    return bytes(body)
