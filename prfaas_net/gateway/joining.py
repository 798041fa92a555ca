"""Nodes that join by themselves: with a token, for as long as they say so.

A node is taken in once the gateway itself has reached it and it is what it said. It stays while it renews its lease.
One that says that it leaves gets nothing new and ends what it has; one that says nothing is gone when its lease is
over (by a third of a lease, at most), and what it had goes on elsewhere. (That it takes no work is noticed sooner, as
of every node, by asking it.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import orjson
from aiohttp import web
from pydantic import ValidationError

from prfaas_net.clock import Clock
from prfaas_net.errors import PrfaasError
from prfaas_net.gateway.api_errors import ApiError
from prfaas_net.gateway.config import JoinSection
from prfaas_net.gateway.fleet import Fleet, WatchedNode
from prfaas_net.gateway.keys import KeyHash
from prfaas_net.nodes.join_messages import JOIN_PATH, LEAVE_PATH, JoinAnswer, JoinCall, LeaveCall
from prfaas_net.nodes.messages import Message

__all__ = ["JoinDesk"]

log = logging.getLogger(__name__)

MAX_CALL_BYTES = 4 << 10
CALL_WITHIN_S = 5.0
# Wrong tokens that are looked at, by the second and at once; more are turned away unread.
WRONG_PER_S, WRONG_AT_ONCE = 5.0, 20.0
# Nodes that are asked at a time whether they are what they say.
ASKED_AT_ONCE = 8
# A node renews so many times within a lease.
RENEWALS = 3

_Call = TypeVar("_Call", JoinCall, LeaveCall)


class _WrongTokens:
    """A bucket that wrong tokens empty and time fills."""

    def __init__(self) -> None:
        self._left = WRONG_AT_ONCE
        self._at_s = 0.0

    def spend(self, now: float) -> bool:
        """Whether one more may be looked at."""
        self._left = min(WRONG_AT_ONCE, self._left + (now - self._at_s) * WRONG_PER_S)
        self._at_s = now
        self._left -= min(1.0, self._left)
        return self._left > 0.0


class JoinDesk:
    """Takes nodes in, and lets them go.

    Args:
        settings: None: nobody may join.

    Attributes:
        settings: may be replaced.
        on_outcome: told how every call ended, in one word.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: JoinSection | None,
        clock: Clock,
        on_outcome: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self.settings = settings
        self.on_outcome = on_outcome
        self._fleet = fleet
        self._clock = clock
        # By the address: until when, and whose process it is.
        self._leases: dict[str, tuple[float, JoinCall]] = {}
        self._wrong = _WrongTokens()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._reaper: asyncio.Task[None] | None = None

    def routes(self) -> list[web.RouteDef]:
        """For :meth:`aiohttp.web.Application.add_routes`."""
        return [web.post(JOIN_PATH, self.join), web.post(LEAVE_PATH, self.leave)]

    @property
    def joined(self) -> Counter[str]:
        """How many nodes of each role hold a lease."""
        return Counter(call.role for _, call in self._leases.values())

    def start(self) -> None:
        """Begin to look for leases that are over."""
        self._reaper = asyncio.create_task(self._reap(), name="leases")

    async def stop(self) -> None:
        """Stop; nodes that had joined are not told."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        self._leases.clear()

    async def join(self, request: web.Request) -> web.Response:
        """``POST /v1/fleet/join``.

        Raises:
            ApiError: the token is wrong, the call makes no sense, or the node is not what it says.
        """
        settings = self._admit(request)
        call = await self._read(request, JoinCall)
        known = self._leases.get(call.url)
        if known is None or known[1] != call:
            await self._take_in(call, settings)
        self._leases[call.url] = (self._clock.now() + settings.lease, call)
        self.on_outcome("joined" if known is None else "renewed")
        return _json(JoinAnswer(lease_s=settings.lease, renew_s=settings.lease / RENEWALS))

    async def leave(self, request: web.Request) -> web.Response:
        """``POST /v1/fleet/leave``. One that is not known has left already.

        Raises:
            ApiError: the token is wrong, or the call makes no sense.
        """
        self._admit(request)
        call = await self._read(request, LeaveCall)
        known = self._leases.get(call.url)
        if known is not None and known[1].boot_id == call.boot_id:
            log.info("node %s leaves", known[1].node_id)
            await self._let_go(call.url)
            self.on_outcome("left")
        return _json(call)

    def _admit(self, request: web.Request) -> JoinSection:
        settings = self.settings
        if settings is None:
            raise ApiError(
                "nodes do not join this gateway by themselves",
                status=403,
                api_code="joining_is_off",
                do="set join.token_hash on it: prfaas key new --join",
            )
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # The comparison takes the same time for every wrong token (KeyHash.matches).
        if scheme.lower() == "bearer" and KeyHash.parse(settings.token_hash).matches(token.strip().encode()):
            return settings
        self.on_outcome("refused")
        if not self._wrong.spend(self._clock.now()):
            raise ApiError("too many wrong tokens", status=429, api_code="too_many_requests", do="try again later")
        raise ApiError(
            "the join token is missing or wrong", status=401, api_code="invalid_token", do="set join.token on the node"
        )

    async def _read(self, request: web.Request, kind: type[_Call]) -> _Call:
        if (request.content_length or 0) > MAX_CALL_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(CALL_WITHIN_S):
                raw = bytearray()
                while part := await request.content.readany():
                    raw += part
                    if len(raw) > MAX_CALL_BYTES:
                        raise _too_large()
            return kind.model_validate(orjson.loads(raw))
        except TimeoutError as error:
            raise ApiError("the call took too long to arrive", status=408, api_code="body_timeout") from error
        except orjson.JSONDecodeError as error:
            raise ApiError("the call is not valid JSON", found=str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "body"
            raise ApiError(first["msg"].removeprefix("Value error, "), param=place) from error

    async def _take_in(self, call: JoinCall, settings: JoinSection) -> None:
        """Reach the node, and see whether it is what it says.

        Raises:
            ApiError: it is not, or there is no place for one more.
        """
        for url, (_, other) in list(self._leases.items()):
            if other.node_id == call.node_id and other.boot_id != call.boot_id:
                await self._let_go(url)  # what it was before it restarted
        if call.url not in self._leases and len(self._leases) >= settings.max_nodes:
            bound = f"at most {settings.max_nodes} (join.max_nodes)"
            raise ApiError("no more nodes may join", status=429, api_code="too_many_nodes", expected=bound)
        async with self._asking:
            node = self._fleet.find_url(call.url)
            if node is None:
                node = await self._fleet.add(call.url)
            else:
                await self._fleet.poll(node)
        problem = _problem(node, call)
        if problem is not None:
            self.on_outcome("refused")
            log.warning("node %s at %s may not join: %s", call.node_id, call.url, problem)
            if node.joined:
                self._leases.pop(call.url, None)
                await self._fleet.remove(node)
            raise ApiError(f"the node may not join: {problem}", status=409, api_code="not_admitted")
        log.info("%s node %s of cluster %s joins", call.role, call.node_id, call.cluster)

    async def _let_go(self, url: str, *, silent: bool = False) -> None:
        self._leases.pop(url, None)
        node = self._fleet.find_url(url)
        if node is not None and node.joined:
            await self._fleet.remove(node, silent=silent)

    async def _reap(self) -> None:
        while True:
            lease_s = 1.0 if self.settings is None else self.settings.lease
            await asyncio.sleep(lease_s / RENEWALS)
            now = self._clock.now()
            for url, (until_s, call) in list(self._leases.items()):
                if until_s <= now or self.settings is None:
                    log.warning("node %s has not renewed its lease and is gone", call.node_id)
                    self.on_outcome("expired")
                    try:
                        await self._let_go(url, silent=True)
                    except PrfaasError as error:
                        log.warning("node %s: %s", call.node_id, error.line())


def _too_large() -> ApiError:
    return ApiError("the call is too large", status=413, expected=f"at most {MAX_CALL_BYTES} bytes")


def _problem(node: WatchedNode, call: JoinCall) -> str | None:
    """Why a node is not what it said; None if it is."""
    info = node.info
    if info is None or not node.up:
        return node.problem or "it does not answer"
    for what in ("node_id", "boot_id", "role", "cluster"):
        said, found = getattr(call, what), getattr(info, what)
        if said != found:
            return f"{what}: said {said!r}, found {found!r} at {call.url}"
    return None


def _json(body: Message) -> web.Response:
    return web.Response(body=body.model_dump_json(), content_type="application/json")
