"""Calls to nodes: connections are used again, and what goes wrong on one is an OSError."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from prfaas_net.gateway import http_pool
from prfaas_net.gateway.http_pool import HttpAnswer, HttpPool

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n"
ENDED = b"0\r\n\r\n"
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def begun(part: bytes) -> bytes:
    """An answer of chunks with its first one."""
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(part), part)


@asynccontextmanager
async def serving(handle: Handle) -> AsyncIterator[tuple[HttpPool, str, list[int]]]:
    """A pool, a server that handles each connection so, and the count of connections."""
    opened = [0]

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened[0] += 1
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    server = await asyncio.start_server(counted, "127.0.0.1", 0)
    pool = HttpPool()
    try:
        yield pool, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", opened
    finally:
        await pool.close()
        server.close()
        await server.wait_closed()


async def asked(pool: HttpPool, url: str, silence_s: float | None = None) -> HttpAnswer:
    return await pool.request(
        "POST", url, "/path", headers={"X-A": "b"}, body=b"{}", connect_timeout_s=5.0, silence_s=silence_s
    )


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(2)


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    """Addresses may have a path of their own."""
    seen = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(begun(b"ok") + ENDED)

    async with serving(handle) as (pool, url, opened), asyncio.timeout(10):
        for _ in range(3):
            answer = await asked(pool, f"{url}/engine/a/")
            assert (answer.status, await answer.read(100)) == (200, b"ok")
            answer.release()
        assert opened == [1]
    assert seen[0].startswith(b"POST /engine/a/path HTTP/1.1\r\n")
    assert b"X-A: b\r\n" in seen[0] and seen[0].endswith(b"\r\n\r\n{}")


async def test_an_answer_that_was_released_ends_before_its_connection_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end comes in a moment. Where it does not, the connection is broken."""
    ends, go_on, broken = [True], asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_request(reader)
                writer.write(begun(b"line"))
                await go_on.wait()
                if ends[0]:
                    writer.write(ENDED)
        finally:
            broken.set()

    async with serving(handle) as (pool, url, opened), asyncio.timeout(10):
        answer = await asked(pool, url)
        assert await answer.readany() == b"line"
        answer.release()
        go_on.set()
        await asyncio.gather(*pool._drains)
        ends[0] = False
        monkeypatch.setattr(http_pool, "DRAIN_S", 0.01)
        unfinished = await asked(pool, url)
        assert opened == [1]
        assert await unfinished.readany() == b"line"
        unfinished.release()
        await broken.wait()
        ends[0] = True
        assert await (await asked(pool, url)).read(100) == b"line"
        assert opened == [2]


async def test_closing_breaks_the_connection_and_another_is_opened() -> None:
    """An answer that was not read to its end leaves nothing to the next one."""
    left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(begun(b"half"))
        assert await reader.read(1) == b""
        left.set()

    async with serving(handle) as (pool, url, opened), asyncio.timeout(10):
        for count in (1, 2):
            answer = await asked(pool, url)
            assert await answer.readany() == b"half"
            answer.close()
            await left.wait()
            left.clear()
            assert opened == [count]


async def test_what_goes_wrong_is_an_os_error() -> None:
    """Nobody there; a connection that ends before its answer or within it; one that is silent for too long."""

    async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)

    async def ends_within(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 9\r\n\r\nabc")

    async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 9\r\n\r\nabc")
        await reader.read(1)

    async with serving(ends) as (pool, url, _), asyncio.timeout(10):
        with pytest.raises(OSError, match="disconnected"):
            await asked(pool, url)
    async with serving(ends_within) as (pool, url, _), asyncio.timeout(10):
        answer = await asked(pool, url)
        with pytest.raises(OSError, match="not completed"):
            await answer.read(9)
        answer.close()
    async with serving(is_silent) as (pool, url, _), asyncio.timeout(10):
        answer = await asked(pool, url, silence_s=0.2)
        assert await answer.readany() == b"abc"
        with pytest.raises(TimeoutError):
            await answer.readany()
        answer.close()
    pool = HttpPool()
    with pytest.raises(OSError, match=url.rpartition(":")[2]):
        await asked(pool, url)
    await pool.close()


async def test_closing_the_pool_leaves_no_connection_behind() -> None:
    """Those too whose answers nobody has read to the end; whoever still reads one is told."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(begun(b"half"))
        await reader.read(1)

    async with serving(handle) as (pool, url, _), asyncio.timeout(10):
        draining, held = await asked(pool, url), await asked(pool, url)
        draining.release()
        await pool.close()
        assert not pool._drains
        with pytest.raises(OSError, match="closed"):
            await held.read(100)
        held.close()
