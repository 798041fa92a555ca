"""What a vLLM or SGLang engine holds, under our own names: its events in, events for the global manager out.

An engine's hashes are opaque here (their scheme, seed and width differ between engines, versions and settings): they
name blocks for removals and as parents, nothing more. Our keys are computed from the token ids that come with a block.
A block of ours may be several of the engine's; it is held while all of them are.

What cannot be placed without doubt is not reported, and counted: blocks after a parent that was never seen, tokens left
out, a hash that images or embeddings went into. A hybrid engine has several groups of layers: a kind of state is held
at a length when every group of that kind has it; a window when all the engine's blocks of the window are there.

An engine that does not send ``extra_keys`` (SGLang, older vLLM) does not tell salted requests from plain ones: do not
send it salted ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas_net.cache.engine_events import Cleared, EngineBatch, EngineHash, Removed, Stored
from prfaas_net.cache.events import Delta, Removal, Run, Snapshot
from prfaas_net.cache.keys import PrefixScope, extend_keys
from prfaas_net.errors import IncompatibleError, ProtocolError, RefusedError, UsageError
from prfaas_net.kv import KvKind

__all__ = ["EngineGroup", "EngineMirror"]

# What vLLM calls its groups. Others (chunked local, cross attention) have no counterpart and cannot be configured.
_KINDS = {
    "full_attention": KvKind.FULL, "mla_attention": KvKind.FULL, "sink_full_attention": KvKind.FULL,
    "sliding_window": KvKind.WINDOW, "sliding_window_mla": KvKind.WINDOW, "mamba": KvKind.LINEAR,
}  # fmt: skip
_MAX_PLACES = 64  # pairs of group and medium


@dataclass(frozen=True)
class EngineGroup:
    """One of the engine's groups of layers, by ``group_idx``; ``window_tokens`` for ``WINDOW`` only."""

    kind: KvKind
    window_tokens: int = 0


@dataclass(slots=True)
class _Block:
    """One of the engine's blocks.

    Attributes:
        prefix: our key before the block of ours that this one is a part of: a key or a root.
        n_tokens: of the sequence up to its end.
        chunk: its tokens, where our blocks are larger.
        key: ours, where a block of ours ends with it.
        places: which groups and media have it, as a bit mask.
    """

    parent: EngineHash | None
    prefix: bytes
    n_tokens: int
    adapter: str
    chunk: bytes = b""
    key: bytes | None = None
    places: int = 0


class _Plain(NamedTuple):
    """The salt of a sequence, and how many blocks there are before the first with more in its hash than tokens."""

    salt: str
    n_blocks: int


class _After(NamedTuple):
    """Where a sequence stands: our key before the block of ours that is not full yet, its tokens, all tokens."""

    prefix: bytes
    tail: bytes
    n_tokens: int


@dataclass
class _Report:
    """What one event of the engine comes to."""

    runs: list[Run] = field(default_factory=list)
    removed: dict[KvKind, list[bytes]] = field(default_factory=dict)


class EngineMirror:
    """One engine (one data-parallel rank of it).

    Args:
        node_id, layout, block_tokens: as the manager knows them.
        groups: all groups of the engine's cache; the default is one of full attention.
        max_blocks: of the engine's that are kept track of, about 300 bytes each; more is refused.
    """

    def __init__(
        self,
        node_id: str,
        layout: str,
        block_tokens: int,
        *,
        groups: Mapping[int, EngineGroup] | None = None,
        max_blocks: int = 1 << 20,
    ) -> None:
        self.node_id, self.layout, self.block_tokens = node_id, layout, block_tokens
        self._groups = dict(groups) if groups is not None else {0: EngineGroup(KvKind.FULL)}
        if not self._groups:
            raise UsageError("an engine has at least one group")
        self.kinds = frozenset(group.kind for group in self._groups.values())
        self._of_kind = {k: {i for i, g in self._groups.items() if g.kind is k} for k in self.kinds}
        self._max_blocks = max_blocks
        self.counters = {"stored": 0, "removed": 0, "unplaced": 0, "unknown_removed": 0, "unknown_events": 0}
        self._seq = 0
        self._reset()

    def _reset(self) -> None:
        self._blocks: dict[EngineHash, _Block] = {}
        self._places: dict[tuple[int, str], int] = {}
        # Per group: what a reported block needs besides its last part, and the reverse.
        self._needs: dict[tuple[int, EngineHash], tuple[EngineHash, ...]] = {}
        self._used_by: dict[tuple[int, EngineHash], set[EngineHash]] = {}
        # Our keys by the groups that have them, and those that the manager was told.
        self._have: dict[KvKind, dict[bytes, int]] = {kind: {} for kind in self.kinds}
        self._told: dict[KvKind, set[bytes]] = {kind: set() for kind in self.kinds}

    @property
    def n_blocks(self) -> int:
        """Of the engine's, that are known."""
        return len(self._blocks)

    def start(self) -> Snapshot:
        """Forget everything: the engine is taken to be empty, or its events are replayed from the first."""
        self._reset()
        self._seq += 1
        return Snapshot(self.node_id, "engine", self.layout, self.block_tokens, self._seq, self.kinds, ())

    def feed(self, batch: EngineBatch) -> Iterator[Delta]:
        """Events for the manager, after :meth:`start`'s.

        Raises:
            ProtocolError: the events contradict each other.
            IncompatibleError: the engine's blocks or groups are not those that were configured.
            RefusedError: it holds more blocks than are kept track of.
        """
        self.counters["unknown_events"] += batch.n_unknown
        later: list[Stored] = []
        for event in batch.events:
            if isinstance(event, Stored):
                report = _Report()
                if not self._store(event, report):
                    later.append(event)
            elif isinstance(event, Removed):
                report = self._remove(event)
                gone = set(event.hashes)
                later = [stored for stored in later if gone.isdisjoint(stored.hashes)]
            else:
                later.clear()
                report = self._clear()
            yield from self._delta(report, cleared=isinstance(event, Cleared))
        for event in later:
            # The groups of a hybrid engine report one after the other: the parent may have come in between.
            report = _Report()
            if not self._store(event, report):
                self.counters["unplaced"] += len(event.hashes)
            yield from self._delta(report)

    def _delta(self, report: _Report, *, cleared: bool = False) -> Iterator[Delta]:
        removed = tuple(Removal(kind, b"".join(keys)) for kind, keys in report.removed.items())
        if report.runs or removed or cleared:
            self._seq += 1
            yield Delta(self._seq, tuple(report.runs), removed, cleared)

    def _clear(self) -> _Report:
        self._reset()
        return _Report()

    # -- stored ------------------------------------------------------------------------------------------------------

    def _store(self, event: Stored, report: _Report) -> bool:
        """False: after a parent that is not known."""
        place = self._place(event)
        if not event.tokens:
            for name in event.hashes:
                block = self._blocks.get(name)
                if block is None:
                    self.counters["unplaced"] += 1
                else:
                    self._hold(name, block, event.group, place, report)
            return True
        size = event.block_tokens
        if size < 1 or self.block_tokens % size:
            expected = f"a divisor of {self.block_tokens} tokens"
            raise IncompatibleError("the engine's blocks do not fit ours", expected=expected, found=size)
        if event.parent is not None and event.parent not in self._blocks:
            return False
        plain = self._plain(event)
        after = self._after(event, plain.salt)
        if after is None or len(event.tokens) != 4 * size * len(event.hashes):
            self.counters["unplaced"] += len(event.hashes)
            return True
        self.counters["unplaced"] += len(event.hashes) - plain.n_blocks
        self._chain(event, plain.n_blocks, after, place, report)
        return True

    def _chain(self, event: Stored, n_blocks: int, after: _After, place: int, report: _Report) -> None:
        """Name the first ``n_blocks`` by our keys, one after the other."""
        prefix, tail, n_tokens = after
        width, full = 4 * event.block_tokens, 4 * self.block_tokens
        before = event.parent
        for i, name in enumerate(event.hashes[:n_blocks]):
            chunk = event.tokens[width * i : width * (i + 1)]
            tail, n_tokens = tail + chunk, n_tokens + event.block_tokens
            if len(tail) > full:
                raise IncompatibleError("one of the engine's blocks crosses the end of one of ours")
            key = extend_keys(prefix, tail, self.block_tokens) if len(tail) == full else None
            kept = b"" if width == full else chunk
            block = self._meet(name, _Block(before, prefix, n_tokens, event.adapter, kept, key))
            self._hold(name, block, event.group, place, report)
            if key is not None:
                prefix, tail = key, b""
            before = name

    def _place(self, event: Stored) -> int:
        """The bit of the event's group and medium."""
        group = self._groups.get(event.group)
        if group is None or (event.kind and _KINDS.get(event.kind) is not group.kind):
            found = f"group {event.group} of {event.kind or 'a kind not said'}"
            raise IncompatibleError("not one of the engine's groups", expected=self._groups, found=found)
        bit = self._places.setdefault((event.group, event.medium), len(self._places))
        if bit >= _MAX_PLACES:
            raise RefusedError("too many media", expected=f"{_MAX_PLACES} pairs of group and medium")
        return 1 << bit

    def _plain(self, event: Stored) -> _Plain:
        if event.extra_keys is None:
            return _Plain("", len(event.hashes))
        salt = ""
        for i, extra in enumerate(event.extra_keys):
            rest = [item for item in extra if item != event.adapter]
            if i == 0 and event.parent is None and len(rest) == 1 and isinstance(rest[0], str):
                salt = rest[0]  # vLLM puts the salt into the first block's hash only
            elif rest:
                return _Plain(salt, i)
        return _Plain(salt, len(event.hashes))

    def _after(self, event: Stored, salt: str) -> _After | None:
        """What the event's first block continues; None when parts are missing, or the parent is another adapter's."""
        if event.parent is None:
            return _After(PrefixScope(self.layout, self.block_tokens, salt, event.adapter).root, b"", 0)
        parent = block = self._blocks[event.parent]
        if parent.adapter != event.adapter:
            return None
        if parent.key is not None:
            return _After(parent.key, b"", parent.n_tokens)
        tail = block.chunk
        while len(tail) < 4 * (parent.n_tokens % self.block_tokens):
            before = self._blocks.get(block.parent) if block.parent is not None else None
            if before is None or not before.chunk:
                return None
            block, tail = before, before.chunk + tail
        return _After(parent.prefix, tail, parent.n_tokens)

    def _meet(self, name: EngineHash, new: _Block) -> _Block:
        """The block of that name; the same name for something else is a lie."""
        old = self._blocks.get(name)
        if old is None:
            if len(self._blocks) >= self._max_blocks:
                raise RefusedError("the engine holds too many blocks", expected=f"at most {self._max_blocks}")
            self._blocks[name] = new
            return new
        if (old.prefix, old.n_tokens, old.chunk, old.key) != (new.prefix, new.n_tokens, new.chunk, new.key):
            raise ProtocolError("one hash for two blocks", found=name.hex() if isinstance(name, bytes) else name)
        return old

    def _hold(self, name: EngineHash, block: _Block, group: int, place: int, report: _Report) -> None:
        """It is in one more place; perhaps a block of ours is complete with it."""
        block.places |= place
        if block.key is None:
            return
        kind = self._groups[group].kind
        needs = self._needed(block, group)
        if needs is None or not all(self._in_group(part, group) for part in needs):
            return
        if needs:
            self._needs[group, name] = needs
            for part in needs:
                self._used_by.setdefault((group, part), set()).add(name)
        have = self._have[kind]
        have[block.key] = have.get(block.key, 0) | 1 << group
        if have[block.key].bit_count() == len(self._of_kind[kind]):
            self._tell(kind, block, report)

    def _needed(self, block: _Block, group: int) -> tuple[EngineHash, ...] | None:
        """The other blocks of the engine's that ours consists of; None when their names are not known."""
        spec = self._groups[group]
        # A token sees itself and the window's other tokens before it.
        reach = {KvKind.FULL: self.block_tokens, KvKind.WINDOW: spec.window_tokens - 1, KvKind.LINEAR: 0}[spec.kind]
        start = max(0, block.n_tokens - reach)
        names: list[EngineHash] = []
        while block.parent is not None:
            before = self._blocks.get(block.parent)
            if before is None:
                return None if self._begins_after(block, start) else tuple(names)
            if before.n_tokens <= start:
                break
            names.append(block.parent)
            block = before
        return tuple(names)

    def _begins_after(self, block: _Block, start: int) -> bool:
        size = len(block.chunk) // 4 or self.block_tokens
        return block.n_tokens - size > start

    def _in_group(self, name: EngineHash, group: int) -> bool:
        block = self._blocks.get(name)
        return block is not None and bool(block.places & self._group_places(group))

    def _group_places(self, group: int) -> int:
        return sum(1 << bit for (of, _), bit in self._places.items() if of == group)

    def _tell(self, kind: KvKind, block: _Block, report: _Report) -> None:
        """Report a block of ours, if the manager can know what it follows."""
        key, told = block.key, self._told[kind]
        if key is None or key in told:
            return
        if kind is not KvKind.FULL:
            report.runs.append(Run(kind, key))
        else:
            root = block.n_tokens == self.block_tokens
            if not root and block.prefix not in told:
                return
            last = report.runs[-1] if report.runs else None
            if last is not None and last.group is kind and last.keys.endswith(block.prefix):
                report.runs[-1] = last._replace(keys=last.keys + key)
            else:
                report.runs.append(Run(kind, key, block.prefix, root))
        told.add(key)
        self.counters["stored"] += 1

    # -- removed -----------------------------------------------------------------------------------------------------

    def _remove(self, event: Removed) -> _Report:
        report = _Report()
        bit = self._places.get((event.group, event.medium))
        for name in event.hashes:
            block = self._blocks.get(name)
            if block is None or bit is None or not block.places >> bit & 1:
                self.counters["unknown_removed"] += 1
                continue
            block.places &= ~(1 << bit)
            if not self._in_group(name, event.group):
                for user in [name, *self._used_by.get((event.group, name), ())]:
                    self._lose(user, event.group, report)
            if not block.places:
                del self._blocks[name]
        return report

    def _lose(self, name: EngineHash, group: int, report: _Report) -> None:
        """A block of ours that ends with ``name`` is not complete in this group any longer, if it was."""
        for part in self._needs.pop((group, name), ()):
            users = self._used_by[group, part]
            users.discard(name)
            if not users:
                del self._used_by[group, part]
        key, kind = self._blocks[name].key, self._groups[group].kind
        if key is None:
            return
        have = self._have[kind]
        left = have.get(key, 0) & ~(1 << group)
        if left:
            have[key] = left
        else:
            have.pop(key, None)
        if key in self._told[kind]:
            self._told[kind].remove(key)
            report.removed.setdefault(kind, []).append(key)
            self.counters["removed"] += 1
