"""One node's memory as numbered blocks of one size: each is free, in the prefix cache, or part of a transfer.

All groups of state share the pool, so what one frees another can take. Prefix-cache blocks are taken one by one from
the high end; a sequence's buffer is a run of neighbours, taken as low as there is one. So the two rarely meet; where
they do, prefix-cache blocks are moved out of the way, since copying a block costs far less than making it again.

This class knows only the states of blocks. What lies in them is :class:`~prfaas_net.cache.prefix.PrefixCache`'s
concern, the memory itself the shell's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import IntEnum

import numpy as np

from prfaas_net.errors import InternalError, UsageError

__all__ = ["BlockPool", "BlockState"]


class BlockState(IntEnum):
    """What a block is used for: always exactly one of these."""

    FREE = 0
    PREFIX = 1
    TRANSFER = 2


class BlockPool:
    """The states of ``n_blocks`` memory blocks.

    Attributes:
        n_free, n_prefix, n_transfer: blocks in each state; their sum is always ``n_blocks``.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise UsageError("a pool needs blocks", expected="1 or more", found=n_blocks)
        self.n_blocks = n_blocks
        # One byte a block: searching bytes for bytes runs at memory speed, so there is no list of free blocks.
        self._states = bytearray(n_blocks)
        self._counts = [n_blocks, 0, 0]
        # No free block lies at or above this number.
        self._free_below = n_blocks

    @property
    def n_free(self) -> int:
        return self._counts[BlockState.FREE]

    @property
    def n_prefix(self) -> int:
        return self._counts[BlockState.PREFIX]

    @property
    def n_transfer(self) -> int:
        return self._counts[BlockState.TRANSFER]

    def state(self, block: int) -> BlockState:
        return BlockState(self._states[block])

    def take_scattered(self, n: int) -> list[int] | None:
        """``n`` free blocks for the prefix cache, the highest; None, and nothing taken, if too few are free."""
        if n > self.n_free:
            return None
        blocks = []
        at = self._free_below
        for _ in range(n):
            at = self._states.rfind(BlockState.FREE, 0, at)
            blocks.append(at)
        self._free_below = at if blocks else self._free_below
        self._put(blocks, BlockState.FREE, BlockState.PREFIX)
        return blocks

    def find_free_run(self, n: int) -> int | None:
        """First of the lowest ``n`` neighbours that are all free, or None."""
        first = self._states.find(bytes(n))
        return first if first >= 0 else None

    def find_run(self, n: int, fixed: Collection[int] = ()) -> int | None:
        """First block of the ``n`` neighbours that are cheapest to clear, or None if no such window can be cleared.

        A window can be cleared if no block of it belongs to a transfer or is in ``fixed``. It is the cheaper, the
        fewer prefix-cache blocks it has; among equals the lowest is taken.
        """
        if n > self.n_blocks:
            return None
        states = np.frombuffer(self._states, dtype=np.uint8)
        barred = states == BlockState.TRANSFER
        barred[list(fixed)] = True
        n_barred, n_prefix = (
            np.concatenate(([0], np.cumsum(mark, dtype=np.int64))) for mark in (barred, states == BlockState.PREFIX)
        )
        cost = n_prefix[n:] - n_prefix[:-n]
        cost[n_barred[n:] != n_barred[:-n]] = self.n_blocks + 1
        first = int(cost.argmin())
        return first if cost[first] <= self.n_blocks else None

    def take_run(self, first: int, n: int) -> list[tuple[int, int]]:
        """Make a window a transfer's. There must be ``n`` free blocks in the pool, wherever they are.

        Returns:
            Moves ``(from, to)`` of prefix-cache blocks that lay in the window: their content must be copied before
            the run is written. No block is in two moves.
        """
        window = range(first, first + n)
        states = self._states[first : first + n]
        if len(states) < n or n > self.n_free or BlockState.TRANSFER in states:
            raise UsageError("no room for the run", expected=f"{n} blocks", found=f"{self.n_free} free")
        moved = [block for block in window if self._states[block] == BlockState.PREFIX]
        self._put([b for b in window if self._states[b] == BlockState.FREE], BlockState.FREE, BlockState.TRANSFER)
        self._put(moved, BlockState.PREFIX, BlockState.TRANSFER)
        places = self.take_scattered(len(moved))
        assert places is not None  # as many as the window's own free blocks are fewer than n
        return list(zip(moved, places, strict=True))

    def release(self, blocks: Iterable[int], state: BlockState) -> None:
        """Free blocks that are in ``state``.

        Raises:
            UsageError: one of them is not: somebody frees what is not theirs.
        """
        blocks = list(blocks)
        if not blocks:
            return
        if state is BlockState.FREE or any(self._states[block] != state for block in blocks):
            raise UsageError("a block is freed that is not held", expected=state.name, found=blocks[:8])
        self._put(blocks, state, BlockState.FREE)
        self._free_below = max(self._free_below, max(blocks) + 1)

    def _put(self, blocks: list[int], before: BlockState, after: BlockState) -> None:
        for block in blocks:
            self._states[block] = after
        self._counts[before] -= len(blocks)
        self._counts[after] += len(blocks)

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InternalError: one does not hold.
        """
        counts = [self._states.count(state) for state in BlockState]
        if counts != self._counts or sum(counts) != self.n_blocks:
            raise InternalError("block counts are wrong", expected=counts, found=self._counts)
        if self._states.find(BlockState.FREE, self._free_below) >= 0:
            raise InternalError("a free block is out of sight", found=self._free_below)
