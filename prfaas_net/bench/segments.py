"""Cutting TCP super-packets, so that an emulated link can lose one segment of the many that the kernel hands over."""

from __future__ import annotations

import struct

__all__ = ["VNET_BYTES", "cut", "mark", "segments_of"]

# struct virtio_net_hdr: flags, gso_type, hdr_len, gso_size, csum_start, csum_offset.
_VNET = struct.Struct("<BBHHHH")
VNET_BYTES = _VNET.size
_GSO_TCP = (1, 4)  # over IPv4, over IPv6
# RFC 3168: the two lowest bits of the traffic class; 0 is a sender that does not understand marks, 3 is the mark.
_ECN = 3
_FIN_AND_PSH, _CWR, _TCP = 0x09, 0x80, 6


def _fold(total: int) -> int:
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _sum16(data: bytes | bytearray) -> int:
    if len(data) & 1:
        data = bytes(data) + b"\0"
    return _fold(sum(struct.unpack(f">{len(data) // 2}H", data)))


def segments_of(packet: bytes) -> tuple[int, int, int]:
    """(segments, payload bytes of each, header bytes of each) of a packet as a TUN device gives it."""
    _, kind, _, segment_bytes, checksum_at, _ = _VNET.unpack_from(packet)
    if not segment_bytes or kind & 0x7F not in _GSO_TCP:
        return 1, 0, 0
    header_bytes = checksum_at + (packet[VNET_BYTES + checksum_at + 12] >> 4) * 4
    n = -(-(len(packet) - VNET_BYTES - header_bytes) // segment_bytes)
    return n, segment_bytes, header_bytes


def cut(packet: bytes, start: int, stop: int) -> bytes:
    """Segments ``start`` to ``stop`` of a super-packet, as a packet of its own."""
    flags, kind, _, _, checksum_at, checksum_offset = _VNET.unpack_from(packet)
    n, segment_bytes, header_bytes = segments_of(packet)
    first, last = (VNET_BYTES + header_bytes + index * segment_bytes for index in (start, stop))
    body = bytearray(packet[VNET_BYTES : VNET_BYTES + header_bytes]) + packet[first:last]
    if body[0] >> 4 == 6:
        tcp_at = 40
        struct.pack_into(">H", body, 4, len(body) - tcp_at)
        addresses = _sum16(body[8:40])
    else:
        tcp_at = (body[0] & 15) * 4
        (ident,) = struct.unpack_from(">H", body, 4)
        struct.pack_into(">HH", body, 2, len(body), (ident + start) & 0xFFFF)
        body[10:12] = b"\0\0"
        struct.pack_into(">H", body, 10, ~_sum16(body[:tcp_at]) & 0xFFFF)
        addresses = _sum16(body[12:20])
    (sequence,) = struct.unpack_from(">I", body, tcp_at + 4)
    struct.pack_into(">I", body, tcp_at + 4, (sequence + start * segment_bytes) & 0xFFFFFFFF)
    if stop < n:
        body[tcp_at + 13] &= ~_FIN_AND_PSH & 0xFF
    if start > 0:
        body[tcp_at + 13] &= ~_CWR & 0xFF
    # The sum over the pseudo-header; the kernel completes it over the rest.
    struct.pack_into(">H", body, tcp_at + 16, _fold(addresses + _TCP + len(body) - tcp_at))
    many = stop - start > 1
    head = _VNET.pack(
        flags, kind if many else 0, header_bytes, segment_bytes if many else 0, checksum_at, checksum_offset
    )
    return head + bytes(body)


def mark(packet: bytes) -> bytes | None:
    """The packet with a congestion mark on every segment (RFC 3168: CE); None if its sender does not understand it."""
    body = bytearray(packet)
    # Of IPv6 the traffic class begins in the middle of the first byte.
    at, shift = VNET_BYTES + 1, 4 if body[VNET_BYTES] >> 4 == 6 else 0
    if not body[at] >> shift & _ECN:
        return None
    body[at] |= _ECN << shift
    if shift == 0:
        end = VNET_BYTES + (body[VNET_BYTES] & 15) * 4
        body[VNET_BYTES + 10 : VNET_BYTES + 12] = b"\0\0"
        struct.pack_into(">H", body, VNET_BYTES + 10, ~_sum16(body[VNET_BYTES:end]) & 0xFFFF)
    return bytes(body)
