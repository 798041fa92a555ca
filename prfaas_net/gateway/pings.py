"""Signs of life on a stream that has to wait for its first token."""

from __future__ import annotations

import asyncio

from aiohttp import web

__all__ = ["PING", "Pings"]

# A comment of server-sent events: clients skip it, and load balancers see that the connection is in use.
PING = b": ping\n\n"
# Well below the 60 s after which nginx and most load balancers give a silent connection up.
PING_INTERVAL_S = 10.0


class Pings:
    """Writes comments until the first token comes. Use as an async context manager around the wait.

    A stream that waits less than one interval sees nothing of it: its headers leave with the first token, or with the
    status of what failed. After the first ping they have left, and a failure is an event of the stream.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pings:
        self._task = asyncio.create_task(self._run(), name="pings")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._over.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        """No ping comes after this; one that is being written is finished, so that the stream can go on.

        Raises:
            ConnectionResetError: the client has left.
        """
        task, self._task = self._task, None
        if task is not None:
            self._over.set()
            await task

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PING_INTERVAL_S):
                    await self._over.wait()
                return
            except TimeoutError:
                pass
            if not self._response.prepared:
                await self._response.prepare(self._request)
            await self._response.write(PING)
