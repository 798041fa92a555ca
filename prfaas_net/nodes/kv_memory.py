"""A node's memory for KVCache: buffers of running sequences, and copies of what may be used again.

The shell around :class:`~prfaas_net.cache.prefix.PrefixCache`: it owns the bytes, the lock and the clock. Whoever
runs a sequence reserves one contiguous buffer, and copies cached blocks into it and new ones out of it; a copy runs
at memory speed, far faster than the state can be computed or sent. Safe from any thread; copies run outside the lock.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prfaas_net.cache.changes import deltas_of, runs_of
from prfaas_net.cache.events import Snapshot
from prfaas_net.cache.keys import KEY_BYTES, PrefixScope
from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.prefix_tree import CacheChange, Entry, PrefixHit, RunPlan
from prfaas_net.cache.slots import Piece, Slots, choose_block_size
from prfaas_net.cache.tier import SqliteTier, TierRecord
from prfaas_net.kv import CacheLayout, KvKind, RegionMap
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.feed import Listener
from prfaas_net.nodes.second_tier import SecondTier
from prfaas_net.transport import Arena

__all__ = ["KvMemory", "SequenceBuffer", "open_memory"]


class SequenceBuffer:
    """Memory of one sequence. Whoever reserved it releases it, once, when nobody reads or writes it any more."""

    def __init__(self, memory: KvMemory, plan: RunPlan, view: memoryview) -> None:
        self.view = view
        self._memory = memory
        self._plan: RunPlan | None = plan

    def release(self) -> None:
        """Give the memory back; further calls do nothing."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self._memory.give_back(plan)


class KvMemory:
    """See the module's text.

    Args:
        total_bytes: of host memory.
        block_tokens: tokens of a cached block.
        rows_alone: rows are of use without state: true where sequences land, false where prompts are run.
        states: window and linear state is kept too: false where sequences only land.
        tier: a second place for what is cached.
    """

    def __init__(
        self,
        layout: CacheLayout,
        total_bytes: int,
        *,
        block_tokens: int,
        rows_alone: bool,
        states: bool,
        tier: SecondTier | None = None,
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.slots = Slots(layout, block_tokens)
        self.block_tokens = block_tokens
        self.block_bytes = choose_block_size(self.slots.group_bytes).block_bytes
        arena = Arena(max(total_bytes, self.block_bytes))
        self._memory = arena.memory
        n_blocks = arena.total_bytes // self.block_bytes
        groups = self.slots.group_bytes if states else {KvKind.FULL: self.slots.group_bytes.get(KvKind.FULL, 0)}
        self.cache = PrefixCache(n_blocks, self.block_bytes, groups, block_tokens, rows_alone=rows_alone)
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._seq = 0
        self._root = PrefixScope(layout.fingerprint, block_tokens).root

    # -- buffers of sequences -------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Reserved by sequences."""
        return self.cache.pool.n_transfer * self.block_bytes

    @property
    def cached_bytes(self) -> int:
        """Held by the prefix cache."""
        return self.cache.pool.n_prefix * self.block_bytes

    def reserve(self, n_bytes: int) -> SequenceBuffer:
        """A buffer of ``n_bytes``; cached blocks give way. Its content is whatever the last user left.

        Raises:
            RefusedError: it is larger than all the memory.
            BusyError: there is no room now.
        """
        with self._lock:
            plan = self.cache.reserve_run(n_bytes, now=time.monotonic())
            for source, target in plan.moves:
                self._block(target)[:] = self._block(source)
            self._tell()
        at = plan.first_block * self.block_bytes
        return SequenceBuffer(self, plan, self._memory[at : at + n_bytes])

    def give_back(self, plan: RunPlan) -> None:
        """For :class:`SequenceBuffer`."""
        with self._lock:
            self.cache.release_run(plan)

    # -- cached state into a buffer -------------------------------------------------------------------------------

    def find(self, keys: bytes, n_tokens: int, *, need_state: bool) -> PrefixHit:
        """The longest usable prefix, pinned until :meth:`release`; see :meth:`PrefixCache.match`."""
        with self._lock:
            return self.cache.match(keys, n_tokens=n_tokens, need_state=need_state, now=time.monotonic())

    def fill(self, hit: PrefixHit, regions: RegionMap, buffer: memoryview) -> None:
        """Copy what was found into a sequence's buffer. It is pinned, so nothing moves it meanwhile."""
        for entry in hit.entries():
            for group, blocks in entry.parts.items():
                pieces = self._pieces(regions, group, entry)
                _copy(_cut(buffer, pieces), self._payload(blocks, pieces))

    def release(self, hit: PrefixHit) -> None:
        """What was found may be evicted again."""
        with self._lock:
            self.cache.release(hit)

    # -- state out of a buffer ------------------------------------------------------------------------------------

    def keep(self, keys: bytes, n_blocks: int, regions: RegionMap, buffer: memoryview, *, with_state: bool) -> None:
        """Cache the rows of a prompt's first blocks, as far as they are not cached and there is room.

        Args:
            with_state: and the window and linear state at their end, which is what the buffer holds of them.
        """
        with self._lock:
            now = time.monotonic()
            # Both are reserved before either is there, so that they do not take each other for worthless.
            entries = self.cache.insert_rows(keys, 0, n_blocks, now=now)
            state = self.cache.insert_state(keys, n_blocks - 1, now=now) if with_state else None
            self._tell()  # what had to give way
        new = entries if state is None else [*entries, state]
        n_whole = 0
        try:
            for entry in new:
                for group, blocks in entry.parts.items():
                    pieces = self._pieces(regions, group, entry)
                    _copy(self._payload(blocks, pieces), _cut(buffer, pieces))
                    self._write_behind(entry, group, pieces)
                n_whole += 1
        finally:
            self._settle(new, n_whole)

    def _settle(self, entries: Sequence[Entry], n_whole: int) -> None:
        """Of the entries that were reserved, the first ``n_whole`` are there; the others will not come."""
        with self._lock:
            self.cache.commit(entries[:n_whole])
            self.cache.abandon(entries[n_whole:])
            self._tell()

    # -- the second tier ------------------------------------------------------------------------------------------

    def promote(self, keys: bytes, n_tokens: int, *, need_state: bool) -> None:
        """Bring back from the second tier what makes a longer prefix usable. In a worker thread."""
        if self.tier is None:
            return
        with self._lock:
            held = self.cache.match(keys, n_tokens=n_tokens, need_state=need_state, now=time.monotonic())
        try:
            states = [g for g in self.slots.group_bytes if g is not KvKind.FULL] if need_state else []
            rows = held.rows_tokens // self.block_tokens
            n_blocks = self._reachable(keys, rows, (n_tokens - 1) // self.block_tokens, states)
            if n_blocks * self.block_tokens > held.length_tokens:
                self._bring_back(keys, rows, n_blocks, with_state=bool(states))
        finally:
            self.release(held)

    def _reachable(self, keys: bytes, n_rows: int, n_most: int, states: Sequence[KvKind]) -> int:
        """How many blocks would be usable with what the second tier has."""
        assert self.tier is not None
        usable = 0
        for index in range(min(n_most, len(keys) // KEY_BYTES)):
            key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            if index >= n_rows and KvKind.FULL in self.slots.group_bytes and not self.tier.has(key, KvKind.FULL):
                break
            if all(self.tier.has(key, group) for group in states):
                usable = index + 1
        return usable

    def _bring_back(self, keys: bytes, first: int, n_blocks: int, *, with_state: bool) -> None:
        assert self.tier is not None
        with self._lock:
            now = time.monotonic()
            entries = self.cache.insert_rows(keys, first, n_blocks - first, now=now) if n_blocks > first else []
            state = self.cache.insert_state(keys, n_blocks - 1, now=now) if with_state else None
            self._tell()
        new = entries if state is None else [*entries, state]
        regions = RegionMap(self.layout, n_blocks * self.block_tokens)
        n_whole = 0
        try:
            for entry in new:
                for group, blocks in entry.parts.items():
                    pieces = self._pieces(regions, group, entry)
                    payload = self.tier.read(entry.key, group, sum(piece.n_bytes for piece in pieces))
                    if payload is None:
                        return  # gone, or not what was stored: it is computed again, and so is what follows
                    _copy(self._payload(blocks, pieces), iter([memoryview(payload)]))
                n_whole += 1
        finally:
            self._settle(new, n_whole)

    def _write_behind(self, entry: Entry, group: KvKind, pieces: Sequence[Piece]) -> None:
        if self.tier is None or self.tier.has(entry.key, group):
            return
        payload = b"".join(self._payload(entry.parts[group], pieces))
        length = (entry.index + 1) * self.block_tokens
        self.tier.write(TierRecord(entry.key, group, entry.node.parent_key, length, len(payload)), payload)

    def close(self) -> None:
        """Let go of the second tier, after what waits has been written. Blocks."""
        if self.tier is not None:
            self.tier.close()

    # -- telling --------------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> dict[str, Any]:
        """What is cached now, as a snapshot without names; every change after it goes to ``listener``.

        It is called with the lock held, from any thread, and must not block.
        """
        with self._lock:
            self._listeners.append(listener)
            groups = frozenset(self.slots.group_bytes)
            stored = tuple(runs_of(self.cache.snapshot_changes(), self._root))
            return Snapshot("", "", self.layout.fingerprint, self.block_tokens, self._seq, groups, stored).to_json()

    def unlisten(self, listener: Listener) -> None:
        """No more changes to this one."""
        with self._lock:
            self._listeners.remove(listener)

    def _tell(self) -> None:
        changes: list[CacheChange] = self.cache.drain_changes()
        for delta in deltas_of(changes, self._seq + 1, self._root):
            self._seq = delta.seq
            body = delta.to_json() if self._listeners else {}
            for listener in self._listeners:
                listener(body)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _block(self, number: int) -> memoryview:
        return self._memory[number * self.block_bytes : (number + 1) * self.block_bytes]

    def _pieces(self, regions: RegionMap, group: KvKind, entry: Entry) -> list[Piece]:
        if group is KvKind.FULL:
            return self.slots.row_pieces(regions, entry.index)
        return self.slots.state_pieces(regions, group, (entry.index + 1) * self.block_tokens)

    def _payload(self, blocks: Sequence[int], pieces: Iterable[Piece]) -> Iterator[memoryview]:
        """An entry's memory, cut as its pieces are."""
        block, at = 0, 0
        for piece in pieces:
            left = piece.n_bytes
            while left:
                if at == self.block_bytes:
                    block, at = block + 1, 0
                n_bytes = min(left, self.block_bytes - at)
                yield self._block(blocks[block])[at : at + n_bytes]
                left, at = left - n_bytes, at + n_bytes


def open_memory(config: NodeConfig, layout: CacheLayout) -> KvMemory:
    """A node's memory as its configuration says.

    Raises:
        ConfigError: the host has not that much memory, or the second tier cannot be used.
    """
    cache, tier = config.cache, None
    if cache.tier is not None:
        scope = PrefixScope(layout.fingerprint, cache.block_tokens).root.hex()
        key = config.kv.shared_key or config.node_key
        secret = hashlib.blake2b(key.get_secret_value().encode()).digest() if key is not None else b""
        tier = SecondTier(SqliteTier(cache.tier, cache.tier_size, scope=scope, secret=secret))
    return KvMemory(
        layout,
        config.kv.arena,
        block_tokens=cache.block_tokens,
        rows_alone=config.role == "decode" or config.convertible,
        states=config.role == "prefill" or config.convertible,
        tier=tier,
    )


def _cut(buffer: memoryview, pieces: Iterable[Piece]) -> Iterator[memoryview]:
    return (buffer[piece.offset : piece.offset + piece.n_bytes] for piece in pieces)


def _copy(targets: Iterator[memoryview], sources: Iterator[memoryview]) -> None:
    """Copy a byte string that is cut differently on both sides."""
    source = memoryview(b"")
    for target in targets:
        at = 0
        while at < target.nbytes:
            if not source:
                source = next(sources)
            n_bytes = min(target.nbytes - at, source.nbytes)
            target[at : at + n_bytes] = source[:n_bytes]
            at, source = at + n_bytes, source[n_bytes:]
