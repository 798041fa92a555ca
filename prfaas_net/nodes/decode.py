"""A decode node: reserves memory, takes KVCache in, decodes from where it landed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from prfaas_net.aio import see_through
from prfaas_net.errors import CancelledByPeer, IncompatibleError, InvalidRequest, ProtocolError
from prfaas_net.kv import Manifest, RegionMap
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode_loop import DecodeLoop, SequenceStart
from prfaas_net.nodes.engine_api import Engine, TokenLogprobs
from prfaas_net.nodes.info import describe_node
from prfaas_net.nodes.messages import DecodeCall, LogprobsModel, NodeInfo
from prfaas_net.nodes.server import ControlServer, Emit, parse_call
from prfaas_net.transport import Arena, ArenaBlock, Identity, Incoming, KvListener

__all__ = ["DecodeNode"]


class DecodeNode:
    """Serves ``POST /v1/decode``.

    A request's reservation has room for its prompt *and* for what it may generate: the landing place is the cache
    that decoding appends to. All requests that have landed are stepped together, by one loop.
    """

    def __init__(self, config: NodeConfig, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        self.identity = Identity(config.node_id)
        self.metrics = Metrics()
        self.arena = Arena(config.kv.arena)
        self.listener = KvListener(
            identity=self.identity,
            security=config.kv.security(),
            options=config.kv.options(),
            link_grace_s=config.kv.resume_window,
        )
        key = config.node_key.get_secret_value() if config.node_key else None
        self.control = ControlServer(self.info, self.metrics, node_key=key)
        self.control.app.router.add_post("/v1/decode", self._decode)
        self._loop = DecodeLoop(engine, self._stepped)
        self._running = self.metrics.gauge("decode_running_requests", "Requests that hold a reservation")
        self._tokens = self.metrics.counter("decode_tokens", "Tokens decoded")
        self._step_s = self.metrics.histogram("decode_step_seconds", "Time of one step of the whole batch")
        self._batch = self.metrics.gauge("decode_batch_requests", "Requests that the last step gave a token")
        arena = self.metrics.gauge("kv_arena_used_bytes", "Bytes of the landing arena that are reserved")
        arena.set_function(lambda: self.arena.used_bytes)

    def info(self) -> NodeInfo:
        return describe_node(self.config, self.identity, self.engine)

    async def start(self) -> None:
        """Open the KV port and the control port."""
        self._loop.start()
        await self.listener.start(*self.config.kv.listen)
        for gates in self.config.kv.dial.values():
            for gate in gates:
                self.listener.keep_dialling(gate)
        await self.control.start(*self.config.listen)

    async def close(self) -> None:
        """Stop; whatever runs is cancelled, and its senders are told."""
        await self.control.close()
        await self.listener.close()
        await self._loop.close()

    async def _decode(self, request: web.Request) -> web.StreamResponse:
        call = await parse_call(DecodeCall, request)

        async def job(emit: Emit) -> None:
            with self._running.track_inprogress():
                await self._run(call, emit)

        return await self.control.run(request, job, deadline_s=call.deadline_s)

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

    def _endpoints(self, source_cluster: str) -> Sequence[tuple[str, int]]:
        if source_cluster in self.config.kv.dial:
            return []  # the link is dialled from here
        advertise = self.config.kv.advertise
        return [advertise.get(source_cluster) or advertise.get("*") or self.listener.address]

    async def _run(self, call: DecodeCall, emit: Emit) -> None:
        self._check(call)
        regions = RegionMap(self.engine.layout, call.prompt_tokens + call.sampling.max_tokens)
        manifest = Manifest(
            self.engine.layout, 0, call.prompt_tokens, call.chunk_tokens, max_chunk_bytes=self.config.kv.max_chunk
        )
        block = self.arena.reserve(regions.total_bytes)
        incoming: Incoming | None = None
        try:
            incoming = self.listener.reserve(
                manifest.table,
                manifest.views(regions, block.view),
                lifetime_s=call.deadline_s,
                endpoints=self._endpoints(call.source_cluster),
                manifest=manifest.to_json(),
            )
            emit({"event": "reserved", "ticket": incoming.ticket.to_json()})
            await self._generate(call, incoming, regions, block.view, emit)
        finally:
            await see_through(self._give_back(call, incoming, block))

    @staticmethod
    async def _give_back(call: DecodeCall, incoming: Incoming | None, block: ArenaBlock) -> None:
        """Nobody may write into the block any more before it is given back."""
        if incoming is not None:
            await incoming.abort(CancelledByPeer("the request was given up", request=call.request_id))
        block.release()

    async def _generate(
        self, call: DecodeCall, incoming: Incoming, regions: RegionMap, buffer: memoryview, emit: Emit
    ) -> None:
        opened = time.monotonic()
        seal = await incoming.sealed()
        token, reason = seal.get("first_token"), seal.get("finish_reason")
        if not isinstance(token, int) or not 0 <= token < self.engine.vocab_size:
            raise ProtocolError("the seal has no first token", found=repr(token)[:40], request=call.request_id)
        emit(_token(token, 0, reason, _logprobs(seal, call)))
        await incoming.landed()
        emit({"event": "landed", "at_s": time.monotonic() - opened})
        n_tokens = 1
        if reason is None:
            sampling = call.sampling.sampling()
            start = SequenceStart(call.prompt_tokens, token, sampling, regions, buffer, call.prompt_token_set)
            async with self._loop.run(start) as steps:
                async for step in steps:
                    emit(_token(step.token, n_tokens, step.finish_reason, step.logprobs))
                    n_tokens += 1
                    reason = step.finish_reason
        emit({"event": "finish", "reason": reason, "output_tokens": n_tokens})

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
