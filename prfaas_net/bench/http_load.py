"""A client that costs little: one request that was prepared, again and again, over connections that stay open.

A process of its own (``python -m prfaas_net.bench.http_load``) that obeys JSON lines, so that it can be kept off the
core of what it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import uvloop

from prfaas_net.bench.processes import obey
from prfaas_net.errors import LinkError, ProtocolError

__all__: list[str] = []

CALL_TIMEOUT_S = 20.0


class _Caller(asyncio.Protocol):
    """One keep-alive connection, one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self.received = bytearray()
        self.first_s = 0.0
        # Where the body begins and, unless it comes in chunks, ends.
        self._body_at = self._end_at = 0

    async def call(self, request: bytes) -> tuple[float, float]:
        """Seconds to the first byte of the answer's body, and to its end; :attr:`received` is the answer.

        Raises:
            LinkError: the connection ended early.
            ProtocolError: the status is not 200.
        """
        assert self._transport is not None
        self._begin()
        self._done = asyncio.get_running_loop().create_future()
        began_s = time.perf_counter()
        self._transport.write(request)
        await self._done
        took_s = time.perf_counter() - began_s
        if not self.received.startswith(b"HTTP/1.1 200"):
            raise ProtocolError("not answered", expected="status 200", found=bytes(self.received[:300]))
        return self.first_s - began_s, took_s

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LinkError("the connection ended early", found=repr(error)))

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self._body_at:
            self._read_head()
        if not self._body_at:
            return
        if not self.first_s and len(self.received) > self._body_at:
            self.first_s = time.perf_counter()
        over = len(self.received) >= self._end_at if self._end_at else self.received.endswith(b"\r\n0\r\n\r\n")
        if over and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _read_head(self) -> None:
        end = self.received.find(b"\r\n\r\n")
        if end >= 0:
            self._body_at = end + 4
            head = bytes(self.received[:end]).lower()
            if (at := head.find(b"content-length:")) >= 0:
                self._end_at = self._body_at + int(head[at + 15 :].split(b"\r\n", 1)[0])


async def _connect(port: int) -> _Caller:
    _, caller = await asyncio.get_running_loop().create_connection(_Caller, "127.0.0.1", port)
    return caller


def _request(path: str, body: str) -> bytes:
    data = body.encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _once(port: int, path: str, body: str) -> dict[str, Any]:
    """One call; the answer as text."""
    caller = await _connect(port)
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            await caller.call(_request(path, body))
        return {"answer": caller.received.decode()}
    finally:
        caller.close()


async def _in_turn(ports: Sequence[int], path: str, body: str, n: int) -> dict[str, Any]:
    """``n`` calls to each port, in turn, so that what disturbs one disturbs its neighbours too."""
    request = _request(path, body)
    callers = [await _connect(port) for port in ports]
    first_s: list[list[float]] = [[] for _ in ports]
    total_s: list[list[float]] = [[] for _ in ports]
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S + n):
            for number in range(n):
                for place in range(len(ports)):
                    which = (place + number) % len(ports)
                    first, total = await callers[which].call(request)
                    first_s[which].append(first)
                    total_s[which].append(total)
        return {"first_s": first_s, "total_s": total_s}
    finally:
        for caller in callers:
            caller.close()


async def _at_once(port: int, path: str, body: str, connections: int, seconds: float) -> dict[str, Any]:
    """Calls without a pause over so many connections: how many were answered, in which time."""
    request = _request(path, body)
    callers = [await _connect(port) for _ in range(connections)]
    answered = 0
    began_s = time.perf_counter()

    async def one(caller: _Caller) -> None:
        nonlocal answered
        while time.perf_counter() - began_s < seconds:
            await caller.call(request)
            answered += 1

    try:
        async with asyncio.timeout(CALL_TIMEOUT_S + seconds):
            await asyncio.gather(*map(one, callers))
        return {"answered": answered, "took_s": time.perf_counter() - began_s}
    finally:
        for caller in callers:
            caller.close()


if __name__ == "__main__":
    uvloop.run(obey({"once": _once, "in_turn": _in_turn, "at_once": _at_once}))
