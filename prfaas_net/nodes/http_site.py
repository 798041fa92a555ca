"""Where a daemon's HTTP listens: TLS, and what a client may send before it is known who it is.

aiohttp closes a connection whose headers have not come in ``header_timeout_s``, counted from when it was opened or last
answered; here this bound is short, what breaks the others is answered in the daemon's own shape, and no byte of it is
logged: a header that is too long may be a key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from prfaas_net.errors import ConfigError

__all__ = ["HttpLimits", "listen"]

log = logging.getLogger(__name__)

# Clients send about ten; proxies add some.
MAX_HEADERS = 100
# What is left of a body that was refused is read for so long, so that the client sees the answer and not a reset.
LINGER_S = 2.0

# Makes an answer of a status and one line.
Refusal = Callable[[int, str], web.Response]


@dataclass(frozen=True)
class HttpLimits:
    """What a client may send before its request is looked at.

    Attributes:
        max_header_bytes: of one header, or of the request line.
        header_timeout_s: from opening the connection, or from the last answer, to the end of the next headers.
    """

    max_header_bytes: int = 8190
    header_timeout_s: float = 75.0


class _Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_refusal",)

    def __init__(self, manager: web.Server, refusal: Refusal, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._refusal = refusal

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        too_large = isinstance(exc, LineTooLong) or "Too many headers" in str(exc)
        status, line = (431, "the headers are too large") if too_large else (400, "this is not HTTP")
        log.info("a client was refused: %d, %s", status, line)
        response = self._refusal(status, line)
        response.force_close()
        return response


class _Site(web.BaseSite):
    """Listens with :class:`_Connection` in place of aiohttp's own."""

    def __init__(
        self, runner: web.AppRunner, address: tuple[str, int], tls: ssl.SSLContext | None, make: Callable[[], Any]
    ) -> None:
        super().__init__(runner, ssl_context=tls)
        self._address = address
        self._make = make

    @property
    def name(self) -> str:
        return "{}:{}".format(*self._address)

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._make, *self._address, ssl=self._ssl_context, backlog=self._backlog
        )


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    *,
    refusal: Refusal,
    limits: HttpLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Open the port of a runner that was set up.

    Raises:
        ConfigError: the address is taken, or not ours.
    """
    limits = limits or HttpLimits()
    server = runner.server
    assert isinstance(server, web.Server)
    settings = {
        "max_line_size": limits.max_header_bytes,
        "max_field_size": limits.max_header_bytes,
        "max_headers": MAX_HEADERS,
        "keepalive_timeout": limits.header_timeout_s,
        "lingering_time": LINGER_S,
        "access_log": None,
    }
    loop = asyncio.get_running_loop()
    try:
        await _Site(runner, (host, port), tls, lambda: _Connection(server, refusal, loop=loop, **settings)).start()
    except OSError as error:
        busy = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"port in use: cannot listen on {host}:{port}" if busy else f"cannot listen on {host}:{port}",
            found=error.strerror or str(error),
            do="stop what uses it, or choose another port" if busy else "choose an address of this host",
        ) from error
