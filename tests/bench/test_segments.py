"""Cutting super-packets: what the pieces carry is what the whole carried."""

from __future__ import annotations

import struct

import pytest

from prfaas_net.bench.segments import VNET_BYTES, cut, mark, segments_of

SEGMENT, HEADERS = 1000, 40


def super_packet(payload: bytes) -> bytes:
    """IPv4 and TCP without options, as a TUN device with TSO gives it."""
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, HEADERS + len(payload), 7, 0, 64, 6, 0, b"\x0a\0\0\1", b"\x0a\0\0\2")
    tcp = struct.pack(">HHIIBBHHH", 1, 2, 5000, 0, 5 << 4, 0x18, 1000, 0, 0)
    return struct.pack("<BBHHHH", 1, 1, HEADERS, SEGMENT, 20, 16) + ip + tcp + payload


def payload_of(packet: bytes) -> tuple[int, bytes]:
    """(sequence number, payload)."""
    (sequence,) = struct.unpack_from(">I", packet, VNET_BYTES + 24)
    return sequence, packet[VNET_BYTES + HEADERS :]


@pytest.mark.parametrize("n_bytes", [1001, 3000, 4321])
def test_pieces_make_up_the_whole(n_bytes: int) -> None:
    """Segment by segment, each with its own length and sequence number."""
    whole = bytes(i % 251 for i in range(n_bytes))
    packet = super_packet(whole)
    n, segment_bytes, header_bytes = segments_of(packet)
    assert (n, segment_bytes, header_bytes) == (-(-n_bytes // SEGMENT), SEGMENT, HEADERS)
    rebuilt = b""
    for index in range(n):
        piece = cut(packet, index, index + 1)
        sequence, payload = payload_of(piece)
        assert sequence == 5000 + len(rebuilt)
        assert struct.unpack_from(">H", piece, VNET_BYTES + 2)[0] == HEADERS + len(payload)
        assert segments_of(piece)[0] == 1
        rebuilt += payload
    assert rebuilt == whole


def test_a_range_stays_a_super_packet() -> None:
    """And only the last piece pushes."""
    packet = super_packet(bytes(4000))
    first, last = cut(packet, 0, 2), cut(packet, 2, 4)
    assert segments_of(first)[0] == segments_of(last)[0] == 2
    assert not first[VNET_BYTES + 33] & 0x08
    assert last[VNET_BYTES + 33] & 0x08


@pytest.mark.parametrize("ecn", [1, 2])
def test_a_mark_is_set_where_it_is_understood(ecn: int) -> None:
    """On both versions of IP; the header's checksum is right again, and nothing else has changed."""
    packet = bytearray(super_packet(bytes(3000)))
    assert mark(bytes(packet)) is None
    packet[VNET_BYTES + 1] = 0xB8 | ecn
    marked = mark(bytes(packet))
    assert marked is not None
    assert marked[VNET_BYTES + 1] == 0xBB
    words = struct.unpack(">10H", marked[VNET_BYTES : VNET_BYTES + 20])
    total = sum(words)
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF
    assert marked[VNET_BYTES + 20 :] == packet[VNET_BYTES + 20 :]
    six = bytes(VNET_BYTES) + bytes([0x60, ecn << 4]) + bytes(38)
    marked_six = mark(six)
    assert marked_six is not None
    assert marked_six[VNET_BYTES : VNET_BYTES + 2] == bytes([0x60, 0x30])
    assert mark(bytes(VNET_BYTES) + bytes([0x60, 0x00]) + bytes(38)) is None
