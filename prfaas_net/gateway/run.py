"""One request being served: attempts, one after the other, that make one answer."""

from __future__ import annotations

import asyncio
import logging

from prfaas_net.errors import BusyError, PrfaasError, ProtocolError
from prfaas_net.gateway.attempt import Attempt
from prfaas_net.gateway.engines.choice import begin
from prfaas_net.gateway.ladder import Ladder, WaitingRoom, rest_of
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.services import Finish, Services, ServingRequest, Token
from prfaas_net.gateway.traces import begin_attempt
from prfaas_net.logs import about
from prfaas_net.scheduling import RequestEnded

__all__ = ["Finish", "Run", "Services", "ServingRequest", "Token"]

log = logging.getLogger(__name__)


class Run:
    """A request being served. Made by the lifecycle; read by one task with :meth:`next`.

    Attributes:
        failure: why the run was ended from outside.
    """

    def __init__(self, request: ServingRequest, services: Services, record: RequestRecord, room: WaitingRoom) -> None:
        self.request = request
        self.record = record
        self.failure: PrfaasError | None = None
        self._services = services
        self._room = room
        self._ladder = Ladder(request, services, record, room)
        self._scope: asyncio.Timeout | None = None
        self._attempt: Attempt | None = None
        # What the client has of the answer, and why its last token was the last one.
        self._answered: list[int] = []
        self._reason: str | None = None
        # Tokens of the attempt that the client had before it.
        self._repeated = 0

    def enter(self, scope: asyncio.Timeout) -> None:
        """The scope that ends with this run, or ends it."""
        self._scope = scope

    @property
    def next_is_here(self) -> bool:
        """Whether :meth:`next` would return what has come already, and not wait or fail."""
        return self._attempt is not None and self._attempt.next_is_here

    @property
    def finish_is_here(self) -> bool:
        """Whether :meth:`next` would return a :class:`Finish` without waiting."""
        return self._attempt is not None and self._attempt.finish_is_here

    @property
    def no_room(self) -> PrfaasError | None:
        """Why no node has begun with it, if none had room."""
        return self._ladder.no_room

    async def start(self) -> None:
        """Decide, reserve on a decode node, start the prefill; elsewhere if that fails.

        Raises:
            PrfaasError: there is no way to serve it.
        """
        services = self._services
        while self._attempt is None:
            begin_attempt(self.record)
            rest, resumed = rest_of(self.request, self._answered)
            keys = await services.desk.caches.keys_of(rest.token_ids, rest.cache_salt)
            cached = services.cached_on(rest, keys)
            decision = await self._ladder.decide(rest, cached)
            self._ladder.step(decision, answered_tokens=len(self._answered), resumed=resumed)
            services.desk.used(keys, cached, decision, private=bool(rest.cache_salt))
            attempt = self._attempt = begin(rest, decision, keys, services, self.record, resumed=resumed)
            if not resumed:
                self.record.cached_in = {name: held.usable_tokens for name, held in cached.by_cluster().items()}
                self.record.note_decision(decision)
            attempt.reached("decided")
            self._repeated = 0 if resumed else len(self._answered)
            if decision.copy_from is not None and services.moves is not None:
                left_s = (self.request.deadline_at - asyncio.get_running_loop().time()) / 2
                self.record.reasons.append(await services.moves.before(decision, keys, cached, within_s=left_s))
                attempt.reached("copied")
            try:
                await attempt.start()
            except PrfaasError as error:
                await self._leave(attempt, error)

    async def next(self) -> Token | Finish:
        """The next token, or the end of the answer.

        Raises:
            PrfaasError: the request failed; all calls are closed when the scope of the run ends.
        """
        while True:
            attempt = self._attempt
            assert attempt is not None
            try:
                event = await attempt.next()
            except PrfaasError as error:
                if self._answer_is_whole:
                    return self._finish(self._reason or "length")
                await self._leave(attempt, error)
                await self.start()
                continue
            if isinstance(event, Finish):
                if event.output_tokens <= self._repeated and not self._answer_is_whole:
                    raise self._other_answer(event.reason)
                return self._finish(event.reason)
            if event.index >= self._repeated:
                return self._token(event)
            if event.token != self._answered[event.index]:
                raise self._other_answer(event.token)

    async def settle(self, wait_s: float) -> None:
        """After the last token: wait for the transfer's report, so that the record is whole."""
        if self._attempt is not None:
            await self._attempt.settle(wait_s)

    def stop(self) -> None:
        """No more tokens are wanted: both nodes stop at once."""
        if self._attempt is not None:
            self._attempt.stop()

    def abort(self, error: PrfaasError) -> None:
        """End the run with this error, whatever it is waiting for. The first error counts."""
        if self._scope is not None and self.failure is None and not self._scope.expired():
            self.failure = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    def lost(self, node_id: str, error: PrfaasError) -> None:
        """A node has forgotten the calls that it had."""
        if self._attempt is not None:
            self._attempt.lost(node_id, error)

    async def close(self) -> None:
        """Close all calls. Safe at any time, in any state."""
        self._scope = None
        if self._attempt is not None:
            await self._attempt.close()
            self._room.freed()

    @property
    def _answer_is_whole(self) -> bool:
        return self._reason is not None or len(self._answered) >= self.request.sampling.max_tokens

    async def _leave(self, attempt: Attempt, error: PrfaasError) -> None:
        """Let go of an attempt that failed; the request's own error if there is to be no other."""
        await attempt.close()
        self._services.observe(RequestEnded(self.request.request_id))
        self._ladder.give_up(attempt, error)
        level = logging.INFO if isinstance(error, BusyError) else logging.WARNING
        with about(request_id=self.request.request_id):
            log.log(level, "an attempt failed: %s", error.line())
        self._attempt = None

    def _token(self, event: Token) -> Token:
        index = len(self._answered)
        self._answered.append(event.token)
        self._reason = event.finish
        if index == 0:
            self.record.reached("first_token", self._services.clock.now() - self.request.arrived_s)
            self.record.ttft_s = self.record.stages_s["first_token"]
        self.record.output_tokens = index + 1
        return Token(event.token, index, event.finish, event.logprobs)

    def _finish(self, reason: str) -> Finish:
        self.record.finish_reason = reason
        self.record.reached("finished", self._services.clock.now() - self.request.arrived_s)
        return Finish(reason, len(self._answered))

    def _other_answer(self, found: object) -> ProtocolError:
        return ProtocolError(
            "the answer could not be taken up elsewhere: it comes out differently there",
            expected="the tokens that were sent already",
            found=found,
            do="run the same checkpoint and precision on all nodes",
        )
