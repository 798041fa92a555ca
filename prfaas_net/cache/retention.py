"""At which lengths of a prompt its window and linear state is kept.

Rows can be reused up to any block, state only at exactly the length at which it was kept. One state of a hybrid model
costs as much memory as thousands of tokens of rows, so one after every block would fill the pool with states. Kept are:

* the last block boundary before the end, which the same prompt, asked again, starts from; and the end itself if it is
  a block boundary, which the next turn of a conversation starts from;
* where the prompt leaves what the cache knows: others will leave there too (a system prompt, a document);
* one every *retention interval*, for branches that nobody has seen yet.

How the interval was chosen, with figures: ``docs/cache.md``.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas_net.errors import UsageError
from prfaas_net.kv import KvKind

__all__ = ["choose_interval", "snapshot_lengths", "state_in_tokens"]

# States at intervals take at most this share of the memory that the rows take (docs/cache.md, "Retention interval").
INTERVAL_SHARE = 0.25
# A pool that holds few long prompts has no room for guesses: then only the ends and the known branches are kept.
MIN_POOL_INTERVALS = 16


def state_in_tokens(group_bytes: Mapping[KvKind, int], block_tokens: int) -> float:
    """How many tokens' rows one state weighs; infinite without full attention.

    Args:
        group_bytes: see :class:`~prfaas_net.cache.slots.Slots`.
    """
    state_bytes = sum(n for group, n in group_bytes.items() if group is not KvKind.FULL)
    row_bytes = group_bytes.get(KvKind.FULL, 0)
    if not row_bytes:
        return float("inf") if state_bytes else 0.0
    return state_bytes * block_tokens / row_bytes


def choose_interval(group_bytes: Mapping[KvKind, int], block_tokens: int, pool_bytes: int) -> int | None:
    """The retention interval in tokens, a multiple of ``block_tokens``; None keeps none between the ends.

    Args:
        group_bytes: see :class:`~prfaas_net.cache.slots.Slots`.
        pool_bytes: memory of the node's pool.
    """
    weight_tokens = state_in_tokens(group_bytes, block_tokens)
    if not weight_tokens or weight_tokens == float("inf"):
        return None
    interval = max(1, -int(-weight_tokens / INTERVAL_SHARE // block_tokens)) * block_tokens
    row_bytes = group_bytes[KvKind.FULL] / block_tokens
    held_tokens = pool_bytes / (row_bytes * (1 + INTERVAL_SHARE))
    return interval if held_tokens >= MIN_POOL_INTERVALS * interval else None


def snapshot_lengths(
    n_tokens: int, block_tokens: int, interval_tokens: int | None, *, start_tokens: int = 0, known_tokens: int = 0
) -> list[int]:
    """Lengths at which to keep state, ascending, all above ``start_tokens`` and full blocks.

    Args:
        n_tokens: of the prompt. A length equal to it is what the prefill ends with.
        start_tokens: the prefill starts there.
        known_tokens: how far the cache has this prompt's rows (``PrefixHit.rows_tokens``).

    Raises:
        UsageError: the interval is not a whole number of blocks.
    """
    if interval_tokens is not None and (interval_tokens < block_tokens or interval_tokens % block_tokens):
        raise UsageError(
            "a retention interval is a whole number of blocks", expected=block_tokens, found=interval_tokens
        )
    last = (n_tokens - 1) // block_tokens * block_tokens
    lengths = {last, n_tokens // block_tokens * block_tokens, known_tokens // block_tokens * block_tokens}
    if interval_tokens is not None:
        lengths.update(range(interval_tokens, n_tokens, interval_tokens))
    return sorted(length for length in lengths if start_tokens < length <= n_tokens)
