"""Where cached pieces lie in a sequence's buffer, how large they are, and how large a memory block should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prfaas_net.errors import UsageError
from prfaas_net.kv import CacheLayout, KvKind, RegionMap
from prfaas_net.units import MiB

__all__ = ["BlockSize", "Piece", "Slots", "choose_block_size"]

PAGE_BYTES = 4096
# Larger memory blocks mean less bookkeeping but more waste at the end of each sequence.
MAX_BLOCK_BYTES = 4 * MiB
# A sixteenth of the cache given away for round numbers is little beside what eviction order can win or lose.
WASTE_AIM = 1 / 16


class Piece(NamedTuple):
    """Bytes of a sequence's buffer. An entry's payload is its pieces one after the other."""

    offset: int
    n_bytes: int


class Slots:
    """The pieces of cached entries for one layout.

    Args:
        block_tokens: tokens of a block of tokens.

    Attributes:
        group_bytes: payload of an entry, of those groups that the layout has: rows of one block of tokens for
            ``FULL``; for ``WINDOW`` and ``LINEAR`` the state at one length (the largest there is).
    """

    def __init__(self, layout: CacheLayout, block_tokens: int) -> None:
        if block_tokens < 1:
            raise UsageError("a block needs tokens", expected="1 or more", found=block_tokens)
        self.layout = layout
        self.block_tokens = block_tokens
        self.group_bytes = dict.fromkeys((layer.kind for layer in layout.layers), 0)
        for layer in layout.layers:
            rows = {KvKind.FULL: block_tokens, KvKind.WINDOW: layer.window_tokens, KvKind.LINEAR: 1}[layer.kind]
            self.group_bytes[layer.kind] += rows * sum(tensor.row_bytes for tensor in layer.tensors)

    def row_pieces(self, regions: RegionMap, index: int) -> list[Piece]:
        """Full-attention rows of block ``index`` of the sequence, in a buffer laid out by ``regions``.

        Raises:
            UsageError: the buffer has no room for that block.
        """
        start = index * self.block_tokens
        self._check(regions, start + self.block_tokens)
        return [
            Piece(region.offset + start * region.tensor.row_bytes, self.block_tokens * region.tensor.row_bytes)
            for region in regions
            if region.layer.kind is KvKind.FULL
        ]

    def state_pieces(self, regions: RegionMap, group: KvKind, n_tokens: int) -> list[Piece]:
        """Window or linear state as it is after ``n_tokens`` tokens. A window not yet full has fewer bytes.

        Raises:
            UsageError: full attention has no such state, or the buffer no room for so many tokens.
        """
        if group is KvKind.FULL:
            raise UsageError("rows of full attention are no state", expected="window or linear", found=group.value)
        self._check(regions, n_tokens)
        return [
            Piece(region.offset, region.layer.rows(n_tokens) * region.tensor.row_bytes)
            for region in regions
            if region.layer.kind is group
        ]

    def _check(self, regions: RegionMap, n_tokens: int) -> None:
        if regions.layout.fingerprint != self.layout.fingerprint:
            raise UsageError("a buffer of another layout", expected=self.layout.model, found=regions.layout.model)
        if not 0 < n_tokens <= regions.capacity_tokens:
            raise UsageError(
                "the sequence has no such tokens", expected=f"1 to {regions.capacity_tokens}", found=n_tokens
            )


@dataclass(frozen=True)
class BlockSize:
    """A size for memory blocks.

    Attributes:
        entry_blocks: memory blocks of an entry, by group.
        waste: share of an entry's memory that holds nothing, by group.
    """

    block_bytes: int
    entry_blocks: dict[KvKind, int]
    waste: dict[KvKind, float]


def choose_block_size(group_bytes: Mapping[KvKind, int], max_block_bytes: int = MAX_BLOCK_BYTES) -> BlockSize:
    """A whole number of pages, such that a full-attention entry is a whole number of blocks.

    The largest size that wastes at most a sixteenth of every kind of entry; if none does, the least wasteful.

    Args:
        group_bytes: see :class:`Slots`.
    """
    sizes = {group: n for group, n in group_bytes.items() if n > 0}
    if not sizes:
        raise UsageError("the layout keeps no state", expected="at least one group with bytes")
    if max_block_bytes < PAGE_BYTES:
        raise UsageError("a memory block is a page or more", expected=PAGE_BYTES, found=max_block_bytes)
    # Without full attention the largest state is what blocks are cut from.
    unit = sizes.get(KvKind.FULL, max(sizes.values()))
    best: BlockSize | None = None
    for parts in range(-(-unit // max_block_bytes), max(1, unit // PAGE_BYTES) + 1):
        size = _judge(-(-unit // (parts * PAGE_BYTES)) * PAGE_BYTES, sizes)
        if max(size.waste.values()) <= WASTE_AIM:
            return size
        if best is None or max(size.waste.values()) < max(best.waste.values()):
            best = size
    assert best is not None  # parts starts at 1 or more and the range has at least that one
    return best


def _judge(block_bytes: int, sizes: Mapping[KvKind, int]) -> BlockSize:
    blocks = {group: -(-n // block_bytes) for group, n in sizes.items()}
    waste = {group: 1 - n / (blocks[group] * block_bytes) for group, n in sizes.items()}
    return BlockSize(block_bytes, blocks, waste)
