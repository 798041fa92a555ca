"""What surrounds every HTTP request: its id, the key it must carry, the shape of its failure, and the count of it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from prfaas_net.errors import InternalError, PrfaasError
from prfaas_net.gateway.api_errors import ApiError, error_response
from prfaas_net.gateway.instruments import GatewayMetrics
from prfaas_net.gateway.keys import Key, KeyRing
from prfaas_net.logs import about
from prfaas_net.nodes.join_messages import JOIN_PATH, LEAVE_PATH

__all__ = ["CLIENT_GONE", "Handler", "Surroundings", "client_id", "client_key", "internal_id", "set_outcome"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

# nginx's status for a client that closed the connection; never sent, only counted.
CLIENT_GONE = 499
# What costs work or tells of the fleet. Probes, metrics and the dashboard's page (which holds no data) are open.
_GUARDED = ("/v1/", "/tokenize")
# Nodes that join carry a token of their own.
_OWN_KEY = (JOIN_PATH, LEAVE_PATH)
# Printable ASCII without spaces, so that an id is one word in every log.
_REQUEST_ID = re.compile(r"[!-~]{1,100}")


@dataclass
class _Exchange:
    """The request that this task answers.

    Attributes:
        given: whether its id came from the client.
        outcome: the status to count, where it is not the one that was sent.
        key: that it carries, where one is asked for.
    """

    request_id: str
    given: bool
    outcome: int | None = None
    key: Key | None = None


_exchange: ContextVar[_Exchange] = ContextVar("exchange")


def client_id() -> str:
    """The id that the client knows this request by."""
    return _exchange.get().request_id


def client_key() -> Key | None:
    """Whose request this is; None where no key is asked for."""
    return _exchange.get().key


def internal_id() -> str:
    """The id that nodes see: unique even if clients reuse theirs, and still found by searching for theirs."""
    own = _exchange.get()
    return f"{own.request_id}-{uuid.uuid4().hex[:8]}" if own.given else own.request_id


def set_outcome(status: int) -> None:
    """Count this status instead of the one that was sent before it went wrong."""
    _exchange.get().outcome = status


class Surroundings:
    """The middleware, in one.

    Args:
        keys: one of which every request for work or data must carry; none: no key is asked for. May be replaced.
    """

    def __init__(self, instruments: GatewayMetrics, keys: KeyRing) -> None:
        self._instruments = instruments
        self.keys = keys

    async def echo_id(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: every answer carries the id."""
        exchange = _exchange.get(None)
        if exchange is not None:
            response.headers["X-Request-ID"] = exchange.request_id

    @property
    def middleware(self) -> Middleware:
        """For :class:`aiohttp.web.Application`."""

        @web.middleware
        async def surround(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._handle(request, handler)

        return surround

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-ID", "")
        fits = _REQUEST_ID.fullmatch(given) is not None
        exchange = _Exchange(given if fits else uuid.uuid4().hex, fits)
        _exchange.set(exchange)
        started_s = time.monotonic()
        status = CLIENT_GONE
        try:
            with about(request_id=exchange.request_id):
                response = await self._answer(request, handler, exchange)
            status = exchange.outcome or response.status
            return response
        except asyncio.CancelledError:
            with about(request_id=exchange.request_id):
                log.info("the client left")
            raise
        finally:
            resource = request.match_info.route.resource
            # Only known routes become labels: a scanner must not fill the registry.
            route = resource.canonical if resource is not None else "unmatched"
            self._instruments.requests.labels(route, str(status)).inc()
            self._instruments.duration.labels(route).observe(time.monotonic() - started_s)

    async def _answer(self, request: web.Request, handler: Handler, exchange: _Exchange) -> web.StreamResponse:
        try:
            exchange.key = self._find_key(request)
            return await handler(request)
        except PrfaasError as error:
            failure = error
        except web.HTTPException as error:
            failure = _from_http(request, error)
        except ConnectionResetError:
            # The client is gone; what is returned here reaches nobody.
            exchange.outcome = CLIENT_GONE
            return web.Response(status=CLIENT_GONE)
        except Exception as error:
            log.exception("a bug")
            failure = InternalError(
                "the gateway failed", found=type(error).__name__, do="see its log", request=exchange.request_id
            )
        response = error_response(failure)
        log.info("%d %s", response.status, failure.line())
        return response

    def _find_key(self, request: web.Request) -> Key | None:
        if not self.keys or not request.path.startswith(_GUARDED) or request.path in _OWN_KEY:
            return None
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self.keys.find(key.strip())
        if scheme.lower() != "bearer" or found is None:
            raise ApiError(
                "the API key is missing or wrong",
                status=401,
                api_code="invalid_api_key",
                do="send Authorization: Bearer KEY",
            )
        return found


def _from_http(request: web.Request, error: web.HTTPException) -> PrfaasError:
    """aiohttp's own refusals, in our shape."""
    if isinstance(error, web.HTTPNotFound):
        return ApiError(f"no such path: {request.path[:200]}", status=404, api_code="not_found")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return ApiError(
            f"{request.path[:200]} does not take {request.method}",
            status=405,
            api_code="method_not_allowed",
            expected=", ".join(sorted(error.allowed_methods)),
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError("the body is too large", status=413, api_code="body_too_large", do="send a shorter prompt")
    return ApiError(error.reason, status=error.status, api_code="http_error")
