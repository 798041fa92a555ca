"""A link as a fluid: enough of TCP to write samples by hand, far too little to prove a detector with."""

from __future__ import annotations

from dataclasses import dataclass, field

from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.tcp_info import UNPACED, TcpInfo

__all__ = ["MBPS", "Fluid", "info"]

MBPS = 1e6
MSS = 1448
EVERY_S = 0.02


def info(**fields: int) -> TcpInfo:
    """A connection of which nothing is known but these fields."""
    return TcpInfo(**(dict.fromkeys(TcpInfo._fields, 0) | {"mss_bytes": MSS} | fields))


@dataclass
class Fluid:
    """One connection over a bottleneck with a tail-drop queue. Change a field, then go on.

    Attributes:
        offered_bps: what we send, as long as ``window_bytes`` allows it.
        others_bps: what others send, whatever happens.
        lost_share: of our bytes, at random.
        connected: whether anything comes back.
    """

    rate_bps: float = 200 * MBPS
    base_s: float = 0.04
    queue_limit_s: float = 0.04
    offered_bps: float = 140 * MBPS
    others_bps: float = 0.0
    lost_share: float = 0.0
    marked_share: float = 0.0
    paced: bool = True
    app_limited: bool = False
    host_limited: bool = False
    connected: bool = True
    alive: bool = True
    backlog_bytes: int = 10_000_000
    now: float = 100.0
    queue_s: float = 0.0
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TcpInfo._fields, 0.0))

    def run(self, seconds: float) -> list[LinkSample]:
        """Looks at it, every 20 ms."""
        return [self._step() for _ in range(round(seconds / EVERY_S))]

    def _step(self) -> LinkSample:
        self.now += EVERY_S
        wanted = self.offered_bps + self.others_bps
        self.queue_s += (wanted / self.rate_bps - 1) * EVERY_S
        over_s = max(0.0, self.queue_s - self.queue_limit_s)
        self.queue_s = min(max(self.queue_s, 0.0), self.queue_limit_s)
        sent = self.offered_bps / 8 * EVERY_S
        # What does not fit is lost by everybody in proportion.
        lost = sent * self.lost_share + over_s * self.rate_bps / 8 * self.offered_bps / max(wanted, 1.0)
        ours = self.rate_bps * self.offered_bps / wanted if self.queue_s > 0 and wanted else self.offered_bps
        arrived = min(ours, self.offered_bps) / 8 * EVERY_S * (1 - self.lost_share) if self.connected else 0.0
        self._count(sent, lost, arrived)
        return LinkSample(self.now, self.alive, self.backlog_bytes, ((1, self._info(sent)),))

    def _count(self, sent: float, lost: float, arrived: float) -> None:
        counted = self.counted
        counted["bytes_sent"] += sent + lost if self.connected else 0
        counted["bytes_retrans"] += lost if self.connected else 0
        counted["bytes_acked"] += arrived
        counted["delivered"] += arrived / MSS
        counted["delivered_ce"] += arrived / MSS * self.marked_share
        counted["rwnd_limited_us"] += EVERY_S * 1e6 * self.host_limited
        counted["backoff"] = 0.0 if self.connected else counted["backoff"] + 0.1

    def _info(self, sent: float) -> TcpInfo:
        rtt_us = round((self.base_s + self.queue_s) * 1e6)
        sending = bool(sent)
        return info(**{name: int(value) for name, value in self.counted.items()} | {
            "mss_bytes": MSS, "rtt_us": rtt_us, "min_rtt_us": round(self.base_s * 1e6), "cwnd_segments": 900,
            "unacked": 400 * sending, "notsent_bytes": 200_000 * (sending and not self.app_limited),
            "flags": int(self.app_limited), "options": 8 * bool(self.marked_share),
            "max_pacing_bytes_per_s": round(self.offered_bps / 8) if self.paced else UNPACED[1],
        })  # fmt: skip
