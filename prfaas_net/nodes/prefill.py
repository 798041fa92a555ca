"""A prefill node: runs prompts and streams their KVCache away while it is being made."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.aio import see_through
from prfaas_net.cache.keys import PrefixScope, prefix_keys
from prfaas_net.cache.retention import choose_interval
from prfaas_net.congestion.verdict import Verdict
from prfaas_net.errors import CancelledByPeer, InternalError, InvalidRequest
from prfaas_net.kv import KvKind, Manifest, RegionMap
from prfaas_net.kv.codecs import Codec, codec_for_dtype
from prfaas_net.nodes.cache_copy import CacheCopies
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.engine_api import Engine, PrefillResult
from prfaas_net.nodes.feed import Feed
from prfaas_net.nodes.ground import NodeGround
from prfaas_net.nodes.link_metrics import LinkCollector, describe_links
from prfaas_net.nodes.messages import NodeInfo, PrefillCall, TransferReport
from prfaas_net.nodes.node_state import STATE_BEAT_S, NodeState
from prfaas_net.nodes.reuse import Keeper, PromptMemory
from prfaas_net.nodes.server import Emit, parse_call
from prfaas_net.tracing.stages import stage
from prfaas_net.transport import KvListener, LinkBase, LinkPool, Outgoing, SenderGate
from prfaas_net.wire import SenderStats, Ticket

__all__ = ["PrefillNode"]

log = logging.getLogger(__name__)


class _Sink:
    """Turns "this layer holds every row before that token" into chunks for the link. In the engine's thread."""

    def __init__(self, manifest: Manifest, outgoing: Outgoing, on_tokens: Callable[[int], None]) -> None:
        self._outgoing = outgoing
        self._on_tokens = on_tokens
        self._cancelled = threading.Event()
        # Chunks of each layer that are not ready, the next one last.
        self._left: dict[int, list[tuple[int, int]]] = {}
        for chunk in reversed(manifest.chunks):
            self._left.setdefault(chunk.layer_index, []).append((chunk.stop_token, chunk.index))
        self._reached = dict.fromkeys(self._left, 0)

    def emit(self, layer_index: int, stop_token: int) -> None:
        left = self._left[layer_index]
        while left and left[-1][0] <= stop_token:
            self._outgoing.ready(left.pop()[1])
        self._reached[layer_index] = stop_token
        if layer_index == max(self._reached):
            self._on_tokens(stop_token)

    def cancelled(self) -> bool:
        return self._cancelled.is_set() or self._outgoing.transfer.error is not None

    def cancel(self) -> None:
        self._cancelled.set()

    def check_complete(self) -> None:
        """
        Raises:
            InternalError: the engine did not emit all that the manifest promises.
        """
        missing = {layer: len(left) for layer, left in self._left.items() if left}
        if missing:
            raise InternalError("the engine left chunks out", found=f"missing chunks by layer: {missing}")


class PrefillNode:
    """Serves ``POST /v1/prefill``. Prompts run one after the other, in order of arrival.

    A prompt's state is held in the node's arena until the receiver has all of it; the next prompt is run while the
    last bytes of the one before are still on their way.

    Args:
        ground: where the node has two roles, what it has in common for both, which its owner starts and closes.
        listener: the same of where it takes in cached prefixes.

    Attributes:
        admission: entered for every call, for as long as it runs; may refuse it.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        ground: NodeGround | None = None,
        listener: KvListener | None = None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.admission: Callable[[], AbstractContextManager[None]] = nullcontext
        self._own_ground = ground is None
        self.ground = ground = ground or NodeGround(config, engine)
        self.identity, self.metrics, self.memory, self.control = (
            ground.identity, ground.metrics, ground.memory, ground.control,
        )  # fmt: skip
        cache = config.cache
        self._state_interval_tokens = cache.state_interval_tokens or choose_interval(
            self.memory.slots.group_bytes, cache.block_tokens, config.kv.arena
        )
        security, options = config.kv.security(), config.kv.options()
        self.gate = SenderGate(
            identity=self.identity, security=security, options=options, on_verdict=self._link_verdict
        )
        self.links = LinkPool(
            identity=self.identity, security=security, options=options, gate=self.gate, on_verdict=self._link_verdict,
            options_towards=lambda cluster: self.config.kv.options(cluster),
        )  # fmt: skip
        self._own_listener = listener is None
        self.listener = listener or KvListener(identity=self.identity, security=security, options=options)
        self.copies = CacheCopies(config, engine, ground, self.links, self.listener)
        ground.on_reload.append(self._reload)
        self.state = NodeState(lambda: describe_links(self.links.links))
        self.state_feed = Feed(self.state, {}, beat_s=STATE_BEAT_S, beat=self.state.describe)
        self.metrics.registry.register(LinkCollector(lambda: [link.stats() for link in self.links.links]))
        self.control.app.router.add_post("/v1/prefill", self._prefill)
        self.control.app.router.add_get("/v1/state/events", self.state_feed.handle)
        self.control.app.router.add_get("/v1/links", self._links)
        full = [t.dtype for la in engine.layout.layers if la.kind is KvKind.FULL for t in la.tensors]
        self._codec = codec_for_dtype(full[0]) if full else Codec.RAW
        self._slot = asyncio.Semaphore(1)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefill")
        self._waiting = self.metrics.gauge("prefill_queue_requests", "Prompts waiting for the engine")
        self._tokens = self.metrics.counter("prefill_tokens", "Prompt tokens run")
        self._bytes = self.metrics.counter("kv_sent_bytes", "KVCache bytes delivered", ("kind",))
        self._resent = self.metrics.counter("kv_resent_chunks", "Chunks that were sent more than once")
        self._prefill_s = self.metrics.histogram("prefill_seconds", "Time in the engine")
        self._verdicts = self.metrics.counter("link_verdicts", "Changes of what a link is doing", ("state",))
        self._exposed_s = self.metrics.histogram("kv_exposed_seconds", "End of prefill to last byte confirmed")

    def info(self) -> NodeInfo:
        return self.ground.describe()

    async def start(self) -> None:
        """Open the control port, the port for cached prefixes, and the gate if there is to be one."""
        if self._own_listener and self.config.takes_prefixes:
            await self.listener.start(*self.config.kv.listen)
        if self.config.kv.gate is not None:
            await self.gate.start(*self.config.kv.gate)
        if self._own_ground:
            await self.ground.start()

    async def drain(self) -> None:
        """Take no new work, and finish what is held, within the configured time."""
        await self.ground.drain()

    async def close(self) -> None:
        """Stop; whatever runs is aborted at its receiver."""
        self.state_feed.close()
        if self._own_ground:
            await self.ground.end_calls()
        if self._own_listener:
            await self.listener.close()
        await self.links.close()
        await self.gate.close()
        await asyncio.to_thread(self._pool.shutdown)
        if self._own_ground:
            await self.ground.close()

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        call = await parse_call(PrefillCall, request)

        async def job(emit: Emit) -> None:
            with self.admission():
                await self._run(call, emit)

        return await self.control.run(request, job, deadline_s=call.deadline_s, request_id=call.request_id)

    def _reload(self, config: NodeConfig) -> None:
        self.config = config
        self.links.set_budgets()

    async def _links(self, request: web.Request) -> web.Response:
        """Every link that is up, and what it is doing."""
        return web.Response(body=orjson.dumps(describe_links(self.links.links)), content_type="application/json")

    def _link_verdict(self, link: LinkBase, verdict: Verdict) -> None:
        self._verdicts.labels(verdict.state.value).inc()
        self.state.changed()

    # -- one prompt ---------------------------------------------------------------------------------------------

    def _check(self, call: PrefillCall) -> tuple[Ticket, Manifest]:
        ticket = Ticket.from_json(call.ticket)
        manifest = Manifest.from_json(ticket.manifest, self.engine.layout)
        if manifest.stop_token != len(call.token_ids):
            raise InvalidRequest(
                "the ticket is for a prompt of another length",
                expected=manifest.stop_token,
                found=len(call.token_ids),
                request=call.request_id,
            )
        return ticket, manifest

    def _keys(self, call: PrefillCall) -> bytes:
        if not self.config.cache.enabled or not call.use_cache:
            return b""
        scope = PrefixScope(self.engine.layout.fingerprint, self.config.cache.block_tokens, call.cache_salt)
        return prefix_keys(scope, call.token_ids)

    async def _run(self, call: PrefillCall, emit: Emit) -> None:
        ticket, manifest = self._check(call)
        arrived = time.monotonic()
        outgoing: Outgoing | None = None
        prompt: PromptMemory | None = None
        turn = ExitStack()  # from its place in the queue to the end of its time in the engine
        try:
            turn.enter_context(self.state.queued(len(call.token_ids)))
            with self._waiting.track_inprogress(), stage("queue"):
                await self._slot.acquire()
            turn.callback(self._slot.release)
            queued_s = time.monotonic() - arrived
            regions = RegionMap(self.engine.layout, manifest.stop_token)
            keys = await asyncio.to_thread(self._keys, call)
            prompt = await PromptMemory.open(self.memory, keys, manifest.stop_token, regions, need_state=True)
            emit({"event": "started", "queued_s": queued_s, "cached_tokens": prompt.cached_tokens})
            link = await self.links.get(ticket, call.destination_cluster)
            views = manifest.views(regions, prompt.view)
            outgoing = link.open(ticket, manifest.table, views, lifetime_s=call.deadline_s, codec=self._codec)
            started = time.monotonic()
            with stage("transfer", **{"prfaas.kv_bytes": manifest.table.total_bytes}):
                with stage("prefill", **{"prfaas.cached_tokens": prompt.cached_tokens}):
                    result = await self._compute(call, manifest, prompt, outgoing, emit)
                prefill_s = time.monotonic() - started
                outgoing.seal(_seal(result) | {"cached_tokens": prompt.cached_tokens})
                emit({"event": "prefilled", "prefill_s": prefill_s})
                turn.close()
                stats = await outgoing.wait()
            report = self._report(call, manifest, stats, queued_s, prefill_s, prompt.cached_tokens)
            emit({"event": "done", "report": report.model_dump()})
            log.info(
                "%d prompt tokens prefilled in %.3f s, %d of them cached; %d bytes sent, %.3f s after the last layer",
                report.prompt_tokens, prefill_s, report.cached_tokens, manifest.table.total_bytes, report.exposed_s,
            )  # fmt: skip
        finally:
            if outgoing is not None:
                outgoing.abort(CancelledByPeer("the prefill was given up", request=call.request_id))
            turn.close()
            if prompt is not None:
                prompt.close()

    async def _compute(
        self, call: PrefillCall, manifest: Manifest, prompt: PromptMemory, outgoing: Outgoing, emit: Emit
    ) -> PrefillResult:
        loop = asyncio.get_running_loop()

        def on_tokens(n_tokens: int) -> None:
            loop.call_soon_threadsafe(emit, {"event": "progress", "tokens": n_tokens})

        sink = _Sink(manifest, outgoing, on_tokens)
        run = loop.run_in_executor(self._pool, self._in_engine, call, prompt, sink)
        try:
            result = await asyncio.shield(run)
        except asyncio.CancelledError:
            # The engine's thread still writes into the buffer: it is told to stop, and waited for.
            sink.cancel()
            await see_through(asyncio.wait([run]))
            raise
        if result is None:
            raise outgoing.transfer.error or CancelledByPeer("the transfer was cancelled", request=call.request_id)
        sink.check_complete()
        self._tokens.inc(len(call.token_ids) - prompt.cached_tokens)
        return result

    def _in_engine(self, call: PrefillCall, prompt: PromptMemory, sink: _Sink) -> PrefillResult | None:
        """In the engine's thread: tell of what was cached, run the rest, keep what may be used again."""
        n_tokens, start = len(call.token_ids), prompt.cached_tokens
        if start:
            for layer in self.engine.layout.layers:
                if layer.kind is KvKind.FULL:
                    sink.emit(layer.index, start)
        keeper = Keeper(prompt, n_tokens, self._state_interval_tokens)
        result = self.engine.prefill(
            call.token_ids, call.sampling.sampling(), prompt.regions, prompt.view, sink,
            start_token=start, snapshots=keeper,
        )  # fmt: skip
        if result is not None:
            keeper.finish(n_tokens)
        return result

    def _report(
        self,
        call: PrefillCall,
        manifest: Manifest,
        stats: SenderStats,
        queued_s: float,
        prefill_s: float,
        cached_tokens: int,
    ) -> TransferReport:
        assert stats.done_s is not None
        assert stats.sealed_s is not None
        assert stats.first_sent_s is not None
        exposed_s = stats.done_s - stats.sealed_s
        for kind, n_bytes in manifest.kv_bytes.items():
            self._bytes.labels(kind.value).inc(n_bytes)
        self._resent.inc(stats.resent_chunks)
        self._prefill_s.observe(prefill_s)
        self._exposed_s.observe(exposed_s)
        return TransferReport(
            request_id=call.request_id,
            prompt_tokens=manifest.stop_token,
            cached_tokens=cached_tokens,
            held_tokens=manifest.start_token,
            kv_bytes={kind.value: n_bytes for kind, n_bytes in manifest.kv_bytes.items()},
            connections=len(stats.lanes),
            resent_chunks=stats.resent_chunks,
            queued_s=queued_s,
            prefill_s=prefill_s,
            transfer_s=stats.done_s - stats.first_sent_s,
            exposed_s=exposed_s,
        )


def _seal(result: PrefillResult) -> dict[str, Any]:
    """What overtakes the KVCache: the first token, and all that belongs to it."""
    seal = {"first_token": result.first_token, "finish_reason": result.finish_reason}
    found = result.logprobs
    return seal if found is None else {**seal, "logprobs": {"logprob": found.logprob, "top": found.top}}
