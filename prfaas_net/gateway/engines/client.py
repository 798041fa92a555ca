"""Calls to one vLLM or SGLang server over the gateway's HTTP session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import orjson

from prfaas_net.errors import LinkError, ProtocolError
from prfaas_net.gateway.calls import CONNECT_TIMEOUT_S
from prfaas_net.gateway.engines.dialect import Call
from prfaas_net.gateway.engines.refusals import refusal, told
from prfaas_net.gateway.engines.stream import EngineStream, body_of, reaching
from prfaas_net.gateway.traces import trace_headers

__all__ = ["EngineClient"]

log = logging.getLogger(__name__)

MAX_ERROR_BYTES = 64 << 10
# kv_transfer_params with the block ids of a million tokens.
MAX_ANSWER_BYTES = 16 << 20
# A cancelling call is a few bytes to a server that is there.
CANCEL_TIMEOUT_S = 2.0


class EngineClient:
    """Calls, and hangs up.

    Args:
        name: of the server, in errors.
        key: bearer token that it asks for; empty: none.

    Attributes:
        on_unreachable: told the name when a call breaks.
    """

    def __init__(self, url: str, name: str, key: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._name = name
        self._session = session
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.on_unreachable: Callable[[str], None] = lambda name: None
        self._cancels: set[asyncio.Task[None]] = set()

    async def get(self, path: str, timeout: aiohttp.ClientTimeout, limit_bytes: int) -> bytes:
        """A body that must come with status 200. That it does not come says nothing about calls.

        Raises:
            LinkError: there was no answer in time.
            PrfaasError: another status.
        """
        with reaching(self._name):
            async with self._session.get(f"{self._url}{path}", headers=self._headers, timeout=timeout) as answer:
                body = await body_of(answer, limit_bytes, self._name)
        if answer.status != 200:
            raise refusal(answer.status, body, self._name)
        return body

    async def stream(self, call: Call, headers: Mapping[str, str], limit_bytes: int) -> EngineStream:
        """Start a call; the stream that comes back owns it.

        Args:
            limit_bytes: of one event.

        Raises:
            LinkError: the server cannot be reached.
            PrfaasError: it refused.
        """
        return EngineStream(await self._post(call, headers), self._name, limit_bytes, self._calling)

    async def ask(self, call: Call, headers: Mapping[str, str]) -> dict[str, Any]:
        """The whole answer to a call. Cancelling closes the connection.

        Raises:
            LinkError: the server cannot be reached, or broke the connection.
            PrfaasError: it refused, or its answer cannot be read.
        """
        response = await self._post(call, headers)
        try:
            with self._calling():
                body = await body_of(response, MAX_ANSWER_BYTES, self._name)
            response.release()
        finally:
            response.close()
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            raise ProtocolError("an engine's answer cannot be read", found=repr(body[:80]), node=self._name)
        if answer.get("error"):
            raise told(answer, 500, self._name)
        return answer

    def cancel(self, call: Call) -> None:
        """Tell the server that nobody waits for this call, if it must be told; not waited for."""
        if call.cancel is not None:
            task = asyncio.create_task(self._tell(*call.cancel), name=f"cancel at {self._name}")
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def close(self) -> None:
        """Wait for what was still to be told; bounded by :data:`CANCEL_TIMEOUT_S`."""
        if self._cancels:
            await asyncio.wait(self._cancels)

    async def _tell(self, path: str, body: dict[str, Any]) -> None:
        timeout = aiohttp.ClientTimeout(total=CANCEL_TIMEOUT_S)
        try:
            url, data = f"{self._url}{path}", orjson.dumps(body)
            async with self._session.post(url, data=data, headers=self._headers, timeout=timeout):
                pass
        except (aiohttp.ClientError, OSError) as error:
            log.info("%s was not told that a request is over: %r", self._name, error)

    async def _post(self, call: Call, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        data = orjson.dumps(call.body)
        with self._calling():
            response = await self._session.post(
                f"{self._url}{call.path}",
                data=data,
                headers={**self._headers, **headers, **trace_headers()},
                timeout=timeout,
            )
            if response.status == 200:
                return response
            try:
                body = await response.content.read(MAX_ERROR_BYTES)
            finally:
                response.close()
        raise refusal(response.status, body, self._name)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        try:
            with reaching(self._name):
                yield
        except LinkError:
            self.on_unreachable(self._name)
            raise
