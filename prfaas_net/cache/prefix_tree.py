"""What the prefix cache holds of one block of tokens, and the tree that these form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from prfaas_net.kv import KvKind

__all__ = ["CacheChange", "Entry", "Node", "PrefixHit", "RunPlan"]


class CacheChange(NamedTuple):
    """One change of what a node can be asked for.

    Attributes:
        kind: ``stored``, ``removed`` or ``cleared`` (everything is gone; the other fields are empty).
        group: kind of state.
        parent: key of the block before; empty for a prompt's first block.
    """

    kind: str
    group: KvKind | None = None
    parent: bytes = b""
    key: bytes = b""


@dataclass(eq=False, slots=True)
class Entry:
    """What is cached, pinned and evicted in one piece: the rows of one block of tokens, or all state at one length.

    While it is pinned or filling it stays where it is; otherwise ``parts`` may change with any call to the cache.

    Attributes:
        parts: the memory blocks of each group's payload, in order: of ``FULL`` alone for rows, of ``WINDOW`` and
            ``LINEAR``, as the layout has them, for state.
        filling: reserved, its content not there yet: never matched.
        pins: how many hits use it.
        forgotten: no longer in the tree; its memory is freed when the last user lets go.
    """

    node: Node
    parts: dict[KvKind, list[int]]
    filling: bool = True
    pins: int = 0
    forgotten: bool = False
    # For eviction; see prfaas_net.cache.eviction.
    base: float = 0.0
    touched: int = 0
    queued: bool = False
    ticket: int = 0
    last_used_s: float = 0.0

    @property
    def key(self) -> bytes:
        """Key of the (last) block of tokens that it belongs to."""
        return self.node.key

    @property
    def index(self) -> int:
        """Number of that block of tokens in the prompt, from 0."""
        return self.node.index

    @property
    def is_rows(self) -> bool:
        return KvKind.FULL in self.parts

    @property
    def n_blocks(self) -> int:
        """Memory blocks held."""
        return sum(map(len, self.parts.values()))

    def blocks(self) -> list[int]:
        """All its memory blocks."""
        return [block for blocks in self.parts.values() for block in blocks]


@dataclass(eq=False, slots=True)
class Node:
    """One block of tokens behind one prefix.

    Attributes:
        public: its rows are there, and so are those of every block before it: what a match can reach.
    """

    key: bytes
    parent_key: bytes
    index: int
    parent: Node | None
    children: dict[bytes, Node] = field(default_factory=dict)
    rows: Entry | None = None
    state: Entry | None = None
    public: bool = False

    def entries(self) -> list[Entry]:
        return [entry for entry in (self.rows, self.state) if entry is not None]


@dataclass(eq=False)
class PrefixHit:
    """A usable prefix, pinned until it is released.

    Attributes:
        length_tokens: tokens that need not be run; 0 is a miss.
        rows: their full-attention rows, one entry a block, in order.
        state: window and linear state at exactly that length; None if the layout has none or it was not asked for.
        rows_tokens: how far rows alone reach. If that is more than ``length_tokens``, it is where this prompt leaves
            what is known, a good length to keep a state at (see :func:`~prfaas_net.cache.retention.snapshot_lengths`).
    """

    length_tokens: int
    rows: tuple[Entry, ...]
    state: Entry | None
    rows_tokens: int
    released: bool = False

    def entries(self) -> tuple[Entry, ...]:
        """All that is pinned."""
        return self.rows if self.state is None else (*self.rows, self.state)


@dataclass(eq=False)
class RunPlan:
    """Memory for one sequence, and what must be done before it is used.

    Attributes:
        first_block, n_blocks: the run.
        moves: pairs (from, to) of blocks to copy, in any order, before the run is written *and before the cache is
            asked anything else*: entries already say that they lie at the new place.
        evicted: entries that gave way. Their content is intact until the run or the moves are written.
    """

    first_block: int
    n_blocks: int
    moves: tuple[tuple[int, int], ...]
    evicted: tuple[Entry, ...]
