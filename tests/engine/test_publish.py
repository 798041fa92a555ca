"""State that leaves a device while the next layer computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import Engine
from engine.checkpoint import load_checkpoint
from engine.publish import MAX_PENDING
from prfaas_net.kv import KvKind, RegionMap
from tests.engine.device import Device
from tests.engine.helpers import RecordingSink, greedy, prefill, random_prompt

PROMPT = random_prompt(80)


@pytest.mark.parametrize("late", [True, False])
def test_what_is_told_has_landed(directory: Path, late: bool) -> None:
    """However late copies arrive: told in the order of computation, never before the bytes are in the buffer."""
    device, host = Device(late=late), Engine.load(directory, prefill_chunk_tokens=32)
    engine = Engine(load_checkpoint(directory), device.backend(), prefill_chunk_tokens=32)
    expected, expected_sink = RegionMap(host.layout, 90), RecordingSink()
    reference = bytearray(expected.total_bytes)
    host.prefill(PROMPT, greedy(), expected, reference, expected_sink)
    regions = RegionMap(engine.layout, 90)
    buffer = bytearray(regions.total_bytes)

    class Receiver(RecordingSink):
        def emit(self, layer_index: int, stop_token: int) -> None:
            super().emit(layer_index, stop_token)
            for region in regions:
                if region.layer.index == layer_index:
                    full = region.layer.kind is KvKind.FULL
                    n_bytes = stop_token * region.tensor.row_bytes if full else region.n_bytes
                    mine, theirs = (b[region.offset : region.offset + n_bytes] for b in (buffer, reference))
                    np.testing.assert_array_equal(np.frombuffer(mine, "u1"), np.frombuffer(theirs, "u1"))

    sink = Receiver()
    assert engine.prefill(PROMPT, greedy(), regions, buffer, sink) is not None
    assert sink.emitted == expected_sink.emitted
    assert not device.pending
    most = 2 * (MAX_PENDING + 1)
    assert 1 < device.most_pending <= most
    assert device.pinned <= most


@pytest.mark.parametrize("cancel_after", [0, 2, 5])
def test_cancelling_leaves_no_copy_under_way(directory: Path, cancel_after: int) -> None:
    """Nothing writes into the buffer after prefill has returned, and nothing more is told."""
    device = Device(late=True)
    engine = Engine(load_checkpoint(directory), device.backend(), prefill_chunk_tokens=32)
    sink, regions = RecordingSink(cancel_after=cancel_after), RegionMap(engine.layout, 90)
    assert engine.prefill(PROMPT, greedy(), regions, bytearray(regions.total_bytes), sink) is None
    assert not device.pending
    assert len(sink.emitted) <= cancel_after


def test_snapshots_and_decoding_on_a_device(directory: Path) -> None:
    """A snapshot is brought to the host when it is shown; decoding works from where the state landed."""
    device = Device(late=True)
    engine = Engine(load_checkpoint(directory), device.backend(), prefill_chunk_tokens=32)
    host = prefill(Engine.load(directory, prefill_chunk_tokens=32), PROMPT, greedy())
    regions = RegionMap(engine.layout, 88)
    buffer, taken = bytearray(regions.total_bytes), []

    class Snaps:
        def boundaries(self, start: int, stop: int) -> list[int]:
            return [50]

        def take(self, n_tokens: int) -> None:
            taken.append(bytes(buffer))

    result = engine.prefill(PROMPT, greedy(), regions, buffer, snapshots=Snaps())
    assert result is not None
    again = bytearray(taken[0])
    at_50 = prefill(engine, PROMPT[:50], greedy())
    for region in regions:
        if region.layer.kind is KvKind.FULL:
            index, name = region.layer.index, region.tensor.name
            regions.array(again, index, name)[:50] = at_50.array(index, name)[:50]
    resumed = engine.prefill(PROMPT, greedy(), regions, again, start_token=50)
    assert resumed is not None
    np.testing.assert_allclose(resumed.logits, host.result.logits, atol=1e-4)
    tokens, decoding = [result.first_token], engine.resume(80, greedy(), regions, buffer)
    while len(tokens) < 8:
        tokens.append(decoding.step(tokens[-1])[0])
    assert tokens == host.decode()
