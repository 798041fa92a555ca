"""A node that makes itself known to gateways, for as long as it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import orjson
from pydantic import SecretStr, ValidationError

from prfaas_net.errors import LinkError, PeerError, PrfaasError
from prfaas_net.nodes.config import JoinSection
from prfaas_net.nodes.join_messages import JOIN_PATH, LEAVE_PATH, JoinAnswer, JoinCall, LeaveCall
from prfaas_net.nodes.messages import Message, NodeInfo

__all__ = ["Joiner"]

log = logging.getLogger(__name__)

# A gateway asks the node back before it answers.
ANSWER_WITHIN_S = 15.0
# A gateway that does not answer, or refuses, is asked again after this.
RETRY_S = 1.0
# Leaving is a courtesy: leases end by themselves.
LEAVE_WITHIN_S = 1.0
MAX_ANSWER_BYTES = 64 << 10


class Joiner:
    """Joins every gateway, renews, and leaves.

    Args:
        info: what the node says of itself, at each time.
        url: of its control port, as gateways can reach it.

    Attributes:
        problems: by gateway, why it has not taken the node in; those that have are left out.
    """

    def __init__(self, settings: JoinSection, info: Callable[[], NodeInfo], url: str) -> None:
        self.problems: dict[str, str] = {}
        self._settings = settings
        self._info = info
        self._url = url
        self._token = settings.token or SecretStr("")
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to join; gateways that are not there yet are asked until they are."""
        headers = {"Authorization": f"Bearer {self._token.get_secret_value()}", "Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(ssl=self._settings.tls.context()),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._tasks = [asyncio.create_task(self._keep(url), name=f"join {url}") for url in self._settings.gateways]

    async def leave(self) -> None:
        """Tell every gateway, and stop joining. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        tasks, self._tasks = self._tasks, []
        if self._session is None:
            return
        call = LeaveCall(url=self._url, boot_id=self._info().boot_id)
        try:
            if tasks:
                said = (self._call(url, LEAVE_PATH, call, LEAVE_WITHIN_S) for url in self._settings.gateways)
                await asyncio.gather(*said, return_exceptions=True)
        finally:
            session, self._session = self._session, None
            await session.close()

    async def _keep(self, gateway: str) -> None:
        while True:
            try:
                wait_s = await self._join(gateway)
                if self.problems.pop(gateway, None) is not None or wait_s is None:
                    log.info("joined %s", gateway)
            except PrfaasError as error:
                if self.problems.get(gateway) != error.line():
                    log.warning("not joined: %s", error.line())
                self.problems[gateway] = error.line()
                wait_s = RETRY_S
            await asyncio.sleep(wait_s)

    async def _join(self, gateway: str) -> float:
        info = self._info()
        call = JoinCall(url=self._url, node_id=info.node_id, boot_id=info.boot_id, role=info.role, cluster=info.cluster)
        answer = await self._call(gateway, JOIN_PATH, call, ANSWER_WITHIN_S)
        try:
            return JoinAnswer.model_validate_json(answer).renew_s
        except ValidationError as error:
            raise PeerError(
                "this is no gateway", found=repr(answer[:80]), do="check join.gateways", node=gateway
            ) from error

    async def _call(self, gateway: str, path: str, call: Message, within_s: float) -> bytes:
        """
        Raises:
            LinkError: the gateway cannot be reached.
            PeerError: it refused.
        """
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.post(f"{gateway}{path}", data=call.model_dump_json()) as it,
            ):
                status, body = it.status, await it.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LinkError(
                "a gateway cannot be reached",
                found=str(error) or type(error).__name__,
                do="check join.gateways",
                at=gateway,
            ) from error
        if status != 200:
            raise PeerError("the gateway refused", found=f"{status}: {_reason(body)}", at=gateway)
        return body


def _reason(body: bytes) -> str:
    """The message of an error's body."""
    try:
        return str(orjson.loads(body)["error"]["message"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
