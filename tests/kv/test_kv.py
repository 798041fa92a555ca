"""Layouts, regions, manifests: both sides must come to the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.errors import ConfigError, IncompatibleError, UsageError
from prfaas_net.kv import CacheLayout, ChunkTable, KvKind, LayerLayout, Manifest, RegionMap, TensorSpec
from prfaas_net.kv.chunks import MAX_CHUNK_BYTES

LAYOUT = CacheLayout(
    "hybrid",
    "w1",
    (
        LayerLayout(0, KvKind.LINEAR, (TensorSpec("recurrent", (2, 3, 3)), TensorSpec("conv", (6, 3)))),
        LayerLayout(1, KvKind.FULL, (TensorSpec("k", (2, 4)), TensorSpec("v", (2, 4), "float16"))),
        LayerLayout(2, KvKind.WINDOW, (TensorSpec("k", (1, 4)),), window_tokens=8),
        LayerLayout(4, KvKind.FULL, (TensorSpec("latent", (5,)),)),
    ),
)
CASES = st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 17), st.sampled_from([16, 64, 100, 4096]))


def test_bytes_by_kind_follow_the_lengths() -> None:
    """Full attention grows with the prompt, the window stops at its size, linear state is constant."""
    assert LAYOUT.kv_bytes(10) == {
        KvKind.FULL: 10 * (32 + 16 + 20),
        KvKind.WINDOW: 8 * 16,
        KvKind.LINEAR: 72 + 72,
    }
    assert LAYOUT.kv_bytes(1000)[KvKind.WINDOW] == 8 * 16
    assert LAYOUT.kv_bytes(1000)[KvKind.LINEAR] == 144


def test_the_fingerprint_covers_what_must_agree_and_nothing_else() -> None:
    """Another name is the same model; another dtype, shape or weights are not."""
    renamed = CacheLayout("other name", LAYOUT.weights_digest, LAYOUT.layers)
    reweighted = CacheLayout(LAYOUT.model, "w2", LAYOUT.layers)
    assert renamed.fingerprint == LAYOUT.fingerprint
    assert reweighted.fingerprint != LAYOUT.fingerprint
    assert CacheLayout.from_json(LAYOUT.to_json()) == LAYOUT


def test_layers_are_listed_once_in_order() -> None:
    """A layout that names a layer twice is refused."""
    with pytest.raises(UsageError):
        CacheLayout("x", "w", (LAYOUT.layers[1], LAYOUT.layers[0]))


@given(CASES)
def test_chunks_cover_exactly_the_rows_of_the_range(case: tuple[int, int, int, int]) -> None:
    """Every byte that the destination lacks is in exactly one chunk; no other byte is."""
    start, length, chunk_tokens, max_bytes = case
    manifest = Manifest(LAYOUT, start, start + length, chunk_tokens, max_bytes)
    regions = RegionMap(LAYOUT, start + length + 3)
    buffer = np.zeros(regions.total_bytes, dtype=np.uint8)
    for view in manifest.views(regions, memoryview(buffer)):  # type: ignore[arg-type]
        marks = np.frombuffer(view, dtype=np.uint8)
        marks += 1
    for region in regions:
        n_rows = region.layer.rows(start + length)
        first = start if region.layer.kind is KvKind.FULL else 0
        rows = buffer[region.offset : region.offset + region.n_bytes].reshape(region.rows, -1)
        assert (rows[first:n_rows] == 1).all()
        assert (rows[:first] == 0).all()
        assert (rows[n_rows:] == 0).all()
    assert sum(manifest.kv_bytes.values()) == manifest.table.total_bytes == int(buffer.sum())
    assert max(manifest.table.lengths) <= max(max_bytes, 32)


@given(CASES)
def test_both_sides_rebuild_the_same_manifest(case: tuple[int, int, int, int]) -> None:
    """Four numbers and a fingerprint are all that travels."""
    start, length, chunk_tokens, max_bytes = case
    manifest = Manifest(LAYOUT, start, start + length, chunk_tokens, max_bytes)
    assert Manifest.from_json(manifest.to_json(), LAYOUT).chunks == manifest.chunks


def test_chunks_come_in_the_order_in_which_prefill_completes_them() -> None:
    """Within a layer the token range grows; window and linear state come last."""
    manifest = Manifest(LAYOUT, 0, 20, 8)
    reached: dict[int, int] = {}
    for chunk in manifest.chunks:
        assert chunk.stop_token >= reached.get(chunk.layer_index, 0)
        reached[chunk.layer_index] = chunk.stop_token
    kinds = [chunk.kind for chunk in manifest.chunks]
    assert kinds == sorted(kinds, key=lambda kind: kind is not KvKind.FULL)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"layout": "0" * 32}, IncompatibleError),
        ({"chunk_tokens": 9}, IncompatibleError),
        ({"table": "0"}, IncompatibleError),
        ({"stop_token": None}, ConfigError),
        ({"stop_token": "20"}, ConfigError),
        ({"chunk_tokens": 0}, UsageError),
        ({"start_token": -1}, UsageError),
        ({"start_token": 20}, UsageError),
        ({"max_chunk_bytes": 1 << 40}, UsageError),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(change: dict[str, object], error: type[Exception]) -> None:
    """Each with an error that says which side has what."""
    with pytest.raises(error):
        Manifest.from_json(Manifest(LAYOUT, 0, 20, 8).to_json() | change, LAYOUT)


def test_regions_do_not_overlap_and_views_write_through() -> None:
    """Arrays over the buffer are views at aligned offsets, one after the other."""
    regions = RegionMap(LAYOUT, 16)
    buffer = bytearray(regions.total_bytes)
    end = 0
    for region in regions:
        assert region.offset >= end
        assert region.offset % 64 == 0
        end = region.offset + region.n_bytes
    assert end <= regions.total_bytes
    regions.array(buffer, 1, "k")[3] = 7.0
    assert float(np.frombuffer(buffer, np.float32, offset=regions.region(1, "k").offset)[3 * 8]) == 7.0
    assert regions.array(buffer, 0, "recurrent").shape == (2, 3, 3)
    with pytest.raises(UsageError, match="no such tensor"):
        regions.array(buffer, 1, "latent")


def test_a_buffer_that_does_not_fit_the_manifest_is_refused() -> None:
    """Another layout, or too little room."""
    manifest = Manifest(LAYOUT, 0, 20, 8)
    with pytest.raises(UsageError, match="does not fit"):
        manifest.views(RegionMap(LAYOUT, 19), memoryview(bytearray(100_000)))


@pytest.mark.parametrize("lengths", [[], [0], [-1], [MAX_CHUNK_BYTES + 1]])
def test_a_bad_chunk_table_is_refused(lengths: list[int]) -> None:
    """Sizes are bounded on both ends."""
    with pytest.raises(UsageError):
        ChunkTable(lengths)


def test_a_flat_buffer_splits_into_equal_chunks_and_a_rest() -> None:
    """For users who move bytes that are not a model's cache."""
    table = ChunkTable.split(10, 4)
    assert table.lengths == (4, 4, 2)
    assert table.offsets == (0, 4, 8)
