"""The prefix cache of one node: what it answers, what it never loses, and what it gives up first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.prefix_tree import CacheChange, Entry
from prfaas_net.errors import BusyError, InternalError, RefusedError, UsageError
from prfaas_net.kv import KvKind

FULL, WINDOW, LINEAR = KvKind
TOKENS = 4
HYBRID = {FULL: 20, LINEAR: 30}
DENSE = {FULL: 20}


def cache_of(groups: dict[KvKind, int], n_blocks: int = 40, *, rows_alone: bool = False) -> PrefixCache:
    """Memory blocks of 10 bytes."""
    return PrefixCache(n_blocks, 10, groups, TOKENS, rows_alone=rows_alone)


def keys_of(prompt: str) -> bytes:
    """Keys of a prompt that is written with one letter a block of tokens."""
    return prefix_keys(PrefixScope("layout", TOKENS), [ord(letter) for letter in prompt for _ in range(TOKENS)])


def key_of(prompt: str) -> bytes:
    """Key of its last block."""
    return keys_of(prompt)[-KEY_BYTES:]


def put(cache: PrefixCache, prompt: str, *states: int, now: float = 0.0) -> list[Entry]:
    """Cache a prompt's rows, and its state after so many blocks."""
    keys = keys_of(prompt)
    entries = cache.insert_rows(keys, 0, len(prompt), now=now)
    for n in states:
        entry = cache.insert_state(keys, n - 1, now=now)
        assert entry is not None
        entries.append(entry)
    cache.commit(entries)
    cache.validate()
    return entries


def reach(cache: PrefixCache, prompt: str, *, need_state: bool = True, extra_tokens: int = 1) -> int:
    """Blocks that a prompt can use; ``extra_tokens`` follow on its last full block."""
    n_tokens = len(prompt) * TOKENS + extra_tokens
    hit = cache.match(keys_of(prompt), n_tokens=n_tokens, need_state=need_state, now=0.0)
    cache.release(hit)
    cache.validate()
    return hit.length_tokens // TOKENS


def test_a_hit_needs_the_state_at_exactly_its_length() -> None:
    """The paper's rule: rows to block 4 but state only at 3 make a hit of 3; no state, no hit."""
    cache = cache_of(HYBRID)
    put(cache, "abcd", 3)
    assert reach(cache, "abcd") == 3
    assert reach(cache, "abce") == 3
    assert reach(cache, "ab") == 0
    assert reach(cache, "ab", need_state=False) == 2
    hit = cache.match(keys_of("abcd"), n_tokens=99, need_state=True, now=0.0)
    assert (len(hit.rows), hit.state, hit.rows_tokens) == (3, hit.rows[-1].node.state, 4 * TOKENS)


def test_every_group_of_state_must_be_there() -> None:
    cache = cache_of({FULL: 10, WINDOW: 20, LINEAR: 30})
    put(cache, "ab", 2)
    hit = cache.match(keys_of("ab"), n_tokens=9, need_state=True, now=0.0)
    assert hit.state is not None
    assert {group: len(blocks) for group, blocks in hit.state.parts.items()} == {WINDOW: 2, LINEAR: 3}


def test_without_state_groups_rows_are_enough() -> None:
    cache = cache_of(DENSE)
    put(cache, "abc")
    assert reach(cache, "abd") == 2
    assert cache.insert_state(keys_of("abc"), 2, now=0.0) is None


def test_a_layout_without_full_attention_is_reused_by_its_states_alone() -> None:
    cache = cache_of({LINEAR: 30})
    assert put(cache, "abcd", 2, 4) != []
    assert [reach(cache, prompt) for prompt in ("a", "abc", "abcd", "abcde", "xbcd")] == [0, 2, 4, 4, 0]
    assert cache.drain_changes()[0] == CacheChange("stored", LINEAR, key_of("a"), key_of("ab"))


def test_one_token_is_always_left_to_run() -> None:
    cache = cache_of(DENSE)
    put(cache, "abc")
    assert reach(cache, "abc", extra_tokens=0) == 2
    assert reach(cache, "", extra_tokens=0) == 0


def test_what_is_still_filling_is_never_matched() -> None:
    cache = cache_of(HYBRID)
    keys = keys_of("ab")
    rows = cache.insert_rows(keys, 0, 2, now=0.0)
    state = cache.insert_state(keys, 1, now=0.0)
    assert state is not None
    assert reach(cache, "ab", need_state=False) == 0
    cache.commit(rows)
    assert reach(cache, "ab") == 0
    cache.commit([state])
    assert reach(cache, "ab") == 2


def test_rows_committed_out_of_order_are_reached_when_the_gap_closes() -> None:
    """Two prompts with a common beginning are copied in at the same time: each does its part."""
    cache = cache_of(DENSE)
    first = cache.insert_rows(keys_of("ab"), 0, 2, now=0.0)
    second = cache.insert_rows(keys_of("abcd"), 0, 4, now=0.0)
    assert [entry.index for entry in second] == [2, 3]
    cache.commit(second)
    assert reach(cache, "abcd") == 0
    assert cache.drain_changes() == []
    cache.commit(first[::-1])
    assert reach(cache, "abcd") == 4
    assert [change.key for change in cache.drain_changes()] == [key_of("abcd"[:n]) for n in (1, 2, 3, 4)]


def test_what_is_abandoned_takes_with_it_what_was_built_on_it() -> None:
    cache = cache_of(HYBRID)
    a, b, c = cache.insert_rows(keys_of("abc"), 0, 3, now=0.0)
    state = cache.insert_state(keys_of("abc"), 2, now=0.0)
    assert state is not None
    cache.commit([a, c])
    cache.abandon([b])
    cache.validate()
    cache.commit([state])
    cache.validate()
    assert cache.pool.n_prefix == 2
    assert reach(cache, "abc", need_state=False) == 1
    put(cache, "abc", 3)
    assert reach(cache, "abc") == 3


def test_nothing_is_held_twice() -> None:
    cache = cache_of(HYBRID)
    put(cache, "ab", 2)
    assert cache.insert_rows(keys_of("ab"), 0, 2, now=0.0) == []
    assert cache.insert_state(keys_of("ab"), 1, now=0.0) is None
    assert [entry.index for entry in cache.insert_rows(keys_of("abc"), 1, 2, now=0.0)] == [2]


def test_rows_and_states_that_follow_on_nothing_are_not_taken() -> None:
    cache = cache_of(HYBRID)
    assert cache.insert_rows(keys_of("ab"), 1, 1, now=0.0) == []
    assert cache.insert_state(keys_of("ab"), 1, now=0.0) is None
    assert cache.pool.n_prefix == 0


def test_least_recently_used_goes_first_from_its_end() -> None:
    cache = cache_of(DENSE, n_blocks=12)
    put(cache, "abc")
    put(cache, "xyz")
    assert reach(cache, "abc") == 3
    put(cache, "mn")
    assert (reach(cache, "abc"), reach(cache, "xyz"), reach(cache, "mn")) == (3, 1, 2)
    assert cache.stats.evictions == {FULL: 2}


def test_what_costs_more_per_byte_stays_longer() -> None:
    cache = PrefixCache(12, 10, DENSE, TOKENS, cost=lambda start, stop: 9.0 if start else 1.0)
    put(cache, "a")
    cache_keys = keys_of("xy")
    cache.commit(cache.insert_rows(cache_keys, 0, 2, now=0.0))
    for prompt in "klm":
        put(cache, prompt)
    for prompt in "nop":
        put(cache, prompt)
    assert reach(cache, "xy") == 2
    assert reach(cache, "a") == 0


def test_rows_that_no_state_makes_usable_go_before_everything_else() -> None:
    cache = cache_of(HYBRID, n_blocks=14)
    put(cache, "ab", 2)  # 7 blocks
    put(cache, "xyz")  # 6 blocks, the younger ones
    put(cache, "m")
    put(cache, "no")
    assert reach(cache, "ab") == 2
    assert reach(cache, "xyz", need_state=False) == 0


def test_a_decode_node_keeps_rows_without_state_by_age() -> None:
    cache = cache_of(HYBRID, n_blocks=8, rows_alone=True)
    put(cache, "ab")
    put(cache, "xy")
    put(cache, "m")
    assert (reach(cache, "ab", need_state=False), reach(cache, "xy", need_state=False)) == (1, 2)


def test_a_state_is_worth_the_tokens_that_only_it_makes_reusable() -> None:
    """The state close behind another is the first to go, though it is the youngest."""
    cache = cache_of({FULL: 10, LINEAR: 30}, n_blocks=20)
    put(cache, "abcdefg", 3, 6, 7)
    keys = keys_of("abcdefgh")
    assert reach(cache, "abcdefg") == 7
    plan = cache.reserve_run(50, now=0.0)
    assert [(entry.is_rows, entry.index) for entry in plan.evicted] == [(False, 6)]
    assert reach(cache, "abcdefg") == 6
    assert cache.insert_rows(keys, 0, 8, now=0.0) != []


def test_a_state_that_nothing_goes_on_from_any_more_is_as_dear_as_its_rows_make_it() -> None:
    """While something goes on from it, it is worth much for its few bytes; then its rows are its bytes too."""
    cache = cache_of({FULL: 20, LINEAR: 10}, n_blocks=22)
    put(cache, "abc", 2, 3)
    put(cache, "uvwxyz", 6)
    plan = cache.reserve_run(30, now=0.0)
    assert [(entry.key, entry.is_rows) for entry in plan.evicted] == [(key_of("abc"), False), (key_of("abc"), True)]
    plan = cache.reserve_run(40, now=0.0)
    assert [(entry.key, entry.is_rows) for entry in plan.evicted] == [(key_of("ab"), False), (key_of("ab"), True)]
    assert reach(cache, "uvwxyz") == 6


def test_state_that_cannot_fit_evicts_nothing() -> None:
    cache = cache_of(HYBRID, n_blocks=10)
    put(cache, "ab", 2)
    hit = cache.match(keys_of("ab"), n_tokens=9, need_state=True, now=0.0)
    put(cache, "x")
    assert cache.insert_state(keys_of("x"), 0, now=0.0) is None
    assert cache.stats.declined == 1 and not cache.stats.evictions
    cache.release(hit)
    assert cache.insert_state(keys_of("x"), 0, now=0.0) is not None


def test_as_many_rows_are_taken_in_as_there_is_room() -> None:
    cache = cache_of(DENSE, n_blocks=5)
    assert [entry.index for entry in put(cache, "abcd")] == [0, 1]
    assert cache.stats.declined == 2
    hit = cache.match(keys_of("ab"), n_tokens=9, need_state=True, now=0.0)
    assert cache.insert_rows(keys_of("x"), 0, 1, now=0.0) == []
    assert len(hit.rows) == 2


def test_a_transfer_evicts_what_it_needs_and_moves_the_rest_aside() -> None:
    cache = cache_of(DENSE, n_blocks=10)
    low = cache.reserve_run(40, now=0.0)
    put(cache, "abc")
    cache.release_run(low)
    [x] = put(cache, "x")
    assert x.blocks() == [3, 2]
    plan = cache.reserve_run(40, now=0.0)
    assert (plan.first_block, plan.n_blocks) == (0, 4)
    assert [entry.key for entry in plan.evicted] == [key_of("abc")]
    assert plan.moves == ((2, 5), (3, 4))
    assert x.blocks() == [4, 5]
    assert (reach(cache, "abc"), reach(cache, "x")) == (2, 1)
    assert cache.stats.blocks_moved == 2


def test_pinned_entries_are_neither_evicted_nor_moved() -> None:
    cache = cache_of(DENSE, n_blocks=6)
    put(cache, "ab")
    hit = cache.match(keys_of("ab"), n_tokens=9, need_state=True, now=0.0)
    places = [entry.blocks() for entry in hit.rows]
    with pytest.raises(BusyError, match="no room for a KVCache"):
        cache.reserve_run(30, now=0.0)
    cache.validate()
    plan = cache.reserve_run(20, now=0.0)
    assert [entry.blocks() for entry in hit.rows] == places and not plan.moves
    cache.release(hit)
    cache.release(hit)
    cache.release_run(plan)
    assert cache.reserve_run(60, now=0.0).n_blocks == 6


def test_a_run_larger_than_the_pool_is_refused_for_good() -> None:
    with pytest.raises(RefusedError, match="larger than the pool"):
        cache_of(DENSE, n_blocks=4).reserve_run(41, now=0.0)


def test_a_run_is_given_back_once() -> None:
    cache = cache_of(DENSE)
    plan = cache.reserve_run(1, now=0.0)
    cache.release_run(plan)
    with pytest.raises(UsageError, match="given back twice"):
        cache.release_run(plan)


def test_dropping_all_leaves_what_is_in_use_to_its_users() -> None:
    cache = cache_of(HYBRID)
    put(cache, "ab", 2)
    hit = cache.match(keys_of("ab"), n_tokens=9, need_state=True, now=0.0)
    filling = cache.insert_rows(keys_of("abc"), 2, 1, now=0.0)
    put(cache, "x")
    cache.drop_all()
    cache.validate()
    assert cache.drain_changes()[-1] == CacheChange("cleared")
    assert cache.snapshot_changes() == []
    assert cache.pool.n_prefix == 9
    assert reach(cache, "abc", need_state=False) == 0
    put(cache, "ab", 2)
    cache.release(hit)
    cache.commit(filling)
    cache.validate()
    assert cache.pool.n_prefix == 7
    assert reach(cache, "abc") == 2


def test_changes_tell_what_can_be_matched_parents_first() -> None:
    cache = cache_of(HYBRID, n_blocks=9)
    put(cache, "ab", 2)
    a, b = key_of("a"), key_of("ab")
    stored = [
        CacheChange("stored", FULL, b"", a),
        CacheChange("stored", FULL, a, b),
        CacheChange("stored", LINEAR, a, b),
    ]
    assert sorted(cache.drain_changes()) == sorted(stored)
    assert sorted(cache.snapshot_changes()) == sorted(stored)
    cache.reserve_run(50, now=0.0)
    assert cache.drain_changes() == [CacheChange("removed", LINEAR, a, b)]
    assert cache.snapshot_changes() == stored[:2]
    assert cache.drain_changes() == []


def test_the_figures_add_up() -> None:
    cache = cache_of(HYBRID)
    put(cache, "ab", 2)
    reach(cache, "ab")
    reach(cache, "x")
    stats = cache.stats
    assert (stats.queries, stats.hits, stats.tokens_asked, stats.tokens_reused) == (2, 1, 9 + 5, 8)
    assert stats.bytes_held == {FULL: 40, LINEAR: 30} and stats.entries == {FULL: 2, LINEAR: 1}
    cache.reserve_run(400, now=7.0)
    assert stats.evictions == {FULL: 2, LINEAR: 1}
    assert stats.evicted_idle_s == 7.0
    assert not any(stats.bytes_held.values())


def test_calls_out_of_order_are_refused() -> None:
    cache = cache_of(DENSE)
    entries = put(cache, "a")
    for call in (cache.commit, cache.abandon):
        with pytest.raises(UsageError, match="not being filled"):
            call(entries)
    with pytest.raises(UsageError, match="fewer keys"):
        cache.insert_rows(keys_of("a"), 1, 1, now=0.0)
    with pytest.raises(UsageError, match="need a size"):
        PrefixCache(4, 0, DENSE, TOKENS)


def _lose_owner(cache: PrefixCache) -> None:
    cache._owners.popitem()


def _lose_run(cache: PrefixCache) -> None:
    cache._runs.clear()


def _swap_block(cache: PrefixCache) -> None:
    [entry] = {e for e in cache._owners.values() if e.index == 0}
    entry.parts[FULL][0] = 0
    cache._owners = {b: e for e in set(cache._owners.values()) for b in e.blocks()}


def _pin(cache: PrefixCache) -> None:
    next(iter(cache._owners.values())).pins += 1


def _empty_queue(cache: PrefixCache) -> None:
    cache._queue.clear()


def _hide(cache: PrefixCache) -> None:
    next(iter(cache._nodes.values())).public = False


@pytest.mark.parametrize("damage", [_lose_owner, _lose_run, _swap_block, _pin, _empty_queue, _hide])
def test_a_cache_that_lost_track_says_so(damage: Callable[[PrefixCache], None]) -> None:
    """What every other test relies on to see a leak."""
    cache = cache_of(DENSE)
    put(cache, "ab")
    cache.reserve_run(10, now=0.0)
    damage(cache)
    with pytest.raises(InternalError):
        cache.validate()
