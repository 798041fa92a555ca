"""Where state is kept, and what pieces of a buffer that is."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas_net.cache.retention import choose_interval, snapshot_lengths, state_in_tokens
from prfaas_net.cache.slots import PAGE_BYTES, Slots, choose_block_size
from prfaas_net.errors import UsageError
from prfaas_net.kv import CacheLayout, KvKind, LayerLayout, RegionMap, TensorSpec
from prfaas_net.units import GiB, KiB, MiB

FULL, WINDOW, LINEAR = KvKind
LAYOUT = CacheLayout(
    "toy",
    "weights",
    (
        LayerLayout(0, LINEAR, (TensorSpec("recurrent", (2, 3, 3)), TensorSpec("conv", (6, 3)))),
        LayerLayout(1, FULL, (TensorSpec("k", (2, 5)), TensorSpec("v", (2, 5)))),
        LayerLayout(2, WINDOW, (TensorSpec("k", (1, 4)),), window_tokens=10),
        LayerLayout(3, FULL, (TensorSpec("latent", (7,), "bfloat16"),)),
    ),
)
# The 1T model of the paper's case study (Table 5): 173.92 MiB and 17,280 bytes a token.
PAPER = {LINEAR: int(173.92 * MiB), FULL: 17280 * 256}


def test_state_is_kept_at_the_last_boundaries() -> None:
    assert snapshot_lengths(1000, 256, None) == [768]
    assert snapshot_lengths(1024, 256, None) == [768, 1024]
    assert snapshot_lengths(255, 256, None) == []
    assert snapshot_lengths(256, 256, None) == [256]


def test_state_is_kept_at_every_interval_and_where_the_known_part_ends() -> None:
    assert snapshot_lengths(3000, 256, 1024) == [1024, 2048, 2816]
    assert snapshot_lengths(3000, 256, 1024, known_tokens=1536) == [1024, 1536, 2048, 2816]
    assert snapshot_lengths(3000, 256, 1024, start_tokens=2048, known_tokens=2048) == [2816]
    assert snapshot_lengths(2048, 256, 2048) == [1792, 2048]


def test_an_interval_that_is_no_whole_number_of_blocks_is_refused() -> None:
    for interval in (0, 128, 300):
        with pytest.raises(UsageError, match="whole number of blocks"):
            snapshot_lengths(3000, 256, interval)


def test_a_state_of_the_papers_model_weighs_ten_thousand_tokens() -> None:
    assert state_in_tokens(PAPER, 256) == pytest.approx(10_554, rel=1e-3)
    assert state_in_tokens({FULL: 100}, 256) == 0
    assert state_in_tokens({LINEAR: 100}, 256) == float("inf")


def test_states_at_intervals_take_at_most_a_quarter_of_what_rows_take() -> None:
    interval = choose_interval(PAPER, 256, 256 * GiB)
    assert interval is not None and interval % 256 == 0
    assert 4 * 10_554 <= interval < 4 * 10_554 + 256


def test_a_small_pool_or_a_layout_with_one_kind_of_state_keeps_only_the_ends() -> None:
    assert choose_interval(PAPER, 256, 4 * GiB) is None
    assert choose_interval({FULL: 4096}, 256, GiB) is None
    assert choose_interval({LINEAR: 4096}, 256, GiB) is None


def test_pieces_carry_a_prompts_state_from_one_buffer_to_another() -> None:
    """Copied piece by piece into another capacity's buffer, rows and states are the same arrays."""
    slots = Slots(LAYOUT, 4)
    assert slots.group_bytes == {LINEAR: (18 + 18) * 4, FULL: 4 * (80 + 14), WINDOW: 160}
    one, two = RegionMap(LAYOUT, 12), RegionMap(LAYOUT, 30)
    source = np.random.default_rng(5).integers(0, 255, one.total_bytes, dtype=np.uint8)
    target = np.zeros(two.total_bytes, dtype=np.uint8)
    for index in (0, 2):
        pairs = zip(slots.row_pieces(one, index), slots.row_pieces(two, index), strict=True)
        for a, b in pairs:
            assert a.n_bytes == b.n_bytes
            target[b.offset : b.offset + b.n_bytes] = source[a.offset : a.offset + a.n_bytes]
    for group in (WINDOW, LINEAR):
        for a, b in zip(slots.state_pieces(one, group, 12), slots.state_pieces(two, group, 12), strict=True):
            target[b.offset : b.offset + b.n_bytes] = source[a.offset : a.offset + a.n_bytes]
    for region in one:
        where = region.layer.index, region.tensor.name
        raw = source[region.offset :][: region.n_bytes].reshape(region.rows, -1)
        copy = target[two.region(*where).offset :][: two.region(*where).n_bytes].reshape(two.region(*where).rows, -1)
        if region.layer.kind is FULL:
            assert (copy[:4] == raw[:4]).all() and (copy[8:12] == raw[8:12]).all()
            assert not copy[4:8].any() and not copy[12:].any()
        else:
            assert (copy == raw).all()


def test_an_entrys_payload_is_as_large_as_its_pieces() -> None:
    slots, regions = Slots(LAYOUT, 4), RegionMap(LAYOUT, 40)
    assert sum(piece.n_bytes for piece in slots.row_pieces(regions, 9)) == slots.group_bytes[FULL]
    for group in (WINDOW, LINEAR):
        assert sum(p.n_bytes for p in slots.state_pieces(regions, group, 40)) == slots.group_bytes[group]
    assert sum(p.n_bytes for p in slots.state_pieces(regions, WINDOW, 6)) == 6 * 16, "a window that is not full yet"


def test_pieces_outside_of_the_buffer_are_refused() -> None:
    slots, regions = Slots(LAYOUT, 4), RegionMap(LAYOUT, 10)
    other = RegionMap(CacheLayout("other", "w", LAYOUT.layers), 10)
    with pytest.raises(UsageError, match="no such tokens"):
        slots.row_pieces(regions, 2)
    with pytest.raises(UsageError, match="no such tokens"):
        slots.state_pieces(regions, LINEAR, 11)
    with pytest.raises(UsageError, match="no state"):
        slots.state_pieces(regions, FULL, 4)
    with pytest.raises(UsageError, match="another layout"):
        slots.row_pieces(other, 0)
    with pytest.raises(UsageError, match="needs tokens"):
        Slots(LAYOUT, 0)


@pytest.mark.parametrize(
    "groups",
    [PAPER, {FULL: 8064 * 256, LINEAR: 25 * MiB}, {FULL: 100_000, WINDOW: 3 * MiB, LINEAR: 70_000}, {LINEAR: MiB}],
)
def test_memory_blocks_are_pages_that_entries_fill(groups: dict[KvKind, int]) -> None:
    size = choose_block_size(groups)
    assert size.block_bytes % PAGE_BYTES == 0 and size.block_bytes <= 4 * MiB
    for group, n_bytes in groups.items():
        assert size.entry_blocks[group] == -(-n_bytes // size.block_bytes)
        assert size.waste[group] <= 1 / 16
        assert size.waste[group] == pytest.approx(1 - n_bytes / (size.entry_blocks[group] * size.block_bytes))


def test_entries_smaller_than_a_page_say_what_they_waste() -> None:
    size = choose_block_size({FULL: 1024, LINEAR: 8 * KiB})
    assert (size.block_bytes, size.waste[FULL], size.waste[LINEAR]) == (PAGE_BYTES, 0.75, 0.0)


def test_a_layout_without_state_and_blocks_below_a_page_are_refused() -> None:
    with pytest.raises(UsageError, match="keeps no state"):
        choose_block_size({FULL: 0})
    with pytest.raises(UsageError, match="a page or more"):
        choose_block_size(PAPER, 100)
