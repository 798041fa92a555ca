"""Feeding the stream tuner from a link's own sockets."""

from __future__ import annotations

from collections.abc import Iterable

from prfaas_net.congestion.streams import StreamSample, StreamTuner
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.transport.stats import read_tcp_info
from prfaas_net.transport.streams import Stream

__all__ = ["LinkSampler", "StreamTuner"]


class LinkSampler:
    """Differences of counters between two looks at a link."""

    def __init__(self) -> None:
        self._seen: dict[int, TcpInfo] = {}
        self._acked_bytes = 0
        self._busy, self._looks = 0, 0
        self.sent_bytes = 0
        self.retrans_bytes = 0
        self.goodput_bps = 0.0
        self._at_s: float | None = None

    def note_busy(self, busy: bool) -> None:
        """Whether there is something to send now; several times between two samples."""
        self._busy += busy
        self._looks += 1

    def sample(self, streams: Iterable[tuple[int, Stream]], *, acked_bytes: int, now: float) -> StreamSample | None:
        """What happened since the last call; None the first time."""
        infos = {number: info for number, stream in streams if (info := read_tcp_info(stream.sock)) is not None}
        sent = sum(info.bytes_sent - self._bytes(number, "bytes_sent") for number, info in infos.items())
        retrans = sum(info.bytes_retrans - self._bytes(number, "bytes_retrans") for number, info in infos.items())
        acked, self._acked_bytes = acked_bytes - self._acked_bytes, acked_bytes
        self._seen = infos
        self.sent_bytes += sent
        self.retrans_bytes += retrans
        busy_share = self._busy / self._looks if self._looks else 0.0
        self._busy, self._looks = 0, 0
        before_s, self._at_s = self._at_s, now
        if before_s is None or now <= before_s:
            return None
        if busy_share > 0:
            self.goodput_bps = 8 * acked / (now - before_s)
        rtt_s = max((info.rtt_s for info in infos.values()), default=0.0)
        return StreamSample(now, acked, retrans / sent if sent > 0 else 0.0, busy_share, rtt_s)

    def _bytes(self, number: int, name: str) -> int:
        seen = self._seen.get(number)
        return 0 if seen is None else int(getattr(seen, name))

    @property
    def infos(self) -> tuple[TcpInfo, ...]:
        """The latest look at every connection."""
        return tuple(self._seen.values())
