"""``struct tcp_info`` of Linux, read by the length that the kernel returned.

Offsets are those of include/uapi/linux/tcp.h; every kernel appends, none moves. A field beyond the returned length
is 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

__all__ = ["TCP_INFO", "TCP_INFO_BYTES", "TcpInfo"]

# Option number and a length no kernel exceeds yet (280 bytes in 6.18).
TCP_INFO = 11
TCP_INFO_BYTES = 512

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """One connection at one moment.

    Attributes:
        rtt_s: smoothed round-trip time; ``min_rtt_s`` the kernel's windowed minimum (300 s by default).
        cwnd_segments: congestion window.
        delivery_rate_bps: of the latest acknowledged flight; ``app_limited`` if it was cut short by us.
        bytes_sent: with headers of TCP not counted, retransmissions counted; ``bytes_retrans`` of them.
        busy_s: time with something to send; includes ``rwnd_limited_s`` and ``sndbuf_limited_s``.
        notsent_bytes: in the send buffer and not sent.
    """

    rtt_s: float
    min_rtt_s: float
    cwnd_segments: int
    mss_bytes: int
    total_retrans: int
    bytes_acked: int
    notsent_bytes: int
    delivery_rate_bps: int
    app_limited: bool
    busy_s: float
    rwnd_limited_s: float
    sndbuf_limited_s: float
    delivered: int
    delivered_ce: int
    bytes_sent: int
    bytes_retrans: int

    @classmethod
    def parse(cls, data: bytes) -> TcpInfo:
        """Decode what ``getsockopt(IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES)`` returned."""

        def u32(offset: int) -> int:
            return int(_U32.unpack_from(data, offset)[0]) if len(data) >= offset + 4 else 0

        def u64(offset: int) -> int:
            return int(_U64.unpack_from(data, offset)[0]) if len(data) >= offset + 8 else 0

        no_minimum = 0xFFFFFFFF
        min_rtt_us = u32(148)
        return cls(
            rtt_s=u32(68) / 1e6,
            min_rtt_s=0.0 if min_rtt_us == no_minimum else min_rtt_us / 1e6,
            cwnd_segments=u32(80),
            mss_bytes=u32(16),
            total_retrans=u32(100),
            bytes_acked=u64(120),
            notsent_bytes=u32(144),
            delivery_rate_bps=8 * u64(160),
            app_limited=len(data) > 7 and bool(data[7] & 1),
            busy_s=u64(168) / 1e6,
            rwnd_limited_s=u64(176) / 1e6,
            sndbuf_limited_s=u64(184) / 1e6,
            delivered=u32(192),
            delivered_ce=u32(196),
            bytes_sent=u64(200),
            bytes_retrans=u64(208),
        )
