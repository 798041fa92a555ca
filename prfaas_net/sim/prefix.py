"""What a cluster has cached, for workloads whose prompts share prefixes: blocks named by their whole prefix, LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["PrefixCache"]


class PrefixCache:
    """A pool of blocks.

    A block's name stands for everything before it too, so a prefix is cached as far as its blocks are there without
    a gap. Hybrid models need a linear state at exactly that length; one is taken to be kept at every block.

    Args:
        capacity_blocks: the least recently used go beyond this; None keeps all.
    """

    def __init__(self, block_tokens: int, capacity_blocks: int | None = None) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match_tokens(self, block_ids: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of a prompt that are cached, from its beginning; touches nothing."""
        blocks, count = self._blocks, 0
        for block_id in block_ids:
            if block_id not in blocks:
                break
            count += 1
        return min(count * self.block_tokens, prompt_tokens)

    def add(self, block_ids: Sequence[int]) -> None:
        """Keep the blocks of a prompt; the last ones of it are the first to go."""
        blocks = self._blocks
        for block_id in reversed(block_ids):
            blocks[block_id] = None
            blocks.move_to_end(block_id)
        if self.capacity_blocks is not None:
            while len(blocks) > self.capacity_blocks:
                blocks.popitem(last=False)
