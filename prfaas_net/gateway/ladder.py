"""What a gateway does when an attempt at a request fails: the rungs, and when they end.

1. Another prefill node computes the prompt; the decode node reserves anew, and whole blocks of rows that had landed
   there are not sent again (:mod:`prfaas_net.nodes.landed`).
2. The decode cluster's own prefill node does.
3. Another decode node takes over. What the client has of the answer becomes part of the prompt, and the next token
   comes from there: a draw depends on (seed, position) alone. Where the sampling counts how often the answer has a
   token, the prompt is run as it was instead, and the tokens that the client has are generated once more, compared,
   and not sent twice.
4. The error of the last attempt.

A node that has failed a request does not get it again. A node that has no room is asked again later: requests wait for
room in bounded number and for bounded time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from prfaas_net.cache.manager import Match
from prfaas_net.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    InvalidRequest,
    PrfaasError,
    RefusedError,
    UsageError,
)
from prfaas_net.gateway.attempt import Attempt, Side
from prfaas_net.gateway.record import Fallback, RequestRecord
from prfaas_net.gateway.services import Services, ServingRequest
from prfaas_net.scheduling import Decision, Role

__all__ = ["Ladder", "WaitingRoom", "rest_of"]

# Nodes that may fail one request: a prompt that breaks whoever runs it must not break a whole fleet.
MAX_FAILURES = 4
# Requests that wait for room at once, and how long one does, in seconds: about the time of some long prefills.
MAX_WAITING, MAX_WAIT_S = 1024, 30.0
# Pauses between two questions for room; the first about the time of a few decode steps.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
# These say something of the request, or of its time: no other node would say anything else.
FINAL = (InvalidRequest, RefusedError, DeadlineError, ConfigError, UsageError)


class WaitingRoom:
    """Where requests wait until a node has room, the oldest first."""

    def __init__(self, places: int = MAX_WAITING) -> None:
        self._places = places
        self._waiting: deque[asyncio.Event] = deque()

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self._places

    async def wait(self, pause_s: float) -> None:
        """Until something has been given back, or ``pause_s`` has passed."""
        called = asyncio.Event()
        self._waiting.append(called)
        try:
            async with asyncio.timeout(pause_s):
                await called.wait()
        except TimeoutError:
            pass
        finally:
            if called in self._waiting:
                self._waiting.remove(called)

    def freed(self) -> None:
        """Something was given back: whoever waits longest may ask again."""
        if self._waiting:
            self._waiting.popleft().set()


def rest_of(request: ServingRequest, answered: Sequence[int]) -> tuple[ServingRequest, bool]:
    """What is left of a request whose client has ``answered``, and whether that is part of its prompt now."""
    sampling = request.sampling
    if not answered or request.must_repeat:
        return request, False
    left = replace(
        sampling,
        max_tokens=sampling.max_tokens - len(answered),
        min_tokens=max(0, sampling.min_tokens - len(answered)),
    )
    return replace(request, token_ids=[*request.token_ids, *answered], sampling=left), True


class Ladder:
    """One request's way down: which nodes are left, and the story of it."""

    def __init__(self, request: ServingRequest, services: Services, record: RequestRecord, room: WaitingRoom) -> None:
        self._request = request
        self._services = services
        self._record = record
        self._room = room
        self._failures = 0
        self._failed: list[str] = []
        # Attempts whose link broke: nobody knows yet which of its ends is to be avoided.
        self._links: list[Decision] = []
        # Whether the last decision left the receiver of those links, and not the sender.
        self._receiver_left = False
        self._busy: list[str] = []
        self._waited_s = 0.0
        self._pauses = 0
        self._last: tuple[Decision, PrfaasError, Side] | None = None

    @property
    def no_room(self) -> BusyError | None:
        """Why the request has got nowhere, if it was for want of room."""
        error = self._last[1] if self._last else None
        return error if isinstance(error, BusyError) and "prefill_started" not in self._record.stages_s else None

    def give_up(self, attempt: Attempt, error: PrfaasError) -> None:
        """An attempt has failed.

        Raises:
            PrfaasError: ``error``, if nobody else would do better.
        """
        side, decision = attempt.side, attempt.decision
        if side is None or isinstance(error, FINAL):
            raise error
        self._last = (decision, error, side)
        node = decision.decode_node if side is Side.DECODE else decision.prefill_node
        if isinstance(error, BusyError):
            self._busy.append(node)
            return
        if side is Side.LINK:
            self._links.append(decision)
        else:
            self._failed.append(node)
        self._failures += 1
        if self._failures > MAX_FAILURES:
            self._end(f"{self._failures} attempts have failed")

    async def decide(self, request: ServingRequest, cached: Match) -> Decision:
        """Where to go (on), after waiting for room if need be.

        Raises:
            PrfaasError: nowhere: the last failure, or else the router's reason.
        """
        while True:
            try:
                return self._ask(request, cached)
            except (BusyError, RefusedError) as nobody:
                if self._last is None:
                    raise
                why = nobody.message
            if not self._busy:
                self._end(why)
            await self._wait()
            self._busy.clear()

    def step(self, decision: Decision, *, answered_tokens: int, resumed: bool) -> None:
        """Another attempt begins: tell the story of it."""
        if self._last is None:
            return
        before, error, side = self._last
        local = decision.prefill_cluster == decision.decode_cluster
        if isinstance(error, BusyError):
            rung = "no_room"
        elif side is Side.DECODE or self._receiver_left:
            rung = "decode_node"
        elif local and before.prefill_cluster != before.decode_cluster:
            rung = "local_prefill"
        else:
            rung = "prefill_node"
        self._tell(rung, decision, answered_tokens, resumed=resumed)
        self._record.reasons.append(f"fallback to {rung}: {side.value} failed: {error.line()}")

    def _ask(self, request: ServingRequest, cached: Match) -> Decision:
        """Ask the router without the nodes that failed."""
        *better, last = self._exclusions()
        self._receiver_left = False
        for excluded in better:
            try:
                return self._services.decide(request, cached, excluded, again=True)
            except (BusyError, RefusedError):
                continue
        self._receiver_left = bool(better)
        return self._services.decide(request, cached, last, again=self._last is not None)

    def _exclusions(self) -> list[tuple[str, ...]]:
        """What to leave out, best first: where a link broke, whatever is behind it, its near end, its far end."""
        certain = (*self._failed, *self._busy)
        if not self._links:
            return [certain]
        clusters = {link.prefill_cluster for link in self._links if link.prefill_cluster != link.decode_cluster}
        prefillers = self._services.router.state.up(Role.PREFILL)
        senders = tuple(link.prefill_node for link in self._links)
        behind = (node.node_id for node in prefillers if node.cluster in clusters)
        receivers = tuple(link.decode_node for link in self._links)
        return [(*certain, *senders, *behind), certain + senders, certain + receivers]

    async def _wait(self) -> None:
        pause_s = min(FIRST_PAUSE_S * 2**self._pauses, LONGEST_PAUSE_S)
        loop = asyncio.get_running_loop()
        left_s = min(MAX_WAIT_S - self._waited_s, self._request.deadline_at - loop.time())
        if pause_s >= left_s:
            self._end(f"it has waited {self._waited_s:.1f} s for room")
        if self._room.is_full:
            self._end("too many requests wait for room")
        started = loop.time()
        await self._room.wait(pause_s)
        self._waited_s += loop.time() - started
        self._pauses += 1

    def _end(self, why: str) -> None:
        """The last rung.

        Raises:
            PrfaasError: the failure of the last attempt.
        """
        assert self._last is not None
        _, error, _ = self._last
        self._record.reasons.append(f"no further attempt: {why}")
        self._tell("error", None, self._record.output_tokens)
        raise error

    def _tell(self, rung: str, decision: Decision | None, answered_tokens: int, *, resumed: bool = False) -> None:
        assert self._last is not None
        before, error, side = self._last
        at_s = self._services.clock.now() - self._request.arrived_s
        node = before.decode_node if side is Side.DECODE else before.prefill_node
        stages_s = self._record.begin_again() if decision is not None else {}
        self._record.note_fallback(
            Fallback(
                rung,
                round(at_s, 6),
                f"{side.value} {node}" if side is not Side.LINK else f"link from {node}",
                error.line(),
                decision.prefill_node if decision else None,
                decision.decode_node if decision else None,
                answered_tokens,
                resumed,
                stages_s=stages_s,
            )
        )
