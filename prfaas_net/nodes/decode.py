"""A decode node: reserves memory, takes KVCache in, decodes from where it landed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from prfaas_net.aio import see_through
from prfaas_net.errors import CancelledByPeer, IncompatibleError, InvalidRequest, ProtocolError
from prfaas_net.kv import Manifest, RegionMap
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode_loop import DecodeLoop, SequenceStart
from prfaas_net.nodes.engine_api import Engine, TokenLogprobs
from prfaas_net.nodes.ground import NodeGround
from prfaas_net.nodes.landed import Landed, LandedMetrics, Predecessors
from prfaas_net.nodes.messages import DecodeCall, LogprobsModel, NodeInfo
from prfaas_net.nodes.reuse import PromptMemory
from prfaas_net.nodes.server import Emit, parse_call
from prfaas_net.tracing.stages import stage
from prfaas_net.transport import Incoming, KvListener

__all__ = ["DecodeNode"]

log = logging.getLogger(__name__)


class DecodeNode:
    """Serves ``POST /v1/decode``.

    A request's reservation has room for its prompt *and* for what it may generate: the landing place is the cache
    that decoding appends to. All requests that have landed are stepped together, by one loop.

    Args:
        ground: where the node has two roles, what it has in common for both, which its owner starts and closes.

    Attributes:
        admission: entered for every call, for as long as it runs; may refuse it.
    """

    def __init__(self, config: NodeConfig, engine: Engine, ground: NodeGround | None = None) -> None:
        self.config = config
        self.engine = engine
        self.admission: Callable[[], AbstractContextManager[None]] = nullcontext
        self._own_ground = ground is None
        self.ground = ground = ground or NodeGround(config, engine)
        self.identity, self.metrics, self.memory, self.control = (
            ground.identity, ground.metrics, ground.memory, ground.control,
        )  # fmt: skip
        self.listener = KvListener(
            identity=self.identity,
            security=config.kv.security(),
            options=config.kv.options(),
            link_grace_s=config.kv.resume_window,
        )
        self.control.app.router.add_post("/v1/decode", self._decode)
        self._loop = DecodeLoop(engine, self._stepped)
        self._calls = Predecessors()
        self._landed = LandedMetrics(self.metrics)
        self._running = self.metrics.gauge("decode_running_requests", "Requests that hold a reservation")
        self._tokens = self.metrics.counter("decode_tokens", "Tokens decoded")
        self._step_s = self.metrics.histogram("decode_step_seconds", "Time of one step of the whole batch")
        self._batch = self.metrics.gauge("decode_batch_requests", "Requests that the last step gave a token")

    def info(self) -> NodeInfo:
        return self.ground.describe()

    async def start(self) -> None:
        """Open the KV port and the control port."""
        self._loop.start()
        await self.listener.start(*self.config.kv.listen)
        for gates in self.config.kv.dial.values():
            for gate in gates:
                self.listener.keep_dialling(gate)
        if self._own_ground:
            await self.ground.start()

    async def drain(self) -> None:
        """Take no new work, and finish what is held, within the configured time."""
        await self.ground.drain()

    async def close(self) -> None:
        """Stop; whatever runs is cancelled, and its senders are told."""
        if self._own_ground:
            await self.ground.end_calls()
        await self.listener.close()
        await self._loop.close()
        if self._own_ground:
            await self.ground.close()

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        call = await parse_call(DecodeCall, request)

        async def job(emit: Emit) -> None:
            with self.admission(), self._running.track_inprogress():
                await self._run(call, emit)

        return await self.control.run(request, job, deadline_s=call.deadline_s, request_id=call.request_id)

    # -- one request --------------------------------------------------------------------------------------------

    def _check(self, call: DecodeCall) -> None:
        if call.layout != self.engine.layout.fingerprint:
            raise IncompatibleError(
                "the request is for another model or cache layout",
                expected=f"layout {self.engine.layout.fingerprint} ({self.engine.model_name})",
                found=call.layout,
                do="serve the same checkpoint on every node",
                request=call.request_id,
            )
        total = call.prompt_tokens + call.sampling.max_tokens
        if total > self.engine.max_model_tokens:
            raise InvalidRequest(
                "the prompt and what it may generate exceed the model's length",
                expected=f"at most {self.engine.max_model_tokens} tokens",
                found=total,
                do="shorten the prompt or lower max_tokens",
                request=call.request_id,
            )

    async def _run(self, call: DecodeCall, emit: Emit) -> None:
        self._check(call)
        if call.again:
            await self._calls.wait(call.request_id)
        here = self._calls.enter(call.request_id)
        try:
            await self._serve(call, emit)
        finally:
            self._calls.leave(call.request_id, here)

    async def _serve(self, call: DecodeCall, emit: Emit) -> None:
        regions = RegionMap(self.engine.layout, call.prompt_tokens + call.sampling.max_tokens)
        keys = bytes.fromhex(call.prefix_keys) if self.config.cache.enabled else b""
        with stage("reserve"):
            prompt = await PromptMemory.open(self.memory, keys, call.prompt_tokens, regions, need_state=False)
        incoming: Incoming | None = None
        unfinished: Landed | None = None
        keeping: asyncio.Task[None] | None = None
        try:
            # What is held already is not sent again: only the increment crosses the link.
            manifest = Manifest(
                self.engine.layout, prompt.cached_tokens, call.prompt_tokens, call.chunk_tokens,
                max_chunk_bytes=self.config.kv.max_chunk,
            )  # fmt: skip
            incoming = self.listener.reserve(
                manifest.table,
                manifest.views(regions, prompt.view),
                lifetime_s=call.deadline_s,
                endpoints=self.config.kv.endpoints(call.source_cluster, self.listener.address),
                manifest=manifest.to_json(),
            )
            unfinished = Landed(incoming, manifest, prompt)
            emit({"event": "reserved", "ticket": incoming.ticket.to_json(), "held_tokens": prompt.cached_tokens})
            with stage("land", **{"prfaas.held_tokens": prompt.cached_tokens}):
                token, reason = await self._land(call, incoming, emit)
            unfinished = None
            # Beside decoding, which only appends rows behind those of the prompt.
            keeping = asyncio.create_task(asyncio.to_thread(prompt.keep, call.prompt_tokens, with_state=False))
            with stage("decode"):
                await self._generate(call, token, reason, prompt, emit)
        finally:
            await see_through(self._give_back(call, incoming, unfinished, keeping, prompt))

    async def _give_back(
        self,
        call: DecodeCall,
        incoming: Incoming | None,
        unfinished: Landed | None,
        keeping: asyncio.Task[None] | None,
        prompt: PromptMemory,
    ) -> None:
        """Nobody may read or write the buffer any more before it is given back."""
        try:
            if incoming is not None:
                await incoming.abort(CancelledByPeer("the request was given up", request=call.request_id))
            if unfinished is not None:
                await unfinished.keep(self._landed)
            if keeping is not None:
                await keeping
        finally:
            prompt.close()

    async def _land(self, call: DecodeCall, incoming: Incoming, emit: Emit) -> tuple[int, str | None]:
        """Until the whole KVCache is here. Returns the first token, and why it is the last one, if it is."""
        opened = time.monotonic()
        seal = await incoming.sealed()
        token, reason = seal.get("first_token"), seal.get("finish_reason")
        if not isinstance(token, int) or not 0 <= token < self.engine.vocab_size:
            raise ProtocolError("the seal has no first token", found=repr(token)[:40], request=call.request_id)
        first = _token(token, 0, reason, _logprobs(seal, call))
        emit({**first, "cached_tokens": seal.get("cached_tokens", 0)})
        await incoming.landed()
        emit({"event": "landed", "at_s": time.monotonic() - opened})
        return token, reason

    async def _generate(
        self, call: DecodeCall, token: int, reason: str | None, prompt: PromptMemory, emit: Emit
    ) -> None:
        n_tokens = 1
        if reason is None:
            start = SequenceStart(
                call.prompt_tokens, token, call.sampling.sampling(), prompt.regions, prompt.view, call.prompt_token_set
            )
            async with self._loop.run(start) as steps:
                async for step in steps:
                    emit(_token(step.token, n_tokens, step.finish_reason, step.logprobs))
                    n_tokens += 1
                    reason = step.finish_reason
        emit({"event": "finish", "reason": reason, "output_tokens": n_tokens})
        log.info("%d prompt tokens landed, %d tokens decoded: %s", call.prompt_tokens, n_tokens, reason)

    def _stepped(self, n_sequences: int, seconds: float) -> None:
        self._step_s.observe(seconds)
        self._batch.set(n_sequences)
        self._tokens.inc(n_sequences)


def _token(token: int, index: int, reason: str | None, logprobs: TokenLogprobs | None) -> dict[str, Any]:
    event: dict[str, Any] = {"event": "token", "token": token, "index": index}
    if logprobs is not None:
        event["logprobs"] = {"logprob": logprobs.logprob, "top": logprobs.top}
    return event if reason is None else {**event, "finish": reason}


def _logprobs(seal: dict[str, Any], call: DecodeCall) -> LogprobsModel | None:
    """Those of the first token, which came with the seal."""
    if call.sampling.logprobs is None:
        return None
    try:
        return LogprobsModel.model_validate(seal.get("logprobs"))
    except ValidationError as error:
        raise ProtocolError(
            "the seal has no logprobs", found=repr(seal.get("logprobs"))[:80], request=call.request_id
        ) from error
