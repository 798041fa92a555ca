"""The block pool: every block is exactly one of free, prefix cache and transfer."""

from __future__ import annotations

import pytest

from prfaas_net.cache.pool import BlockPool, BlockState
from prfaas_net.errors import InternalError, UsageError

FREE, PREFIX, TRANSFER = BlockState


def draw(pool: BlockPool) -> str:
    """The pool as text: ``.`` free, ``p`` prefix cache, ``T`` transfer."""
    pool.validate()
    return "".join(".pT"[pool.state(block)] for block in range(pool.n_blocks))


def pool_of(drawing: str) -> BlockPool:
    """A pool in a given state."""
    pool = BlockPool(len(drawing))
    for block in (i for i, c in enumerate(drawing) if c == "T"):
        pool.take_run(block, 1)
    pool.take_scattered(pool.n_free)
    pool.release((i for i, c in enumerate(drawing) if c == "."), PREFIX)
    assert draw(pool) == drawing
    return pool


def test_prefix_blocks_and_runs_grow_towards_each_other() -> None:
    pool = BlockPool(8)
    assert pool.find_free_run(3) == 0
    assert pool.take_run(0, 3) == []
    assert pool.take_scattered(2) == [7, 6]
    assert draw(pool) == "TTT...pp"
    assert (pool.n_free, pool.n_prefix, pool.n_transfer) == (3, 2, 3)


def test_a_run_takes_the_window_with_the_fewest_blocks_to_move() -> None:
    pool = pool_of(".p.p..p.Tp")
    assert pool.find_free_run(3) is None
    first = pool.find_run(4)
    assert first == 2
    assert pool.take_run(first, 4) == [(3, 7)]
    assert draw(pool) == ".pTTTTppTp"


def test_fixed_blocks_and_transfers_bar_a_window() -> None:
    pool = pool_of("p.p.T.p.p")
    assert pool.find_run(4) == 0
    assert pool.find_run(4, fixed=[2]) == 5
    assert pool.find_run(4, fixed=[2, 6]) is None
    assert pool.find_run(5) is None
    assert pool.find_run(10) is None


def test_scattered_blocks_come_all_or_not_at_all() -> None:
    pool = pool_of("T.T.")
    assert pool.take_scattered(3) is None
    assert draw(pool) == "T.T."
    assert pool.take_scattered(0) == []
    assert pool.take_scattered(2) == [3, 1]


def test_a_run_without_room_for_what_it_displaces_is_refused() -> None:
    pool = pool_of("pp.T")
    with pytest.raises(UsageError, match="no room for the run"):
        pool.take_run(0, 2)
    with pytest.raises(UsageError, match="no room for the run"):
        pool.take_run(2, 1 + 1)
    assert draw(pool) == "pp.T"


def test_only_what_is_held_can_be_freed() -> None:
    pool = pool_of("p.T")
    for blocks, state in (([1], PREFIX), ([0], TRANSFER), ([1], FREE)):
        with pytest.raises(UsageError, match="not held"):
            pool.release(blocks, state)
    pool.release([], PREFIX)
    pool.release([2], TRANSFER)
    assert draw(pool) == "p.."


def test_a_pool_that_lost_count_says_so() -> None:
    pool = pool_of("p.T")
    pool._states[0] = FREE
    with pytest.raises(InternalError, match="counts are wrong"):
        pool.validate()


def test_a_pool_needs_blocks() -> None:
    with pytest.raises(UsageError, match="needs blocks"):
        BlockPool(0)
