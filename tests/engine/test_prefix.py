"""Prefill from a cached prefix, snapshots for one, and slices that are put together elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Engine
from prfaas_net.errors import UsageError
from prfaas_net.kv import KvKind, Manifest, RegionMap
from tests.engine.helpers import RecordingSink, greedy, prefill, random_prompt

FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PROMPT = random_prompt(150)


@dataclass
class Snaps:
    """Copies window and linear state at some lengths."""

    engine: Engine
    regions: RegionMap
    buffer: bytearray
    lengths: Sequence[int]
    taken: dict[int, bytes] = field(default_factory=dict)

    def boundaries(self, start: int, stop: int) -> Sequence[int]:
        return [length for length in self.lengths if start < length < stop]

    def take(self, n_tokens: int) -> None:
        self.taken[n_tokens] = bytes(self.buffer)


@FEW
@given(cut=st.integers(1, 149), chunk=st.integers(1, 160))
def test_a_cached_prefix_changes_nothing(directory: Path, cut: int, chunk: int) -> None:
    """Wherever it ends and however the rest is chunked: the logits to 1e-4, and the tokens."""
    engine = Engine.load(directory, prefill_chunk_tokens=chunk)
    whole = prefill(engine, PROMPT, greedy())
    regions = RegionMap(engine.layout, 158)
    buffer = bytearray(regions.total_bytes)
    assert engine.prefill(PROMPT[:cut], greedy(), regions, buffer) is not None
    result = engine.prefill(PROMPT, greedy(), regions, buffer, start_token=cut)
    assert result is not None
    np.testing.assert_allclose(result.logits, whole.result.logits, atol=1e-4)
    tokens, decoding = [result.first_token], engine.resume(150, greedy(), regions, buffer)
    while len(tokens) < 8:
        tokens.append(decoding.step(tokens[-1])[0])
    assert tokens == whole.decode()


def test_a_snapshot_is_the_state_at_its_length(engine: Engine) -> None:
    """Taken on the way, at lengths that are no multiples of anything; prefill goes on from it to the same tokens."""
    regions = RegionMap(engine.layout, 158)
    buffer = bytearray(regions.total_bytes)
    snaps = Snaps(engine, regions, buffer, [5, 64, 101, 150, 999])
    sink = RecordingSink()
    result = engine.prefill(PROMPT, greedy(), regions, buffer, sink, snapshots=snaps)
    assert result is not None
    assert sorted(snaps.taken) == [5, 64, 101]
    assert result.first_token == prefill(engine, PROMPT, greedy()).result.first_token
    kinds = {layer.index: layer.kind for layer in engine.layout.layers}
    assert all(stop == 150 for index, stop in sink.emitted if kinds[index] is not KvKind.FULL)
    for length, taken in snaps.taken.items():
        again = engine.prefill(PROMPT, greedy(), regions, bytearray(taken), start_token=length)
        assert again is not None
        np.testing.assert_allclose(again.logits, result.logits, atol=1e-4)


@FEW
@given(data=st.data(), start=st.sampled_from([0, 40]), chunk_tokens=st.integers(7, 80))
def test_emitted_slices_in_any_order_are_the_cache(
    engine: Engine, data: st.DataObject, start: int, chunk_tokens: int
) -> None:
    """Each chunk of a manifest, copied when its layer and range are told and put down in any order."""
    source = RegionMap(engine.layout, 150)
    buffer = bytearray(source.total_bytes)
    manifest = Manifest(engine.layout, start, 150, chunk_tokens, max_chunk_bytes=1000)
    views = manifest.views(source, memoryview(buffer))
    sent: dict[int, bytes] = {}

    class Sender(RecordingSink):
        def emit(self, layer_index: int, stop_token: int) -> None:
            for chunk in manifest.chunks:
                if chunk.layer_index == layer_index and chunk.stop_token <= stop_token and chunk.index not in sent:
                    sent[chunk.index] = bytes(views[chunk.index])

    target = RegionMap(engine.layout, 158)
    there = bytearray(target.total_bytes)
    if start:
        engine.prefill(PROMPT[:start], greedy(), source, buffer)
        engine.prefill(PROMPT[:start], greedy(), target, there)
    result = engine.prefill(PROMPT, greedy(), source, buffer, Sender(), start_token=start)
    assert result is not None
    places = manifest.views(target, memoryview(there))
    for index in data.draw(st.permutations(range(len(manifest.chunks)))):
        places[index][:] = sent[index]
    for region in source:
        index, name, rows = region.layer.index, region.tensor.name, region.layer.rows(150)
        mine, theirs = (r.array(b, index, name) for r, b in ((source, buffer), (target, there)))
        if region.layer.kind is not KvKind.LINEAR:
            mine, theirs = mine[:rows], theirs[:rows]
        np.testing.assert_array_equal(mine, theirs)
    tokens, decoding = [result.first_token], engine.resume(150, greedy(), target, there)
    while len(tokens) < 8:
        tokens.append(decoding.step(tokens[-1])[0])
    assert tokens == prefill(engine, PROMPT, greedy()).decode()


@pytest.mark.parametrize("start", [-1, 150, 151])
def test_there_must_be_something_to_run(engine: Engine, start: int) -> None:
    """A prompt that is cached whole has no logits to choose from."""
    regions = RegionMap(engine.layout, 158)
    with pytest.raises(UsageError, match="a prefill needs a token to run"):
        engine.prefill(PROMPT, greedy(), regions, bytearray(regions.total_bytes), start_token=start)
