"""A request on vLLM or SGLang servers: one that serves it end to end, or a pair of them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.gateway.attempt import Attempt, Side
from prfaas_net.gateway.engines.dialect import Call, Chunk
from prfaas_net.gateway.engines.ranks import RANK_HEADER
from prfaas_net.gateway.engines.server import EngineServer
from prfaas_net.gateway.engines.stream import EngineStream
from prfaas_net.gateway.request import Finish, ServingRequest, Token
from prfaas_net.gateway.traces import trace_headers

__all__ = ["EngineAttempt"]

# After its last token an engine says how the request fared, in the same packet or the next.
LAST_WORDS_S = 0.25


class EngineAttempt(Attempt):
    """One call to the decode server, and one to the prefill server where that is another.

    Nothing is reserved before a prompt is computed, which engines do not offer: a decode server without room lets the
    request wait, and the prefill server keeps the KVCache meanwhile.
    """

    _server: EngineServer
    _asked: ServingRequest
    _decode: EngineStream | None = None
    _decode_call: Call | None = None
    _prefill: tuple[EngineServer, Call] | None = None
    _prefill_stream: EngineStream | None = None
    _reason: str | None = None
    _hung_up = False
    _began_s = 0.0

    @property
    def next_is_here(self) -> bool:
        return bool(self._tokens) and self._failure is None

    @property
    def finish_is_here(self) -> bool:
        return self._reason is not None and not self._tokens

    @property
    def _paired(self) -> bool:
        return self.decision.prefill_node != self.decision.decode_node

    async def start(self) -> None:
        """Ask the prefill server, if there is one; the decode server is asked by the first :meth:`next`."""
        self._tokens: deque[Token] = deque()
        self._handed: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        answered = self._record.output_tokens if self.resumed else 0
        self._asked = self._request.with_seed_after(answered)
        self.side = Side.DECODE
        server = self._server = self._find(self.decision.decode_node)
        self.side = Side.PREFILL
        prefill = self._find(self.decision.prefill_node)
        self.side = None
        state = self._services.router.state.nodes.get(prefill.name)
        self._lone = state is not None and len(state.queue) == 1 and not state.foreign_tokens
        self._began_s = self._services.clock.now()
        if not self._paired:
            self._handed.set_result(server.dialect.whole(self._asked, server.model))
            return
        handover = server.dialect.pair(self._asked, prefill.model, prefill.settings, self._remaining_s())
        if handover.decode is not None:
            self._handed.set_result(handover.decode)
        self._prefill = prefill, handover.prefill
        self._follow_prefill(self._read_prefill, lambda error: Side.PREFILL)

    async def next(self) -> Token | Finish:
        while True:
            if self._tokens:
                return self._tokens.popleft()
            if self._reason is not None:
                return await self._finish(self._reason)
            event = await self._unless_aborted(self._read)
            if event is None:
                raise self._unexpected("[DONE]", "a finish reason before the end")
            self._take(self._chunk(event))

    def _hang_up(self) -> None:
        for stream in (self._decode, self._prefill_stream):
            if stream is not None:
                stream.close()
        if self._hung_up:
            return
        self._hung_up = True
        if self._decode_call is not None and not (self._decode is not None and self._decode.ended):
            self._server.calls.cancel(self._decode_call)
        if self._prefill is not None and not (self._prefill_stream is not None and self._prefill_stream.ended):
            server, call = self._prefill
            server.calls.cancel(call)

    # -- who is blamed ------------------------------------------------------------------------------------------------

    def _blame_decode(self, error: PrfaasError) -> Side:
        return Side.LINK if self._handover_failed else Side.DECODE

    def _caused_elsewhere(self, error: PrfaasError) -> bool:
        return self._handover_failed

    @property
    def _handover_failed(self) -> bool:
        """Whether a decode server has told of a failure before its first token: of a load that failed, most likely."""
        told = self._decode is not None and not self._decode.broken
        return self._paired and told and not self._landed

    # -- the decode server --------------------------------------------------------------------------------------------

    def _find(self, node_id: str) -> EngineServer:
        engine = self._services.fleet.find(node_id).engine
        assert engine is not None
        return engine

    def _headers(self, server: EngineServer) -> dict[str, str]:
        """An id that no server has seen, by which people find the request in all logs; its trace; the rank that has its
        prefix."""
        tries = sum(step.times for step in self._record.fallbacks)
        headers = {"X-Request-Id": self._request.request_id + (f"-{tries}" if tries else ""), **trace_headers()}
        events = server.settings.kv_events
        if events is not None and events.dp_ranks > 1:
            rank = self._services.desk.caches.rank_of(server.name, self._keys, len(self._request.token_ids))
            if rank is not None:
                headers[RANK_HEADER] = str(rank)
        return headers

    async def _read(self) -> dict[str, Any] | None:
        """One event of the decode server, which is asked first if it was not yet."""
        if self._decode is None:
            call = self._decode_call = await asyncio.shield(self._handed)
            limit = self._server.dialect.max_line_bytes
            self._decode = await self._server.calls.stream(call, self._headers(self._server), limit)
            if not self._paired:
                self.reached("prefill_started")
        # Until the first token it may compute, or wait in a queue; the watch over nodes notices if it is gone.
        patience_s = self._server.settings.stall_timeout if self._n_tokens else None
        try:
            async with asyncio.timeout(patience_s):
                return await self._decode.next()
        except TimeoutError as error:
            raise LinkError(
                "an engine sends no more tokens",
                expected=f"one within {patience_s:g} s",
                do="see its log; stall_timeout of the node is how long is waited",
                node=self._server.name,
            ) from error

    def _chunk(self, event: dict[str, Any]) -> Chunk:
        self.side = Side.DECODE
        chunk = self._server.dialect.chunk(event, self._asked, self._n_tokens)
        self.side = None
        return chunk

    def _take(self, chunk: Chunk) -> None:
        if chunk.cached_tokens is not None and not self._paired:
            self._found_cached(chunk.cached_tokens)
        if chunk.tokens and not self._landed:
            self._prefilled(chunk.cached_tokens)
            self._note_landed()
        while chunk.tokens:
            token, logprobs = chunk.tokens.popleft()
            finish = None if chunk.tokens else chunk.finish
            self._tokens.append(Token(token, self._n_tokens, finish, logprobs))
            self._n_tokens += 1
        if chunk.finish is not None:
            if not self._n_tokens:
                raise self._unexpected(chunk.finish, "at least one token")
            self._reason = chunk.finish

    async def _finish(self, reason: str) -> Finish:
        """Hear the engine out, shortly: the answer is whole."""
        stream = self._decode
        assert stream is not None
        try:
            async with asyncio.timeout(min(LAST_WORDS_S, self._remaining_s() / 2)):
                while (event := await stream.next()) is not None:
                    cached = self._chunk(event).cached_tokens
                    if cached is not None and not self._paired:
                        self._found_cached(cached)
        except (TimeoutError, PrfaasError):
            pass
        return Finish(reason, self._n_tokens)

    # -- the prefill server -------------------------------------------------------------------------------------------

    async def _read_prefill(self) -> None:
        """Until the prompt is computed, or for streamed calls until the KVCache has left."""
        assert self._prefill is not None
        server, call = self._prefill
        if not call.streamed:
            answer = await server.calls.ask(call, self._headers(server))
            self.reached("prefill_started")
            server.dialect.check(answer, server.name)
            self._prefilled(server.dialect.cached_in(answer))
            if not self._handed.done():
                self._handed.set_result(server.dialect.decode_after(self._asked, self._server.model, answer))
            return
        limit = server.dialect.max_line_bytes
        stream = self._prefill_stream = await server.calls.stream(call, self._headers(server), limit)
        self.reached("prefill_started")
        n_tokens = 0
        while (event := await stream.next()) is not None:
            chunk = server.dialect.chunk(event, self._asked, n_tokens)
            n_tokens += len(chunk.tokens)
            if chunk.tokens:
                self._prefilled(chunk.cached_tokens)
        self.reached("transferred")

    def _prefilled(self, cached_tokens: int | None) -> None:
        """The prompt has been computed, as one of the servers shows first."""
        if "prefilled" in self._record.stages_s:
            return
        self._note_prefilled()
        if cached_tokens is not None:
            self._found_cached(cached_tokens)
        if self._lone:
            cached = self.decision.cached_tokens if cached_tokens is None else cached_tokens
            took_s = self._services.clock.now() - self._began_s
            prefill = self._prefill[0] if self._prefill is not None else self._server
            prefill.prefill.ran(len(self._request.token_ids) - cached, took_s)

    def _found_cached(self, cached_tokens: int) -> None:
        """Engines may count the whole prompt as cached; they compute its last token all the same."""
        self._note_cached(min(cached_tokens, len(self._request.token_ids) - 1))
