"""The global KVCache manager: which node holds how much of a prompt, as far as the nodes have said.

Soft state. Each node streams its cache as a snapshot and numbered deltas (:mod:`prfaas_net.cache.events`). What does
not follow from that stream without doubt is not believed: a gap, a repeated number, a block whose parent the node never
stored, another model, an event that cannot be read. Then all that the node has said is dropped, it answers nothing, and
the outcome asks the caller for a new snapshot. So a match errs only by what is still on its way.

Of a prompt two lengths are told per node (paper, section 3.2):

* ``rows_tokens``: full-attention blocks held from the start without a hole. A transfer to that node begins there.
* ``usable_tokens``: the longest length at which the node holds all rows *and* the state of every other group, exactly.
  A prefill on that node begins there.

Small changes wait in dictionaries and enter the index in batches, before anything is read from it: answers are exact,
and a stream of one-block events costs a dictionary entry each instead of a dozen NumPy calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from prfaas_net.cache.events import CacheEvent, Delta, Run, Snapshot, parse_event
from prfaas_net.cache.index import BlockIndex, Ints, Words, key_words
from prfaas_net.cache.keys import KEY_BYTES, PrefixScope
from prfaas_net.errors import ProtocolError, RefusedError, UsageError
from prfaas_net.kv import KvKind

__all__ = ["CacheManager", "ClusterMatch", "Match", "NodeMatch", "Outcome", "Resync"]

# A batch into the index costs about 0.2 ms: this many changes make that less than 0.5 us each, and bound what a
# match may have to wait for.
_BATCH = 512
_SMALL_RUN = 16  # longer runs go into the index directly
_ZERO = bytes(KEY_BYTES)


class Resync(StrEnum):
    """Why a node's stream is not believed any longer."""

    GAP = "gap"
    REPEATED = "repeated"
    NO_SNAPSHOT = "no_snapshot"
    UNKNOWN_PARENT = "unknown_parent"
    LAYOUT = "layout"
    MALFORMED = "malformed"
    TOO_LARGE = "too_large"


@dataclass(frozen=True)
class Outcome:
    """What became of an event: ``Outcome.APPLIED``, or a reason.

    Attributes:
        resync: None when it was applied; otherwise why the node's entries are gone and a new snapshot is needed.
        detail: for people.
    """

    resync: Resync | None = None
    detail: str = ""

    APPLIED: ClassVar[Outcome]

    @property
    def applied(self) -> bool:
        return self.resync is None


Outcome.APPLIED = Outcome()


class NodeMatch(NamedTuple):
    """What one node holds of a prompt; see the module's text."""

    node_id: str
    cluster: str
    usable_tokens: int = 0
    rows_tokens: int = 0


class ClusterMatch(NamedTuple):
    """The most that any node of a cluster holds, each length by itself."""

    usable_tokens: int = 0
    rows_tokens: int = 0


@dataclass(frozen=True)
class Match:
    """Nodes that hold something of a prompt, in no order; a node that is not listed holds nothing."""

    nodes: tuple[NodeMatch, ...] = ()

    def node(self, node_id: str) -> NodeMatch | None:
        """One node's part; None when it holds nothing."""
        return next((match for match in self.nodes if match.node_id == node_id), None)

    def by_cluster(self) -> dict[str, ClusterMatch]:
        """The longest lengths per cluster; a cluster that is not listed holds nothing."""
        best: dict[str, ClusterMatch] = {}
        for match in self.nodes:
            usable, rows = best.get(match.cluster, ClusterMatch())
            best[match.cluster] = ClusterMatch(max(usable, match.usable_tokens), max(rows, match.rows_tokens))
        return best


@dataclass
class _Node:
    """Where one node's stream stands.

    Attributes:
        bit: its place in the index's masks.
        seq: number of the last event; None while a snapshot is awaited.
        n_stored: no fewer than the (block, group) pairs that it holds.
    """

    node_id: str
    cluster: str
    bit: int
    seq: int | None = None
    boot: str = ""
    n_stored: int = 0
    heard_s: float = 0.0


@dataclass
class _Pending:
    """Changes on their way to the index: per column (node and group), key to present or not, the last word counts."""

    columns: dict[int, dict[bytes, bool]] = field(default_factory=dict)
    size: int = 0


class CacheManager:
    """See the module's text.

    Args:
        layout: fingerprint that a node's cache must have.
        block_tokens: tokens of a block, the same on all nodes.
        groups: kinds of state that the layout has.
        max_node_blocks: (block, group) pairs that one node may hold; more is refused.
        max_nodes: nodes that are kept track of; more are refused.
        expected_blocks: room made at once. The index grows by itself, but each time it doubles everything waits: for
            a million blocks an eighth of a second.
        seed: makes the index's hash unpredictable to peers.
    """

    def __init__(
        self,
        layout: str,
        block_tokens: int,
        groups: frozenset[KvKind],
        *,
        max_node_blocks: int = 1 << 22,
        max_nodes: int = 4096,
        expected_blocks: int = 0,
        seed: int = 0,
    ) -> None:
        if not groups:
            raise UsageError("a layout without state has nothing to cache", expected="1 or more groups")
        self.layout = layout
        self.block_tokens = block_tokens
        self.groups = groups
        self._max_node_blocks, self._max_nodes = max_node_blocks, max_nodes
        # FULL first: its column is the one that is accumulated along the prompt.
        self._order = {kind: place for place, kind in enumerate(sorted(groups, key=list(KvKind).index))}
        self._exact = [place for kind, place in self._order.items() if kind is not KvKind.FULL]
        self._root = PrefixScope(layout, block_tokens).root
        self._index = BlockIndex(len(groups), capacity=expected_blocks, seed=seed)
        self._pending = _Pending()
        self._nodes: dict[str, _Node] = {}
        self._by_bit: list[_Node | None] = []
        self.counters: dict[str, int] = {
            "snapshots": 0, "deltas": 0, "stored_blocks": 0, "removed_blocks": 0, "matches": 0, "hits": 0,
        } | {f"resync_{reason.value}": 0 for reason in Resync}  # fmt: skip

    # -- the streams -------------------------------------------------------------------------------------------------

    def apply(self, node_id: str, cluster: str, event: object, *, now: float) -> Outcome:
        """Take in one event of a node's stream, as plain data (or already parsed).

        Never raises for what a peer sent. After an outcome with ``resync`` the node needs a new snapshot.
        """
        node = self._nodes.get(node_id)
        if node is None:
            if len(self._nodes) >= self._max_nodes:
                return self._refuse(None, Resync.TOO_LARGE, f"more than {self._max_nodes} nodes")
            node = self._admit(node_id, cluster)
        node.heard_s, node.cluster = now, cluster
        try:
            parsed = event if isinstance(event, (Snapshot, Delta)) else parse_event(event)
        except ProtocolError as error:
            return self._refuse(node, Resync.MALFORMED, error.line())
        except RefusedError as error:
            return self._refuse(node, Resync.TOO_LARGE, error.line())
        return self._apply(node, parsed)

    def drop(self, node_id: str) -> None:
        """Forget a node that has left; its stream may start anew with a snapshot."""
        node = self._nodes.pop(node_id, None)
        if node is not None:
            self._clear(node)
            self._by_bit[node.bit] = None

    def silent(self, *, now: float, for_s: float) -> list[str]:
        """Nodes that nothing was heard of for ``for_s`` seconds."""
        return [node.node_id for node in self._nodes.values() if now - node.heard_s >= for_s]

    def awaiting(self) -> list[str]:
        """Nodes whose snapshot has not come yet."""
        return [node.node_id for node in self._nodes.values() if node.seq is None]

    def _admit(self, node_id: str, cluster: str) -> _Node:
        if None in self._by_bit:
            bit = self._by_bit.index(None)
        else:
            bit = len(self._by_bit)
            self._by_bit.append(None)
        node = self._nodes[node_id] = self._by_bit[bit] = _Node(node_id, cluster, bit)
        return node

    def _refuse(self, node: _Node | None, reason: Resync, detail: str) -> Outcome:
        """Count, and believe nothing more of this node."""
        self.counters[f"resync_{reason.value}"] += 1
        if node is not None:
            self._clear(node)
        return Outcome(reason, detail)

    def _apply(self, node: _Node, event: CacheEvent) -> Outcome:
        if isinstance(event, Snapshot):
            found = (event.layout, event.block_tokens, event.groups)
            if event.node != node.node_id:
                return self._refuse(node, Resync.MALFORMED, f"a snapshot of {event.node}")
            if found != (self.layout, self.block_tokens, self.groups):
                return self._refuse(node, Resync.LAYOUT, f"layout, block size, groups {found}")
            self._clear(node)
            self.counters["snapshots"] += 1
            node.boot = event.boot
        else:
            if node.seq is None:
                return self._refuse(node, Resync.NO_SNAPSHOT, f"event {event.seq} before any snapshot")
            if event.seq != node.seq + 1:
                reason = Resync.REPEATED if event.seq <= node.seq else Resync.GAP
                return self._refuse(node, reason, f"event {event.seq} after {node.seq}")
            self.counters["deltas"] += 1
            if event.cleared:
                self._clear(node)
        node.seq = event.seq
        for run in event.stored:
            outcome = self._store(node, run)
            if outcome is not None:
                return outcome
        if isinstance(event, Delta):
            for removal in event.removed:
                if removal.group not in self._order:
                    return self._refuse(node, Resync.MALFORMED, f"no group {removal.group} here")
                self._put(node, self._order[removal.group], removal.keys, present=False)
                self.counters["removed_blocks"] += len(removal.keys) // KEY_BYTES
        return Outcome.APPLIED

    def _store(self, node: _Node, run: Run) -> Outcome | None:
        """None: done."""
        group = self._order.get(run.group)
        if group is None:
            return self._refuse(node, Resync.MALFORMED, f"no group {run.group} here")
        if _has_zero(run.keys):
            return self._refuse(node, Resync.MALFORMED, "a key of zeros")
        if run.group is KvKind.FULL and not run.root and run.parent != self._root:
            known = self._pending.columns.get(node.bit * len(self._order), {}).get(run.parent)
            if not (self._index.holds(run.parent, node.bit, 0) if known is None else known):
                return self._refuse(node, Resync.UNKNOWN_PARENT, f"no block {run.parent.hex()}")
        n_keys = len(run.keys) // KEY_BYTES
        if node.n_stored + n_keys > self._max_node_blocks:
            # So many were stored, some of them twice or removed meanwhile: only now the exact number is looked up.
            node.n_stored = self.node_blocks(node.node_id)
            if node.n_stored + n_keys > self._max_node_blocks:
                return self._refuse(node, Resync.TOO_LARGE, f"more than {self._max_node_blocks} blocks")
        node.n_stored += n_keys
        self._put(node, group, run.keys, present=True)
        self.counters["stored_blocks"] += n_keys
        return None

    # -- the index and what waits for it -----------------------------------------------------------------------------

    def _put(self, node: _Node, group: int, keys: bytes, *, present: bool) -> None:
        if len(keys) > _SMALL_RUN * KEY_BYTES:
            self._flush()
            if present:
                self._index.add(keys, node.bit, group)
            else:
                self._index.remove(keys, node.bit, group)
            return
        pending, place = self._pending, node.bit * len(self._order) + group
        column = pending.columns.get(place)
        if column is None:
            column = pending.columns[place] = {}
        if len(keys) == KEY_BYTES:
            column[keys] = present
            pending.size += 1
        else:
            for start in range(0, len(keys), KEY_BYTES):
                column[keys[start : start + KEY_BYTES]] = present
            pending.size += len(keys) // KEY_BYTES
        if pending.size >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        """Everything that waits, in two batches: order matters only per key, node and group, with one entry each."""
        if not self._pending.size:
            return
        pending, self._pending = self._pending, _Pending()
        for present, change in ((True, self._index.add), (False, self._index.remove)):
            keys: list[bytes] = []
            columns: list[int] = []
            for column, entries in pending.columns.items():
                chosen = [key for key, value in entries.items() if value is present]
                keys += chosen
                columns += [column] * len(chosen)
            if keys:
                nodes, groups = np.divmod(np.array(columns, dtype=np.int64), len(self._order))
                change(b"".join(keys), nodes, groups)

    def _clear(self, node: _Node) -> None:
        """All that a node has said is gone; it awaits a snapshot."""
        for group in range(len(self._order)):
            self._pending.columns.pop(node.bit * len(self._order) + group, None)
        self._index.drop(node.bit)
        node.seq, node.n_stored = None, 0

    # -- answers -----------------------------------------------------------------------------------------------------

    @property
    def n_blocks(self) -> int:
        """Distinct blocks that some node holds, in whatever group."""
        self._flush()
        return self._index.n_blocks

    @property
    def memory_bytes(self) -> int:
        """Of the index; what waits for it is at most a few hundred keys."""
        return self._index.memory_bytes

    def node_blocks(self, node_id: str) -> int:
        """(block, group) pairs that a node holds."""
        self._flush()
        node = self._nodes.get(node_id)
        return self._index.held(node.bit) if node else 0

    def match(self, keys: bytes, *, n_tokens: int) -> Match:
        """What every node holds of a prompt.

        Args:
            keys: of the prompt's full blocks, from :func:`~prfaas_net.cache.keys.prefix_keys`.
            n_tokens: the prompt's length. Its last token is always computed, so no length reaches it.

        Raises:
            UsageError: not whole keys.
        """
        if len(keys) % KEY_BYTES:
            raise UsageError("not whole keys", expected=f"a multiple of {KEY_BYTES} bytes", found=len(keys))
        self._flush()
        self.counters["matches"] += 1
        n_usable = min(len(keys) // KEY_BYTES, max(0, n_tokens - 1) // self.block_tokens)
        if not n_usable or not self._nodes:
            return Match()
        rows, usable = self._lengths(self._index.masks(keys[: n_usable * KEY_BYTES]))
        nodes = []
        for bit in np.flatnonzero(rows | usable).tolist():
            node = self._by_bit[bit]
            if node is not None:
                size = self.block_tokens
                nodes.append(NodeMatch(node.node_id, node.cluster, int(usable[bit]) * size, int(rows[bit]) * size))
        self.counters["hits"] += any(match.usable_tokens for match in nodes)
        return Match(tuple(nodes))

    def _lengths(self, masks: Words) -> tuple[Ints, Ints]:
        """Per bit: blocks of rows from the start, and the longest length at which everything is there."""
        n_bits = masks.shape[1] * 64
        if KvKind.FULL in self._order:
            held = np.bitwise_and.accumulate(masks[:, :, 0], axis=0)
            rows = _bits(held).sum(axis=0, dtype=np.int64)
        else:
            held, rows = masks[:, :, 0], np.zeros(n_bits, dtype=np.int64)
        if not self._exact:
            return rows, rows
        for group in self._exact:
            held = held & masks[:, :, group]
        ends = np.flatnonzero(held.any(axis=1))  # few: states are kept at long intervals
        if not ends.size:
            return rows, np.zeros(n_bits, dtype=np.int64)
        lengths = (ends[:, None] + 1) * _bits(held[ends]).astype(np.int64)
        return rows, lengths.max(axis=0)


def _bits(words: Words) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Shape ``(n, n_words)`` to one number per bit: ``(n, n_words * 64)``."""
    raw = np.ascontiguousarray(words, dtype="<u8").view(np.uint8)
    return np.unpackbits(raw, axis=1, bitorder="little")


def _has_zero(keys: bytes) -> bool:
    """Is one of them the key that stands for an empty slot?"""
    return _ZERO in keys and not bool(key_words(keys).any(axis=1).all())
