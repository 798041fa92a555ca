"""Keys, values and latents kept as bfloat16; what is summed up stays float32."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from engine import Engine
from engine.backend import NUMPY
from engine.checkpoint import load_checkpoint
from prfaas_net.errors import ConfigError
from prfaas_net.kv import CacheLayout, KvKind
from tests.engine.device import Device
from tests.engine.helpers import greedy, prefill, random_prompt

PROMPT = random_prompt(90)


@pytest.fixture
def half(directory: Path) -> Engine:
    """Each family's engine with bfloat16 rows, in chunks of 32 tokens."""
    return Engine.load(directory, prefill_chunk_tokens=32, kv_dtype="bfloat16")


def test_the_layout_says_which(directory: Path, half: Engine) -> None:
    """Half the bytes for rows, all of them for linear state; the two layouts never mix, and JSON keeps the type."""
    full = Engine.load(directory)
    for ours, theirs in zip(half.layout.layers, full.layout.layers, strict=True):
        linear = ours.kind is KvKind.LINEAR
        assert {t.dtype for t in ours.tensors} == {"float32" if linear else "bfloat16"}
        ratio = 1 if linear else 2
        assert ratio * sum(t.row_bytes for t in ours.tensors) == sum(t.row_bytes for t in theirs.tensors)
    assert half.layout.fingerprint != full.layout.fingerprint
    assert CacheLayout.from_json(half.layout.to_json()) == half.layout


def test_the_model_is_nearly_the_same(directory: Path, half: Engine) -> None:
    """Logits differ by the rounding of keys and values, and no more."""
    exact, rounded = (prefill(e, PROMPT, greedy(1)).result.logits for e in (Engine.load(directory), half))
    assert 0 < np.abs(exact - rounded).max() < 0.15


@pytest.mark.parametrize("chunk", [1, 7, 90])
def test_the_chunk_size_changes_nothing(directory: Path, half: Engine, chunk: int) -> None:
    """Attention reads what is kept, not what it was computed from: rounding happens once, at the same place."""
    other = Engine.load(directory, prefill_chunk_tokens=chunk, kv_dtype="bfloat16")
    ours, theirs = (prefill(e, PROMPT, greedy()) for e in (half, other))
    # A value on the edge of two roundings may fall either way, by one part in 256.
    np.testing.assert_allclose(ours.result.logits, theirs.result.logits, atol=0.1)
    assert ours.decode() == half.generate(PROMPT, greedy())


def test_a_device_keeps_the_same_values(directory: Path, half: Engine) -> None:
    """It computes in float32 arrays that hold rounded values: the buffer is the same to the byte."""
    checkpoint = load_checkpoint(directory, kv_dtype="bfloat16")
    device = Engine(checkpoint, Device(late=True).backend(), prefill_chunk_tokens=32)
    here, there = prefill(half, PROMPT, greedy()), prefill(device, PROMPT, greedy())
    assert here.buffer == there.buffer
    assert here.decode() == there.decode()


def test_rounding_is_that_of_the_type() -> None:
    """To nearest, ties to even, as ml_dtypes does it."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 3e38)].copy()
    values[:3] = [1.00390625, 1.01171875, -1.00390625]  # ties
    np.testing.assert_array_equal(
        NUMPY.rounded(values, "bfloat16"), values.astype(ml_dtypes.bfloat16).astype(np.float32)
    )
    assert NUMPY.rounded(values, "float32") is values


def test_another_type_is_refused(directory: Path) -> None:
    """By name, with those there are."""
    with pytest.raises(ConfigError, match="expected float32 or bfloat16; found float16"):
        Engine.load(directory, kv_dtype="float16")
