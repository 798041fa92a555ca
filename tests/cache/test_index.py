"""The index of blocks beside a set of triples, where its table is crowded, rebuilt and widened."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_net.cache.index import MAX_LOAD, BlockIndex
from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.errors import UsageError

Triple = tuple[bytes, int, int]


def key(i: int) -> bytes:
    return hashlib.sha256(str(i).encode()).digest()[:KEY_BYTES]


def keys(*numbers: int) -> bytes:
    return b"".join(key(i) for i in numbers)


def triples(index: BlockIndex, numbers: range) -> set[Triple]:
    """All that an index says of some keys."""
    masks = index.masks(keys(*numbers))
    found = set()
    for i, number in enumerate(numbers):
        for node in range(index.n_nodes):
            for group in range(index.n_groups):
                if int(masks[i, node // 64, group]) >> (node % 64) & 1:
                    found.add((key(number), node, group))
    return found


CHANGE = st.tuples(
    st.sampled_from(["add", "remove", "drop"]),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([0, 1, 63, 64, 130]), st.integers(0, 1)), max_size=30),
)


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(CHANGE, max_size=12), seed=st.integers(0, 1 << 64))
def test_it_holds_what_a_set_holds(changes: list[tuple[str, list[tuple[int, int, int]]]], seed: int) -> None:
    """In batches with repetitions, over several words of nodes; counts included."""
    index, held = BlockIndex(2, seed=seed), set[Triple]()
    for action, entries in changes:
        given_keys = b"".join(key(i) for i, _, _ in entries)
        nodes = np.array([node for _, node, _ in entries], dtype=np.int64)
        groups = np.array([group for _, _, group in entries], dtype=np.int64)
        changed = {(key(i), node, group) for i, node, group in entries}
        if action == "add":
            assert index.add(given_keys, nodes, groups) == len(changed - held)
            held |= changed
        elif action == "remove":
            assert index.remove(given_keys, nodes, groups) == len(changed & held)
            held -= changed
        elif entries:
            index.drop(entries[0][1])
            held = {triple for triple in held if triple[1] != entries[0][1]}
        assert index.n_blocks == len({name for name, _, _ in held})
        assert all(index.held(node) == sum(n == node for _, n, _ in held) for node in (0, 1, 63, 64, 130))
    assert triples(index, range(61)) == held
    for i, node, group in [(i, node, group) for i in range(61) for node in (0, 63, 130) for group in (0, 1)]:
        assert index.holds(key(i), node, group) == ((key(i), node, group) in held)


def test_it_grows_and_forgets_nothing() -> None:
    index = BlockIndex(1)
    for start in range(0, 20_000, 1000):
        index.add(keys(*range(start, start + 1000)), start // 1000, 0)
    assert index.n_blocks == 20_000
    assert triples(index, range(0, 20_000, 501)) == {(key(i), i // 1000, 0) for i in range(0, 20_000, 501)}


def test_blocks_that_come_and_go_do_not_make_it_grow() -> None:
    """Dead keys are left out when the table is rebuilt."""
    index = BlockIndex(1)
    index.add(keys(*range(300)), 0, 0)
    size = index.memory_bytes
    for start in range(1000, 21_000, 200):
        index.add(keys(*range(start, start + 200)), 1, 0)
        index.remove(keys(*range(start, start + 200)), 1, 0)
    assert index.memory_bytes == size
    assert triples(index, range(300)) == {(key(i), 0, 0) for i in range(300)}


def test_blocks_that_another_node_holds_need_no_room() -> None:
    index = BlockIndex(1)
    everything = keys(*range(700))
    index.add(everything, 0, 0)
    size = index.memory_bytes
    for node in range(1, 60):
        index.add(everything, node, 0)
    assert index.memory_bytes == size


def test_a_block_costs_less_than_200_bytes_just_after_growing() -> None:
    """The worst moment, with two groups on 64 nodes."""
    index, most = BlockIndex(2), 0.0
    for start in range(0, 60_000, 500):
        index.add(keys(*range(start, start + 500)), start % 64, 0)
        if index.n_blocks > 5000:
            most = max(most, index.memory_bytes / index.n_blocks)
    assert 90 < most < 200


def test_keys_that_all_want_one_slot_are_told_apart() -> None:
    """Chosen by somebody who knows the hash: slow, and right."""
    index = BlockIndex(1)
    crowd, i = list[bytes](), 0
    while len(crowd) < 40:
        words = np.frombuffer(key(i), dtype="<u8").reshape(1, 2)
        if int(index._home(words)[0]) >> 5 == 31:  # the last 32 of 1024 slots: they run over its end
            crowd.append(key(i))
        i += 1
    index.add(b"".join(crowd[::2]), 3, 0)
    masks = index.masks(b"".join(crowd))[:, 0, 0]
    assert masks.tolist() == [8, 0] * 20
    assert [index.holds(name, 3, 0) for name in crowd] == [True, False] * 20


def test_another_seed_is_another_order() -> None:
    words = np.frombuffer(keys(*range(50)), dtype="<u8").reshape(-1, 2)
    assert BlockIndex(1, seed=1)._home(words).tolist() != BlockIndex(1, seed=2)._home(words).tolist()


def test_room_made_at_once_is_enough() -> None:
    index = BlockIndex(1, capacity=10_000)
    size = index.memory_bytes
    index.add(keys(*range(10_000)), 0, 0)
    assert index.memory_bytes == size
    assert index.n_blocks / (1 << index._bits) < MAX_LOAD


def test_half_a_key_is_a_callers_error() -> None:
    with pytest.raises(UsageError):
        BlockIndex(1).add(b"half a key", 0, 0)
    assert BlockIndex(1).add(b"", 0, 0) == 0
    assert not BlockIndex(1).holds(key(1), 1000, 0)
