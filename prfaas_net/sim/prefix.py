"""What a cluster has cached: the real prefix cache, with blocks named as traces name them and nothing in them."""

from __future__ import annotations

from collections.abc import Sequence

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.prefix_tree import CacheChange
from prfaas_net.cache.retention import choose_interval, snapshot_lengths
from prfaas_net.kv import KvKind
from prfaas_net.scheduling import KvSize

__all__ = ["ClusterCache", "block_keys"]


def block_keys(block_ids: Sequence[int], prompt_tokens: int, block_tokens: int) -> bytes:
    """Keys of a prompt's full blocks, from the ids that a trace gives them; a partial last block has none."""
    full = prompt_tokens // block_tokens
    # No key is zero throughout: that is how the index marks an empty place.
    return b"".join((block_id + 1).to_bytes(KEY_BYTES, "little") for block_id in block_ids[:full])


class ClusterCache:
    """The pool of a whole cluster (the paper's hybrid prefix cache pool), as one prefix cache.

    Rows are matched as far as their blocks are there; a prefill goes on only from a length at which state was kept.

    Args:
        pool_bytes: memory for it, over all machines.

    Attributes:
        groups: kinds of state that are kept.
    """

    def __init__(self, kv: KvSize, block_tokens: int, pool_bytes: float) -> None:
        group_bytes = {
            KvKind.FULL: int(kv.bytes_per_token * block_tokens),
            KvKind.LINEAR: int(kv.constant_bytes),
            KvKind.WINDOW: int(kv.window_bytes_per_token * kv.window_tokens),
        }
        self.groups = frozenset(group for group, n_bytes in group_bytes.items() if n_bytes)
        block_bytes = max(1, group_bytes[KvKind.FULL] or max(group_bytes.values()))
        self._cache = PrefixCache(max(1, int(pool_bytes / block_bytes)), block_bytes, group_bytes, block_tokens)
        self._interval = choose_interval(group_bytes, block_tokens, int(pool_bytes))
        self._block_tokens = block_tokens

    def drain_changes(self) -> list[CacheChange]:
        """What has changed since the last call."""
        return self._cache.drain_changes()

    def snapshot_changes(self) -> list[CacheChange]:
        """All that is held, as changes from nothing."""
        return self._cache.snapshot_changes()

    def drop_all(self) -> None:
        """Everything is gone."""
        self._cache.drop_all()

    def match_tokens(self, keys: bytes, prompt_tokens: int, *, now: float) -> tuple[int, int]:
        """What a prefill there could go on from, and up to where rows are held, in tokens."""
        hit = self._cache.match(keys, n_tokens=prompt_tokens, need_state=True, now=now)
        self._cache.release(hit)
        return hit.length_tokens, hit.rows_tokens

    def add(self, keys: bytes, prompt_tokens: int, *, start_tokens: int, computed: bool, now: float) -> None:
        """Keep a prompt.

        Args:
            start_tokens: where its prefill started.
            computed: here, and so with states along the way; what lands brings the last one only.
        """
        n_blocks = len(keys) // KEY_BYTES
        if not n_blocks:
            return
        cache = self._cache
        _, known = self.match_tokens(keys, prompt_tokens, now=now)
        cache.commit(cache.insert_rows(keys, 0, n_blocks, now=now))
        if computed:
            lengths = snapshot_lengths(
                prompt_tokens, self._block_tokens, self._interval, start_tokens=start_tokens, known_tokens=known
            )
        else:
            lengths = [n_blocks * self._block_tokens]
        for length in lengths:
            entry = cache.insert_state(keys, length // self._block_tokens - 1, now=now)
            if entry is not None:
                cache.commit([entry])
