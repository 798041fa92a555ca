"""A cached prefix from one node to another, over the KV stream: ``POST /v1/cache/take`` and ``POST /v1/cache/copy``.

It is what happens to a prompt, without the prompt: the receiver reserves and issues a ticket, the sender copies what it
has cached into a buffer and sends it, and what has landed and been verified is cached under the same keys. Nobody
waits for it, so few run at a time on a node, and what there is no room for is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from prfaas_net.aio import see_through
from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.errors import BusyError, CancelledByPeer, IncompatibleError, InvalidRequest, PrfaasError, RefusedError
from prfaas_net.kv import Manifest, RegionMap
from prfaas_net.nodes.cache_messages import CacheCopyCall, CacheTakeCall
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.engine_api import Engine
from prfaas_net.nodes.ground import NodeGround
from prfaas_net.nodes.reuse import PromptMemory
from prfaas_net.nodes.server import Emit, parse_call
from prfaas_net.transport import KvListener, LinkPool
from prfaas_net.wire import Ticket

__all__ = ["CacheCopies"]

# At a time, in either direction: copies are beside the point of a node, and each holds a buffer as large as a prompt's.
MAX_COPIES = 2
CHUNK_TOKENS = 512


class CacheCopies:
    """Serves both calls.

    Args:
        links: over which prefixes are sent.
        listener: where they are taken in.
    """

    def __init__(
        self,
        config: NodeConfig,
        engine: Engine,
        ground: NodeGround,
        links: LinkPool,
        listener: KvListener,
    ) -> None:
        self._config = config
        self._engine = engine
        self._memory, self._control = ground.memory, ground.control
        self._links = links
        self._listener = listener
        self._running = 0
        self._ended = ground.metrics.counter(
            "cache_copies", "Cached prefixes sent to and taken from other nodes", ("direction", "outcome")
        )
        self._bytes = ground.metrics.counter("cache_copied_bytes", "KVCache of such prefixes", ("direction",))
        self._control.app.router.add_post("/v1/cache/take", self._take)
        self._control.app.router.add_post("/v1/cache/copy", self._copy)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        call = await parse_call(CacheTakeCall, request)

        async def job(emit: Emit) -> None:
            with self._counted("in"):
                await self._take_in(call, emit)

        return await self._control.run(request, job, deadline_s=call.deadline_s, request_id=call.request_id)

    async def _copy(self, request: web.Request) -> web.StreamResponse:
        call = await parse_call(CacheCopyCall, request)

        async def job(emit: Emit) -> None:
            with self._counted("out"):
                await self._send(call, emit)

        return await self._control.run(request, job, deadline_s=call.deadline_s, request_id=call.request_id)

    @contextmanager
    def _counted(self, direction: str) -> Iterator[None]:
        """One of the few that run."""
        if not self._config.takes_prefixes:
            raise RefusedError(
                "this node exchanges no prefixes", do="set cache.enabled and cache.share, and kv.listen beyond loopback"
            )
        if self._running >= MAX_COPIES:
            raise BusyError("other prefixes are being copied", expected=f"at most {MAX_COPIES} at a time")
        self._running += 1
        outcome = "failed"
        try:
            yield
            outcome = "done"
        except PrfaasError:
            raise
        except asyncio.CancelledError:
            outcome = "given_up"
            raise
        finally:
            self._running -= 1
            self._ended.labels(direction, outcome).inc()

    # -- the receiver -------------------------------------------------------------------------------------------------

    async def _take_in(self, call: CacheTakeCall, emit: Emit) -> None:
        layout, keys = self._engine.layout, bytes.fromhex(call.prefix_keys)
        if call.layout != layout.fingerprint:
            raise IncompatibleError(
                "the prefix is of another model or cache layout", expected=layout.fingerprint, found=call.layout
            )
        n_tokens = len(keys) // KEY_BYTES * self._memory.block_tokens
        if n_tokens > self._engine.max_model_tokens:
            raise InvalidRequest("longer than any prompt", expected=self._engine.max_model_tokens, found=n_tokens)
        if self._holds(keys, n_tokens):
            emit({"event": "done", "kept_tokens": n_tokens})
            return
        regions = RegionMap(layout, n_tokens)
        prompt = await PromptMemory.open(self._memory, keys, n_tokens, regions, need_state=False)
        incoming = None
        try:
            manifest = Manifest(
                layout, prompt.cached_tokens, n_tokens, CHUNK_TOKENS, max_chunk_bytes=self._config.kv.max_chunk
            )
            incoming = self._listener.reserve(
                manifest.table,
                manifest.views(regions, prompt.view),
                lifetime_s=call.deadline_s,
                endpoints=self._config.kv.endpoints(call.source_cluster, self._listener.address),
                manifest=manifest.to_json(),
            )
            emit({"event": "reserved", "ticket": incoming.ticket.to_json(), "held_tokens": prompt.cached_tokens})
            await incoming.sealed()
            await incoming.landed()
            await see_through(asyncio.to_thread(prompt.keep, n_tokens, with_state=True))
            if not self._holds(keys, n_tokens):
                raise BusyError("the prefix has landed, and there is no room to keep it")
            self._bytes.labels("in").inc(manifest.table.total_bytes)
            emit({"event": "done", "kept_tokens": n_tokens})
        finally:
            try:
                if incoming is not None:
                    await see_through(incoming.abort(CancelledByPeer("the copy was given up", request=call.request_id)))
            finally:
                prompt.close()

    def _holds(self, keys: bytes, n_tokens: int) -> bool:
        """Whether a prompt that goes on behind the prefix could start from all of it."""
        hit = self._memory.find(keys, n_tokens + 1, need_state=True)
        self._memory.release(hit)
        return hit.length_tokens == n_tokens

    # -- the sender ---------------------------------------------------------------------------------------------------

    async def _send(self, call: CacheCopyCall, emit: Emit) -> None:
        ticket, keys = Ticket.from_json(call.ticket), bytes.fromhex(call.prefix_keys)
        manifest = Manifest.from_json(ticket.manifest, self._engine.layout)
        n_tokens = len(keys) // KEY_BYTES * self._memory.block_tokens
        if manifest.stop_token != n_tokens:
            raise InvalidRequest(
                "the ticket is for a prefix of another length", expected=n_tokens, found=manifest.stop_token
            )
        regions = RegionMap(self._engine.layout, n_tokens)
        prompt = await PromptMemory.open(self._memory, keys, n_tokens + 1, regions, need_state=True)
        outgoing = None
        try:
            if prompt.cached_tokens != n_tokens:
                raise BusyError("the prefix is not cached here any more", expected=n_tokens, found=prompt.cached_tokens)
            began_s = time.monotonic()
            link = await self._links.get(ticket, call.destination_cluster)
            views = manifest.views(regions, prompt.view)
            outgoing = link.open(ticket, manifest.table, views, lifetime_s=call.deadline_s)
            outgoing.ready_all()
            outgoing.seal({"prefix_tokens": n_tokens})
            await outgoing.wait()
            total = manifest.table.total_bytes
            self._bytes.labels("out").inc(total)
            emit({"event": "done", "kv_bytes": total, "transfer_s": time.monotonic() - began_s})
        finally:
            if outgoing is not None:
                outgoing.abort(CancelledByPeer("the copy was given up", request=call.request_id))
            prompt.close()
