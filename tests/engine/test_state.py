"""Buffers: which are refused, and arrays that cannot lie in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine
from engine.backend import Backend
from engine.checkpoint import load_checkpoint
from prfaas_net.errors import UsageError
from prfaas_net.kv import RegionMap
from tests.engine.device import DeviceNumPy
from tests.engine.helpers import RecordingSink, greedy, prefill, random_prompt


def test_state_on_a_device_reaches_the_buffer(directory: Path) -> None:
    """The buffer ends the same, and is filled before the sink is told, where arrays cannot be views of it."""
    device = Engine(load_checkpoint(directory), Backend("device", DeviceNumPy(), shares_host_memory=False))
    host = Engine.load(directory)
    prompt, sink = random_prompt(40), RecordingSink()
    here, there = prefill(host, prompt, greedy(4)), prefill(device, prompt, greedy(4), sink)
    assert there.buffer == here.buffer
    assert len(sink.emitted) == len(host.layout.layers)
    assert there.decode() == here.decode()


def test_a_buffer_of_another_model_is_refused(demo: Engine, engine: Engine) -> None:
    """Its rows would be taken for ours."""
    regions = RegionMap(demo.layout, 20)
    with pytest.raises(UsageError, match="laid out for another model"):
        engine.prefill(random_prompt(4), greedy(), regions, bytearray(regions.total_bytes))


def test_a_small_buffer_is_refused(engine: Engine) -> None:
    """Prefill needs room for the prompt, decoding for the answer too."""
    regions = RegionMap(engine.layout, 10)
    buffer = bytearray(regions.total_bytes)
    with pytest.raises(UsageError, match="expected 11 tokens; found 10"):
        engine.prefill(random_prompt(11), greedy(), regions, buffer)
    with pytest.raises(UsageError, match="expected 12 tokens; found 10"):
        engine.resume(4, greedy(8), regions, buffer)
    with pytest.raises(UsageError, match=f"expected {regions.total_bytes} bytes"):
        engine.prefill(random_prompt(4), greedy(), regions, buffer[:-1])


def test_a_read_only_buffer_is_refused(engine: Engine) -> None:
    """It is said at once, not when the first row is written."""
    regions = RegionMap(engine.layout, 20)
    with pytest.raises(UsageError, match="the buffer is read-only"):
        engine.resume(4, greedy(8), regions, bytes(regions.total_bytes))
