"""The client that calls nodes: what it reads does not depend on how bytes arrive, and connections are used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.gateway import http1
from prfaas_net.gateway.http1 import HIGH_WATER_BYTES, MAX_HEAD_BYTES, Http1Answer, Http1Pool, ResponseParser
from tests.waiting import until

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\n"


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def fed(message: bytes, cuts: list[int]) -> tuple[bytes, ResponseParser]:
    """What a parser makes of a message that arrives in pieces."""
    parser, parts = ResponseParser(), []
    for start, stop in zip([0, *cuts], [*cuts, len(message)], strict=True):
        parts += parser.feed(message[start:stop])
    return b"".join(parts), parser


MESSAGES = [
    (chunked(b"hello", b", ", b"world"), b"hello, world"),
    (HEAD + b"content-length: 5\r\n\r\nhello", b"hello"),
    (HEAD + b"Content-Length: 0\r\n\r\n", b""),
    (b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"x" * 300), b"x" * 300),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    (HEAD + b"Transfer-Encoding: Chunked\r\n\r\n5;name=v\r\nhello\r\n0\r\nTrailer: 1\r\n\r\n", b"hello"),
]


@pytest.mark.parametrize(("message", "body"), MESSAGES)
def test_an_answer_is_the_same_whole_and_byte_by_byte(message: bytes, body: bytes) -> None:
    """Heads, chunks and trailers may be cut anywhere."""
    for cuts in ([], list(range(1, len(message)))):
        found, parser = fed(message, cuts)
        assert found == body
        assert parser.status in (200, 204) and parser.ended and parser.keep_alive


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.data())
def test_chunks_do_not_depend_on_how_bytes_arrive(parts: list[bytes], data: st.DataObject) -> None:
    """Whatever is in them."""
    message = chunked(*parts)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(message) - 1), max_size=8)))
    found, parser = fed(message, cuts)
    assert found == b"".join(parts) and parser.ended


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_for(data: bytes) -> None:
    """It is never another error."""
    for start in (b"", HEAD + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"):
        try:
            fed(start + data, [])
        except ConnectionError:
            pass


@pytest.mark.parametrize(
    "message",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD_BYTES,
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 2\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello!!",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"5;" * 4000,
        chunked(b"a") + b"more",
    ],
)
def test_what_is_not_an_answer_is_refused(message: bytes) -> None:
    """By an error that means a broken connection."""
    with pytest.raises(ConnectionError):
        fed(message, [])


def test_a_connection_that_ends_ends_an_answer_of_no_length_and_breaks_any_other() -> None:
    """An answer that was cut is never taken for a whole one."""
    _, endless = fed(HEAD + b"\r\nabc", [])
    endless.feed_eof()
    assert (endless.ended, endless.keep_alive) == (True, False)
    for message in (b"", HEAD, chunked(b"abc")[:-5], HEAD + b"Content-Length: 9\r\n\r\nabc"):
        with pytest.raises(ConnectionResetError):
            fed(message, [])[1].feed_eof()


Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handle: Handle) -> AsyncIterator[tuple[Http1Pool, str, list[int]]]:
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
    pool = Http1Pool()
    try:
        yield pool, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", opened
    finally:
        await pool.close()
        server.close()
        await server.wait_closed()


async def asked(pool: Http1Pool, url: str, body: bytes | None = b"{}", silence_s: float | None = None) -> Http1Answer:
    return await pool.request(
        "POST", url, "/path", headers={"X-A": "b"}, body=body, connect_timeout_s=5.0, silence_s=silence_s
    )


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(2)


async def test_a_connection_is_used_again_after_a_whole_answer() -> None:
    """And the request is written as HTTP wants it."""
    seen = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(chunked(b"ok"))

    async with serving(handle) as (pool, url, opened):
        for _ in range(3):
            answer = await asked(pool, url)
            assert answer.status == 200 and await answer.read(100) == b"ok" and answer.at_eof
            answer.release()
        assert opened == [1]
    host = url.removeprefix("http://").encode()
    assert seen[0] == b"POST /path HTTP/1.1\r\nHost: " + host + b"\r\nX-A: b\r\nContent-Length: 2\r\n\r\n{}"


async def test_an_address_may_have_a_path_of_its_own() -> None:
    """Every call goes below it."""
    seen = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(chunked(b"ok"))

    async with serving(handle) as (pool, url, _):
        await (await asked(pool, f"{url}/engine/a/")).read(10)
    assert seen[0].startswith(b"POST /engine/a/path HTTP/1.1\r\n")


async def test_an_answer_that_was_released_ends_before_its_connection_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end comes in a moment. Where it does not, the connection is broken."""
    ends, go_on, broken = [True], asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await read_request(reader)
                writer.write(chunked(b"line")[:-5])
                await go_on.wait()
                if ends[0]:
                    writer.write(b"0\r\n\r\n")
        finally:
            broken.set()

    async with serving(handle) as (pool, url, opened), asyncio.timeout(10):
        answer = await asked(pool, url)
        assert await answer.readany() == b"line"
        assert [answer.at_eof] == [False]
        answer.release()
        go_on.set()
        await until(lambda: answer.at_eof)
        ends[0] = False
        monkeypatch.setattr(http1, "DRAIN_S", 0.01)
        unfinished = await asked(pool, url)
        assert opened == [1]
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
        writer.write(chunked(b"half")[:-5])
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


async def test_a_connection_that_the_server_had_closed_is_replaced() -> None:
    """It ends with the next request on it, before anything was answered."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked(b"ok"))
        await read_request(reader)
        # Closed without a word, as if it had been at the same moment.

    async with serving(handle) as (pool, url, opened), asyncio.timeout(10):
        for _ in range(3):
            answer = await asked(pool, url)
            assert await answer.read(100) == b"ok"
            answer.release()
        assert opened == [3]


async def test_a_new_connection_that_ends_is_an_error() -> None:
    """So is one that ends within its answer, and one that is silent for too long."""

    async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)

    async def is_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: 9\r\n\r\nabc")
        await reader.read(1)

    async with serving(ends) as (pool, url, _), asyncio.timeout(10):
        with pytest.raises(ConnectionResetError):
            await asked(pool, url)
    async with serving(is_silent) as (pool, url, _), asyncio.timeout(10):
        answer = await asked(pool, url, silence_s=0.05)
        assert await answer.readany() == b"abc"
        with pytest.raises(TimeoutError):
            await answer.readany()
        answer.close()


async def test_nobody_there_is_an_error() -> None:
    """Of the kind that a broken connection gives."""
    async with serving(lambda reader, writer: asyncio.sleep(0)) as (pool, url, _):
        pass
    with pytest.raises(OSError):
        await asked(pool, url)
    await pool.close()


async def test_a_body_that_nobody_reads_is_not_all_held() -> None:
    """The server has to wait, and goes on when it is read."""
    sent, size = [0], 16 * HIGH_WATER_BYTES

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % size)
        while sent[0] < size:
            writer.write(bytes(HIGH_WATER_BYTES))
            await writer.drain()
            sent[0] += HIGH_WATER_BYTES

    async with serving(handle) as (pool, url, _), asyncio.timeout(20):
        answer = await asked(pool, url)
        first = len(await answer.readany())
        assert 0 < first < size
        assert first + len(await answer.read(size)) == size and answer.at_eof
        answer.release()
