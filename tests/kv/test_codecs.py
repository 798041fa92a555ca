"""Codecs: lossless on anything, small on what they are for, and never fooled by what comes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.errors import CorruptionError
from prfaas_net.kv.codecs import Codec, Coder, codec_for_dtype

CODER = Coder()
CODED = [Codec.ZSTD, Codec.BF16_PLANES]


def bfloat16(n: int) -> bytes:
    """Normally distributed values as bfloat16: the high halves of float32."""
    values = np.random.default_rng(1).standard_normal(n, dtype=np.float32)
    return values.view(np.uint16)[1::2].tobytes()


@given(st.sampled_from(CODED), st.binary(min_size=1, max_size=3000))
def test_every_byte_string_survives(codec: Codec, data: bytes) -> None:
    """Odd lengths and incompressible bytes included."""
    view = bytearray(len(data))
    CODER.decode_into(codec, memoryview(CODER.encode(codec, memoryview(data))), memoryview(view))
    assert view == data


def test_planes_compress_bfloat16() -> None:
    """1.4 times smaller at least, where plain zstd does less."""
    data = bfloat16(1 << 18)
    planes = len(CODER.encode(Codec.BF16_PLANES, memoryview(data)))
    assert planes < len(data) / 1.4
    assert planes < len(CODER.encode(Codec.ZSTD, memoryview(data)))


@given(st.sampled_from(CODED), st.binary(max_size=400), st.integers(1, 500))
def test_garbage_is_corruption_and_nothing_else(codec: Codec, payload: bytes, n_bytes: int) -> None:
    """Neither another error, nor memory for what a header promises."""
    try:
        CODER.decode_into(codec, memoryview(payload), memoryview(bytearray(n_bytes)))
    except CorruptionError:
        pass


@pytest.mark.parametrize("codec", CODED)
def test_a_frame_that_promises_too_much_is_refused(codec: Codec) -> None:
    """A sound encoding of another size is not decoded into this chunk."""
    payload = memoryview(CODER.encode(codec, memoryview(bytes(1 << 20))))
    with pytest.raises(CorruptionError):
        CODER.decode_into(codec, payload, memoryview(bytearray(100)))


def test_codecs_by_dtype() -> None:
    """Only where something is known to help."""
    names = {"bfloat16": Codec.BF16_PLANES, "float8_e4m3fn": Codec.ZSTD, "float32": Codec.RAW, "float16": Codec.RAW}
    assert {dtype: codec_for_dtype(dtype) for dtype in names} == names
