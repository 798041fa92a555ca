"""The cluster's cache in a simulation is the real one: rows match block by block, state only where it was kept."""

from __future__ import annotations

from prfaas_net.scheduling import KvSize
from prfaas_net.sim.case_study import paper_workload
from prfaas_net.sim.prefix import ClusterCache, block_keys

BLOCK = 512


def keys_of(*block_ids: int) -> bytes:
    return block_keys(block_ids, len(block_ids) * BLOCK, BLOCK)


def test_the_next_turn_goes_on_from_the_end_of_the_last() -> None:
    """What was computed here is found up to its last full block."""
    cache = ClusterCache(paper_workload().kv, BLOCK, 1e12)
    cache.add(keys_of(1, 2, 3), 3 * BLOCK + 7, start_tokens=0, computed=True, now=0.0)
    assert cache.match_tokens(keys_of(1, 2, 3, 4), 4 * BLOCK, now=1.0) == (3 * BLOCK, 3 * BLOCK)


def test_rows_without_state_are_not_enough_for_a_prefill() -> None:
    """A branch in the middle of what has landed has rows, and nothing to go on from."""
    cache = ClusterCache(paper_workload().kv, BLOCK, 1e12)
    cache.add(keys_of(1, 2, 3), 3 * BLOCK, start_tokens=0, computed=False, now=0.0)
    assert cache.match_tokens(keys_of(1, 2, 9), 3 * BLOCK, now=1.0) == (0, 2 * BLOCK)


def test_a_model_without_state_is_matched_block_by_block() -> None:
    """Rows alone decide."""
    cache = ClusterCache(KvSize(0, 1000), BLOCK, 1e9)
    cache.add(keys_of(1, 2, 3), 3 * BLOCK, start_tokens=0, computed=False, now=0.0)
    assert cache.match_tokens(keys_of(1, 2, 9), 3 * BLOCK, now=1.0) == (2 * BLOCK, 2 * BLOCK)


def test_a_small_pool_forgets() -> None:
    """Room for one prompt: the older one goes."""
    cache = ClusterCache(KvSize(0, 1000), BLOCK, 3 * BLOCK * 1000)
    for first in (10, 20):
        cache.add(keys_of(first, first + 1, first + 2), 3 * BLOCK, start_tokens=0, computed=True, now=float(first))
    assert cache.match_tokens(keys_of(10, 11, 12), 3 * BLOCK + 1, now=30.0)[0] < 3 * BLOCK
    assert cache.match_tokens(keys_of(20, 21, 22), 3 * BLOCK + 1, now=30.0)[0] == 3 * BLOCK


def test_a_partial_block_has_no_key() -> None:
    """Ids of a trace name it, a cache does not."""
    assert len(block_keys((1, 2, 3), 2 * BLOCK + 5, BLOCK)) == 2 * len(block_keys((1,), BLOCK, BLOCK))
