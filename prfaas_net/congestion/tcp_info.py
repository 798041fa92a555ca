"""``struct tcp_info`` of Linux, read by the length that the kernel returned.

Offsets are those of include/uapi/linux/tcp.h; every kernel appends, none moves. A field beyond the returned length
is 0.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["TCP_INFO", "TCP_INFO_BYTES", "UNPACED", "TcpInfo"]

# Option number and a length no kernel exceeds yet (280 bytes in 6.18).
TCP_INFO = 11
TCP_INFO_BYTES = 512
# TCPI_OPT_ECN: both ends have agreed to use it.
_OPT_ECN = 8
_NO_MINIMUM = 0xFFFFFFFF
# ``max_pacing_rate`` of a connection that nobody paces; kernels that kept it in 32 bits report the smaller one.
UNPACED = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)

# What is read of each eight or four bytes, in order; "x" skips.
_LAYOUT = (
    "x x B x B B x B"  # retransmits, backoff, options, flags
    " I 4x I 4x I 4x I 4x 4x"  # rto, mss, unacked, lost
    " 4x 4x 4x I 4x 4x"  # last_ack_recv
    " I I 4x I 4x 4x 4x 4x I"  # rtt, rttvar, cwnd, total_retrans
    " Q Q Q 8x 4x 4x I I 4x 4x"  # pacing_rate, max_pacing_rate, bytes_acked, notsent, min_rtt
    " Q Q Q Q I I Q Q"  # delivery_rate, busy, rwnd_limited, sndbuf_limited, delivered, delivered_ce, sent, retrans
)
_STRUCT = struct.Struct("<" + _LAYOUT.replace(" ", ""))


def _offsets() -> tuple[tuple[str, int], ...]:
    """Format and place of each field that is read."""
    places, at = [], 0
    for item in _LAYOUT.split():
        if "x" not in item:
            places.append(("<" + item, at))
        at += struct.calcsize("<" + item)
    return tuple(places)


_PLACES = _offsets()


class TcpInfo(NamedTuple):
    """One connection at one moment: what the kernel said, in the kernel's units, and the same in ours.

    Attributes:
        retransmits: unanswered retransmissions of the oldest segment; ``backoff``: timeouts in a row.
        unacked: segments under way; ``lost`` of them believed lost.
        last_ack_ms: since the last acknowledgement arrived.
        rtt_us: smoothed round-trip time; ``min_rtt_us`` the kernel's windowed minimum (300 s by default).
        max_pacing_bytes_per_s: what we have set; one of ``UNPACED`` if nothing.
        delivery_rate_bytes_per_s: of the latest acknowledged flight; ``app_limited`` if it was cut short by us.
        bytes_sent: with headers of TCP not counted, retransmissions counted; ``bytes_retrans`` of them.
        busy_us: time with something to send; includes ``rwnd_limited_us`` and ``sndbuf_limited_us``.
        notsent_bytes: in the send buffer and not sent.
        delivered, delivered_ce: segments that arrived, and those of them that carried a congestion mark.
    """

    retransmits: int
    backoff: int
    options: int
    flags: int
    rto_us: int
    mss_bytes: int
    unacked: int
    lost: int
    last_ack_ms: int
    rtt_us: int
    rttvar_us: int
    cwnd_segments: int
    total_retrans: int
    pacing_bytes_per_s: int
    max_pacing_bytes_per_s: int
    bytes_acked: int
    notsent_bytes: int
    min_rtt_us: int
    delivery_rate_bytes_per_s: int
    busy_us: int
    rwnd_limited_us: int
    sndbuf_limited_us: int
    delivered: int
    delivered_ce: int
    bytes_sent: int
    bytes_retrans: int

    @classmethod
    def parse(cls, data: bytes) -> TcpInfo:
        """Decode what ``getsockopt(IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES)`` returned."""
        if len(data) >= _STRUCT.size:
            return cls._make(_STRUCT.unpack_from(data))
        return cls._make(
            struct.unpack_from(kind, data, at)[0] if len(data) >= at + struct.calcsize(kind) else 0
            for kind, at in _PLACES
        )

    @property
    def rtt_s(self) -> float:
        return self.rtt_us / 1e6

    @property
    def min_rtt_s(self) -> float:
        """0 where the kernel has none."""
        return 0.0 if self.min_rtt_us == _NO_MINIMUM else self.min_rtt_us / 1e6

    @property
    def delivery_rate_bps(self) -> int:
        return 8 * self.delivery_rate_bytes_per_s

    @property
    def app_limited(self) -> bool:
        """Whether the delivery rate shows what we offered, not what the path carried."""
        return bool(self.flags & 1)

    @property
    def ecn(self) -> bool:
        """Whether marks instead of losses can be expected."""
        return bool(self.options & _OPT_ECN)

    @property
    def paced_bps(self) -> int | None:
        """The pacing that we have set, None if none."""
        rate = self.max_pacing_bytes_per_s
        return None if rate == 0 or rate in UNPACED else 8 * rate
