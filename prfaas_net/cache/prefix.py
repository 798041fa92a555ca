"""One node's prefix cache: state of prompts that were run, in the memory that no transfer needs.

A tree of token blocks by key. Each block may have its *rows* (full attention: usable as far as all of them from the
first one on are there) and *state* (window and linear: usable only at exactly its length). Full blocks only; what is
still being copied in is never matched. Pure: the shell copies the bytes and locks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prfaas_net.cache.eviction import EvictionQueue
from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.cache.pool import BlockPool, BlockState
from prfaas_net.cache.prefix_tree import CacheChange, Entry, Node, PrefixHit, RunPlan
from prfaas_net.errors import BusyError, InternalError, RefusedError, UsageError
from prfaas_net.kv import KvKind
from prfaas_net.units import format_bytes

__all__ = ["CacheStats", "PrefixCache"]


def _count_tokens(start_tokens: int, stop_tokens: int) -> float:
    return float(stop_tokens - start_tokens)


@dataclass
class CacheStats:
    """What happened since the start; ``bytes_held`` and ``entries`` are of now.

    Attributes:
        tokens_asked, tokens_reused: of prompts that were matched, and of them those that need not be run.
        declined: entries that were not taken in for want of room.
        blocks_moved: memory blocks copied aside for a transfer.
        evicted_idle_s: how long the entry evicted last had been unused: what stays unused longer is lost.
        bytes_held: payload by group, filling ones included.
    """

    queries: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    declined: int = 0
    abandoned: int = 0
    blocks_moved: int = 0
    evicted_idle_s: float = 0.0
    evictions: Counter[KvKind] = field(default_factory=Counter)
    bytes_held: Counter[KvKind] = field(default_factory=Counter)
    entries: Counter[KvKind] = field(default_factory=Counter)


class PrefixCache:
    """The prefix cache and the transfer runs of one pool.

    Args:
        pool_blocks: memory blocks of the pool.
        block_bytes: bytes of a memory block.
        group_bytes: payload of an entry by group, of those groups that the layout has (see
            :class:`~prfaas_net.cache.slots.Slots`).
        block_tokens: tokens of a block of tokens.
        cost: what it takes to prefill tokens ``start`` to ``stop`` when those before are cached; any unit. By default
            their number.
        rows_alone: rows are of use without state, as on a decode node, where state always comes with the transfer.
            Otherwise rows that no state at or below them makes usable go first.
    """

    def __init__(
        self,
        pool_blocks: int,
        block_bytes: int,
        group_bytes: Mapping[KvKind, int],
        block_tokens: int,
        *,
        cost: Callable[[int, int], float] = _count_tokens,
        rows_alone: bool = False,
    ) -> None:
        if block_bytes < 1 or block_tokens < 1:
            raise UsageError("blocks need a size", found=f"{block_bytes} bytes, {block_tokens} tokens")
        self.pool = BlockPool(pool_blocks)
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens
        self.stats = CacheStats()
        self._group_bytes = {group: n for group, n in group_bytes.items() if n > 0}
        blocks = {group: -(-n // block_bytes) for group, n in self._group_bytes.items()}
        self._row_blocks: dict[KvKind, int] = {g: n for g, n in blocks.items() if g is KvKind.FULL}
        self._state_blocks: dict[KvKind, int] = {g: n for g, n in blocks.items() if g is not KvKind.FULL}
        self._cost = cost
        self._rows_alone = rows_alone or not self._state_blocks
        self._nodes: dict[bytes, Node] = {}
        self._owners: dict[int, Entry] = {}
        self._in_use: set[Entry] = set()  # pinned or filling
        self._queue = EvictionQueue(self._evictable, self._worth)
        self._runs: dict[int, RunPlan] = {}
        self._changes: deque[CacheChange] = deque()

    # --- asking ---

    def match(self, keys: bytes, *, n_tokens: int, need_state: bool, now: float) -> PrefixHit:
        """The longest usable prefix of a prompt, pinned until :meth:`release`.

        At least one token is always left to run: its logits are what the caller is after.

        Args:
            keys: of the prompt's full blocks, one after the other.
            n_tokens: of the prompt.
            need_state: for a prefill, which goes on from window and linear state at exactly that length. Without,
                rows are enough: what a decode node holds already, so that they need not be sent.
        """
        n_blocks = min(len(keys) // KEY_BYTES, max(0, n_tokens - 1) // self.block_tokens)
        need_state = need_state and bool(self._state_blocks)
        path: list[Entry] = []
        usable, state = 0, None
        for i in range(n_blocks):
            node = self._nodes.get(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])
            if self._row_blocks:
                if node is None or node.rows is None or node.rows.filling:
                    break
                path.append(node.rows)
            if need_state and node is not None and self._has_state(node):
                usable, state = i + 1, node.state
        if not need_state:
            usable = len(path)
        hit = PrefixHit(usable * self.block_tokens, tuple(path[:usable]), state, len(path) * self.block_tokens)
        for entry in hit.entries():
            self._queue.touch(entry)
            entry.last_used_s = now
            entry.pins += 1
            self._in_use.add(entry)
        self.stats.queries += 1
        self.stats.hits += usable > 0
        self.stats.tokens_asked += n_tokens
        self.stats.tokens_reused += hit.length_tokens
        return hit

    def release(self, hit: PrefixHit) -> None:
        """Nobody reads from these entries any more. Further calls do nothing."""
        if hit.released:
            return
        hit.released = True
        for entry in hit.entries():
            entry.pins -= 1
            if not entry.pins:
                self._let_go(entry)

    # --- filling ---

    def insert_rows(self, keys: bytes, first: int, n: int, *, now: float) -> list[Entry]:
        """Reserve room for rows of blocks ``first`` to ``first + n`` of a prompt, as far as they are not held yet.

        What is worth least gives way. There may be room for fewer than asked; the first ones are taken in then. Each
        entry must be :meth:`commit`-ted when its content is in place, or :meth:`abandon`-ed.

        Args:
            keys: of the prompt, from its first block on.

        Raises:
            UsageError: the keys do not reach so far.
        """
        self._check_keys(keys, first + n)
        if not self._row_blocks:
            return []
        parent = self._nodes.get(keys[(first - 1) * KEY_BYTES : first * KEY_BYTES]) if first else None
        if first and parent is None:
            return []  # rows that follow on nothing can never be matched
        new: list[Entry] = []
        for i in range(first, first + n):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            node = self._nodes.get(key)
            if node is None:
                node = self._attach(key, keys[max(0, i - 1) * KEY_BYTES : i * KEY_BYTES], i, parent)
                entry = self._reserve(node, self._row_blocks, now)
                if entry is None:
                    self._detach(node)
                    self.stats.declined += first + n - i
                    break
                node.rows = entry
                new.append(entry)
            parent = node
        return new

    def insert_state(self, keys: bytes, index: int, *, now: float) -> Entry | None:
        """Reserve room for window and linear state after block ``index`` of a prompt.

        Reserve the rows first: state without them is of no use. Commit or abandon it as rows.

        Returns:
            None if it is held already, its rows are not, or there is no room.
        """
        self._check_keys(keys, index + 1)
        if not self._state_blocks:
            return None
        key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
        node = self._nodes.get(key)
        if node is None and not self._row_blocks:
            node = self._attach(key, keys[max(0, index - 1) * KEY_BYTES : index * KEY_BYTES], index, None)
        if node is None or node.state is not None:
            return None
        n_blocks = sum(self._state_blocks.values())
        entry = None
        # It may be a large part of the pool: nothing is evicted unless that helps.
        if n_blocks <= self.pool.n_free or n_blocks <= self.pool.n_free + self._n_evictable(node):
            node.state = Entry(node, {})  # holds the place: now the rows it stands on are not worthless
            node.state = entry = self._reserve(node, self._state_blocks, now)
        if entry is None:
            self.stats.declined += 1
            if node.rows is None:
                self._detach(node)
            else:
                self._queue.offer(node.rows)
        return entry

    def commit(self, entries: Iterable[Entry]) -> None:
        """Their content is in place: from now on they can be matched.

        Raises:
            UsageError: one of them is not being filled.
        """
        for entry in entries:
            self._check_filling(entry)
            entry.filling = False
            node = entry.node
            if not entry.forgotten:
                if entry.is_rows or not self._row_blocks:
                    self._publish(node)
                elif node.public:
                    self._note("stored", entry)
            if not entry.pins:
                self._let_go(entry)

    def abandon(self, entries: Iterable[Entry]) -> None:
        """Their content will not come: they and what was built on them are forgotten, their memory is free.

        Raises:
            UsageError: one of them is not being filled.
        """
        for entry in entries:
            self._check_filling(entry)
            self.stats.abandoned += 1
            if not entry.forgotten:
                if entry.is_rows:
                    self._prune(entry.node)
                else:
                    self._forget(entry)
            entry.filling = False
            self._let_go(entry)

    # --- transfers ---

    def reserve_run(self, n_bytes: int, *, now: float) -> RunPlan:
        """Memory in one piece for one sequence. Its content is whatever the last user left.

        Raises:
            RefusedError: it is larger than the whole pool.
            BusyError: there is no room now, whatever is evicted or moved; nothing has changed.
        """
        n = max(1, -(-n_bytes // self.block_bytes))
        pool = self.pool
        if n > pool.n_blocks:
            raise RefusedError(
                "the KVCache is larger than the pool",
                expected=f"at most {format_bytes(pool.n_blocks * self.block_bytes)}",
                found=format_bytes(n_bytes),
                do="raise kv.arena of the node",
            )
        first = pool.find_free_run(n)
        evicted: list[Entry] = []
        if first is None:
            first, evicted = self._clear_run(n, now)
        plan = RunPlan(first, n, tuple(pool.take_run(first, n)), tuple(evicted))
        self._relocate(dict(plan.moves))
        self._runs[first] = plan
        return plan

    def _clear_run(self, n: int, now: float) -> tuple[int, list[Entry]]:
        """Evict as much as ``n`` blocks need, and say where they are cheapest to clear."""
        pool = self.pool
        fixed = [block for entry in self._in_use for block in entry.blocks()]
        short = n - pool.n_free
        if (short > 0 and short > self._n_evictable()) or pool.find_run(n, fixed) is None:
            raise BusyError(
                "no room for a KVCache in the pool now",
                expected=format_bytes(n * self.block_bytes),
                found=f"{format_bytes(pool.n_transfer * self.block_bytes)} of "
                f"{format_bytes(pool.n_blocks * self.block_bytes)} in transfers",
                do="try again, or raise kv.arena of the node",
            )
        evicted = []
        while pool.n_free < n and (entry := self._evict(now)) is not None:
            evicted.append(entry)
        first = pool.find_run(n, fixed)
        assert first is not None  # eviction opens windows and closes none
        return first, evicted

    def release_run(self, plan: RunPlan) -> None:
        """Give a run back when nobody reads or writes it any more.

        Raises:
            UsageError: it was given back before.
        """
        if self._runs.get(plan.first_block) is not plan:
            raise UsageError("a run is given back twice", found=f"blocks from {plan.first_block}")
        del self._runs[plan.first_block]
        self.pool.release(range(plan.first_block, plan.first_block + plan.n_blocks), BlockState.TRANSFER)

    def drop_all(self) -> None:
        """Forget everything cached. What is pinned or filling keeps its memory until its users let go."""
        for node in self._nodes.values():
            for entry in node.entries():
                entry.forgotten = True
                if entry not in self._in_use:
                    self._free(entry)
        self._nodes.clear()
        self._queue.clear()
        self._changes.append(CacheChange("cleared"))

    # --- telling ---

    def drain_changes(self) -> list[CacheChange]:
        """What was stored and removed since the last call, in order. A block's rows always come after its parent's."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def snapshot_changes(self) -> list[CacheChange]:
        """All that can be matched now, as ``stored`` changes, parents first."""
        found: list[CacheChange] = []
        nodes = [node for node in self._nodes.values() if node.parent is None]
        while nodes:
            node = nodes.pop()
            if not node.public:
                continue
            for entry in node.entries():
                if not entry.filling:
                    found.extend(self._describe("stored", entry))
            nodes.extend(node.children.values())
        return found

    def validate(self) -> None:
        """Check every invariant, in time proportional to what is held.

        Raises:
            InternalError: one does not hold.
        """
        self.pool.validate()
        entries = {entry for node in self._nodes.values() for entry in node.entries()} | self._in_use
        owners = {block: entry for entry in entries for block in entry.blocks()}
        held = sum(entry.n_blocks for entry in entries)
        in_runs = sum(plan.n_blocks for plan in self._runs.values())
        if owners != self._owners or len(owners) != held:
            raise InternalError("a memory block has no owner, or two", found=len(self._owners))
        if (self.pool.n_prefix, self.pool.n_transfer) != (held, in_runs):
            raise InternalError("blocks have leaked", expected=f"{held}, {in_runs}", found=self.pool.n_prefix)
        if any(self.pool.state(block) is not BlockState.PREFIX for block in owners):
            raise InternalError("an entry lies in a block that is not the cache's")
        for entry in entries:
            if (entry.pins > 0 or entry.filling) != (entry in self._in_use):
                raise InternalError("an entry is in use and not, at once", found=entry.index)
            if self._evictable(entry) and not entry.queued:
                raise InternalError("an entry can never be evicted", found=entry.index)
        for node in self._nodes.values():
            alone = node.parent is None or node.parent.public
            ready = node.rows is None or not node.rows.filling
            if node.public != (alone and ready and (bool(self._row_blocks) or self._has_state(node))):
                raise InternalError("a block can be reached and not, at once", found=node.index)

    # --- the tree ---

    def _attach(self, key: bytes, parent_key: bytes, index: int, parent: Node | None) -> Node:
        node = Node(key, parent_key, index, parent)
        self._nodes[key] = node
        if parent is not None:
            parent.children[key] = node
        return node

    def _detach(self, node: Node) -> None:
        del self._nodes[node.key]
        parent = node.parent
        if parent is not None:
            del parent.children[node.key]
            if parent.rows is not None:
                self._queue.offer(parent.rows)
            if parent.state is not None and not parent.children:
                # Nothing goes on from there any more: from now on its rows count as its bytes.
                self._queue.offer(parent.state, cheaper=True)

    def _publish(self, node: Node) -> None:
        """Rows came: they, and what waited below them, can be reached now if all above can."""
        nodes = [node] if node.parent is None or node.parent.public else []
        while nodes:
            node = nodes.pop()
            if node.rows is not None and node.rows.filling:
                continue
            node.public = True
            for entry in node.entries():
                if not entry.filling:
                    self._note("stored", entry)
            nodes.extend(node.children.values())

    def _prune(self, node: Node) -> None:
        """Forget a node and all below it."""
        nodes = [node]
        for each in nodes:
            nodes.extend(each.children.values())
        for each in reversed(nodes):
            for entry in each.entries():
                self._forget(entry)
            self._detach(each)

    def _forget(self, entry: Entry) -> None:
        node = entry.node
        if node.public and not entry.filling:
            self._note("removed", entry)
        entry.forgotten = True
        if entry.is_rows:
            node.rows = None
        else:
            node.state = None
            if node.rows is not None:
                self._queue.offer(node.rows)
            elif not self._row_blocks:
                self._detach(node)
        if entry not in self._in_use:
            self._free(entry)

    def _let_go(self, entry: Entry) -> None:
        """Nobody pins or fills it any more."""
        self._in_use.discard(entry)
        if entry.forgotten:
            self._free(entry)
        else:
            self._queue.offer(entry)

    def _has_state(self, node: Node) -> bool:
        return node.state is not None and not node.state.filling

    # --- memory ---

    def _reserve(self, node: Node, needed: Mapping[KvKind, int], now: float) -> Entry | None:
        total = sum(needed.values())
        while self.pool.n_free < total:
            if self._evict(now) is None:
                return None
        blocks = self.pool.take_scattered(total)
        assert blocks is not None
        entry = Entry(node, {}, last_used_s=now)
        for group, n in needed.items():
            entry.parts[group], blocks = blocks[:n], blocks[n:]
            self.stats.bytes_held[group] += self._group_bytes[group]
            self.stats.entries[group] += 1
        self._owners.update(dict.fromkeys(entry.blocks(), entry))
        self._in_use.add(entry)
        self._queue.touch(entry)
        return entry

    def _free(self, entry: Entry) -> None:
        blocks = entry.blocks()
        for block in blocks:
            del self._owners[block]
        self.pool.release(blocks, BlockState.PREFIX)
        for group in entry.parts:
            self.stats.bytes_held[group] -= self._group_bytes[group]
            self.stats.entries[group] -= 1

    def _relocate(self, moves: Mapping[int, int]) -> None:
        moved = [(target, self._owners.pop(source)) for source, target in moves.items()]
        self._owners.update(moved)
        for entry in {entry for _, entry in moved}:
            entry.parts = {group: [moves.get(b, b) for b in blocks] for group, blocks in entry.parts.items()}
        self.stats.blocks_moved += len(moves)

    def _evict(self, now: float) -> Entry | None:
        entry = self._queue.pop()
        if entry is None:
            return None
        self.stats.evictions.update(entry.parts.keys())
        self.stats.evicted_idle_s = now - entry.last_used_s
        self._forget(entry)
        if entry.is_rows:
            self._detach(entry.node)
        return entry

    def _n_evictable(self, keep: Node | None = None) -> int:
        """Memory blocks that eviction could free: all but those in use and the rows that they stand on."""
        kept: set[Entry] = set(self._in_use)
        nodes = {entry.node for entry in kept if not entry.forgotten}
        if keep is not None:
            nodes.add(keep)
        seen: set[Node] = set()
        for node in nodes:
            at: Node | None = node
            while at is not None and at not in seen:
                seen.add(at)
                if at.rows is not None:
                    kept.add(at.rows)
                at = at.parent
        return self.pool.n_prefix - sum(entry.n_blocks for entry in kept)

    def _evictable(self, entry: Entry) -> bool:
        if entry.filling or entry.pins or entry.forgotten:
            return False
        return not entry.is_rows or not (entry.node.children or entry.node.state)

    def _worth(self, entry: Entry) -> float | None:
        """Cost per byte of what would be lost with it."""
        tokens = self.block_tokens
        if entry.is_rows:
            if not self._rows_alone:
                return None
            start = entry.index * tokens
            return self._cost(start, start + tokens) / self._group_bytes[KvKind.FULL]
        # Only this state makes reusable what lies between it and the one before it. Rows that serve nothing else
        # go with it.
        node, n_rows, alone = entry.node, 0, not entry.node.children
        above: Node | None = node
        while above is not None and (above is node or above.state is None):
            alone = alone and (above is node or len(above.children) == 1)
            n_rows += alone and above.rows is not None
            above = above.parent
        start = (above.index + 1) * tokens if above is not None else 0
        size = sum(self._group_bytes[group] for group in entry.parts) + n_rows * self._group_bytes.get(KvKind.FULL, 0)
        return self._cost(start, (node.index + 1) * tokens) / size

    # --- small things ---

    def _describe(self, kind: str, entry: Entry) -> list[CacheChange]:
        return [CacheChange(kind, group, entry.node.parent_key, entry.key) for group in entry.parts]

    def _note(self, kind: str, entry: Entry) -> None:
        self._changes.extend(self._describe(kind, entry))

    def _check_keys(self, keys: bytes, n: int) -> None:
        if n * KEY_BYTES > len(keys):
            raise UsageError("there are fewer keys", expected=f"{n} or more", found=len(keys) // KEY_BYTES)

    def _check_filling(self, entry: Entry) -> None:
        if not entry.filling:
            raise UsageError("an entry is not being filled", found=f"block {entry.index}")
