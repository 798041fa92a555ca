"""Frames: what comes out of a parser, whatever goes in."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.errors import CorruptionError, IncompatibleError, PrfaasError, ProtocolError
from prfaas_net.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    Flags,
    Frame,
    FrameParser,
    FrameType,
    Header,
    encode,
)

FRAMES = [encode(FrameType.OPEN, b'{"ticket":{"a":1}}', transfer=3), encode(FrameType.PING, b"12345678")]


def feed_whole(data: bytes) -> list[Frame]:
    return list(FrameParser().feed(data))


def feed_bytewise(data: bytes) -> list[Frame]:
    parser = FrameParser()
    return [frame for i in range(len(data)) for frame in parser.feed(data[i : i + 1])]


@pytest.mark.parametrize("feed", [feed_whole, feed_bytewise])
def test_frames_come_out_as_they_went_in(feed: object) -> None:
    """Whole or byte at a time, the same frames come out."""
    assert callable(feed)
    frames = feed(b"".join(FRAMES))
    assert [frame.type for frame in frames] == [FrameType.OPEN, FrameType.PING]
    assert frames[0].json() == {"ticket": {"a": 1}}
    assert frames[0].header.transfer == 3
    assert frames[1].payload == b"12345678"


@given(
    kind=st.sampled_from(list(FrameType)),
    flags=st.integers(0, 3),
    transfer=st.integers(0, 2**64 - 1),
    n_bytes=st.integers(0, MAX_CONTROL_BYTES),
    offset=st.integers(0, 2**64 - 1),
    chunk=st.integers(0, 2**32 - 1),
    payload_xxh3=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**32 - 1),
)
def test_headers_survive_the_wire(
    kind: int, flags: int, transfer: int, n_bytes: int, offset: int, chunk: int, payload_xxh3: int, sequence: int
) -> None:
    """pack and unpack are inverses over every field's range."""
    header = Header(kind, flags, transfer, n_bytes, offset, chunk, payload_xxh3, sequence)
    assert len(header.pack()) == HEADER_BYTES
    assert Header.unpack(header.pack()) == header


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_header_bit_never_passes(bit: int) -> None:
    """Any single bit error in a header is a typed error."""
    data = bytearray(Header(FrameType.DATA, 0, 9, 100, 200, 3, 12345).pack())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises((ProtocolError, CorruptionError)):
        Header.unpack(data)


@given(st.lists(st.binary(max_size=200), max_size=6), st.booleans())
def test_nothing_but_a_protocol_error_comes_out_of_garbage(parts: list[bytes], honest_start: bool) -> None:
    """Garbage, alone or after an honest frame, gives frames or a PrfaasError, whole and byte at a time."""
    data = (FRAMES[0] if honest_start else b"") + b"".join(parts)
    for feed in (feed_whole, feed_bytewise):
        try:
            feed(data)
        except PrfaasError:
            pass


@given(st.integers(0, len(FRAMES[0]) - 1), st.integers(1, 255))
def test_a_damaged_frame_is_never_taken_for_another(place: int, change: int) -> None:
    """Any changed byte of a control frame is noticed."""
    data = bytearray(FRAMES[0])
    data[place] ^= change
    with pytest.raises(PrfaasError):
        feed_whole(bytes(data))


@pytest.mark.parametrize("n_bytes", [MAX_CONTROL_BYTES + 1, 2**63, 2**64 - 1])
def test_a_length_beyond_the_bound_is_refused_before_anything_is_held(n_bytes: int) -> None:
    """No memory is promised on a peer's word."""
    with pytest.raises(ProtocolError, match="too long"):
        feed_whole(Header(FrameType.OPEN, 0, 0, n_bytes, 0, 0, 0).pack())


def test_unknown_optional_frames_are_skipped_and_unknown_critical_ones_refused() -> None:
    """The way to extend the protocol without breaking it."""
    skipped = Header(99, Flags.OPTIONAL, 0, 3, 0, 0, Header.unpack(encode(FrameType.PING, b"abc")).payload_xxh3)
    assert [f.type for f in feed_whole(skipped.pack() + b"abc" + FRAMES[1])] == [FrameType.PING]
    with pytest.raises(ProtocolError, match="must not be skipped"):
        feed_whole(Header(99, 0, 0, 0, 0, 0, 0).pack())


def test_another_version_is_named() -> None:
    """A peer of a later version reads which one we speak."""
    data = bytearray(encode(FrameType.PING, b""))
    data[4] = 2
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    with pytest.raises(IncompatibleError, match="expected 1; found 2"):
        feed_whole(bytes(data))


def test_data_frames_do_not_travel_on_a_control_connection() -> None:
    """Bulk where it does not belong is a protocol error."""
    with pytest.raises(ProtocolError, match="data frame"):
        feed_whole(Header(FrameType.DATA, 0, 1, 10, 0, 0, 0).pack())


def test_a_wrong_protocol_is_noticed_at_its_first_bytes() -> None:
    """Nobody waits for 64 bytes of HTTP."""
    with pytest.raises(ProtocolError, match="not a KV stream"):
        feed_whole(b"GE")
