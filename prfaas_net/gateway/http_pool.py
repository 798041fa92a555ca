"""HTTP to nodes: connections that stay open, and answers that are read as they come."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import aiohttp
from yarl import URL

__all__ = ["HttpAnswer", "HttpPool"]

# The end of an answer comes a moment after its last event; its connection is kept if it comes within this.
DRAIN_S = 1.0
_SKIPPED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent")


@contextmanager
def _os_errors() -> Iterator[None]:
    """Whatever goes wrong on the way is an OSError."""
    try:
        yield
    except (aiohttp.ClientError, RuntimeError) as error:  # RuntimeError: the pool was closed meanwhile
        if isinstance(error, OSError):
            raise
        raise ConnectionError(str(error) or type(error).__name__) from error


class HttpAnswer:
    """A status, and a body that is read as it comes. To be released or closed."""

    def __init__(self, response: aiohttp.ClientResponse, pool: HttpPool) -> None:
        self.status = response.status
        self._response = response
        self._pool = pool

    async def readany(self) -> bytes:
        """What has come of the body, at least one byte; nothing when all of it was read.

        Raises:
            OSError: the connection broke, or was silent for too long.
        """
        with _os_errors():
            return await self._response.content.readany()

    async def read(self, limit_bytes: int) -> bytes:
        """The body to its end, or its first so many bytes.

        Raises:
            OSError: the connection broke, or was silent for too long.
        """
        parts, size = [], 0
        while size < limit_bytes and (part := await self.readany()):
            parts.append(part)
            size += len(part)
        return b"".join(parts)[:limit_bytes]

    def release(self) -> None:
        """Nothing that is still to come matters: the connection is used again as soon as the answer has ended."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._pool.drain(self._response)

    def close(self) -> None:
        """Break the connection: the other side sees that nobody listens."""
        self._response.close()


class HttpPool:
    """Connections to any number of servers. To be closed.

    Args:
        tls: for addresses that begin with ``https``; True: by the authorities that this host trusts.
    """

    def __init__(self, tls: ssl.SSLContext | bool = True) -> None:
        self._session = aiohttp.ClientSession(
            # How many calls are open is the router's business, not the connection pool's.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED_HEADERS,
        )
        self._urls: dict[tuple[str, str], URL] = {}
        self._timeouts: dict[tuple[float, float | None], aiohttp.ClientTimeout] = {}
        self._drains: set[asyncio.Task[None]] = set()

    async def request(
        self,
        method: str,
        base_url: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        connect_timeout_s: float,
        silence_s: float | None = None,
    ) -> HttpAnswer:
        """Send a request; the answer when its head has come.

        Args:
            silence_s: reading gives up when nothing comes for so long.

        Raises:
            OSError: the server cannot be reached, or what it says is not HTTP.
        """
        url = self._urls.get((base_url, path))
        if url is None:
            url = self._urls[base_url, path] = URL(base_url.rstrip("/") + path)
        timeout = self._timeouts.get((connect_timeout_s, silence_s))
        if timeout is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=silence_s)
            self._timeouts[connect_timeout_s, silence_s] = timeout
        with _os_errors():
            response = await self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            )
        return HttpAnswer(response, self)

    def drain(self, response: aiohttp.ClientResponse) -> None:
        """Read what is left of an answer, and keep its connection; if that does not come soon, break it."""
        task = asyncio.create_task(self._drain(response))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        # Cancelled before its first step, the task could not do it.
        task.add_done_callback(lambda _: response.close())

    @staticmethod
    async def _drain(response: aiohttp.ClientResponse) -> None:
        try:
            with _os_errors():
                async with asyncio.timeout(DRAIN_S):
                    while await response.content.readany():
                        pass
        except OSError:
            return
        response.release()

    async def close(self) -> None:
        """Break every connection."""
        for task in tuple(self._drains):
            task.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)
        await self._session.close()
