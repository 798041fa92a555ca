"""What changed between two looks at a link, whatever the counters did meanwhile.

Counters wrap, connections are replaced under the same number, kernels leave fields out. A counter that runs backwards
belongs to another connection, and its difference is not taken.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.tcp_info import TcpInfo

__all__ = ["MIN_STEP_S", "SignalTracker", "Step"]

# Looks closer together than this say nothing about rates; their counters go to the next step.
MIN_STEP_S = 1e-3
# BBR sends so little while it looks for the round trip of the empty path (200 ms every 10 s, bbr_cwnd_min_target of
# linux/net/ipv4/tcp_bbr.c).
BBR_PROBE_CWND = 4
_WRAP, _HALF = 1 << 32, 1 << 31


class Step(NamedTuple):
    """From one look to the next, over all data connections that were there at both.

    Attributes:
        srtt_s: the least smoothed round trip of connections that got an acknowledgement; None if none did.
        min_rtt_s: the kernel's least minimum, of the same.
        delivered_bytes: that arrived, in whole segments, also behind a gap.
        delivered, marked: segments that arrived, and those with a congestion mark.
        host_us: mean time that a connection with something to send was held up by the receiver or the send buffer.
        app_us: the time, if what was delivered was more likely cut short by us than not.
        sending: connections with something under way or not sent.
        paced_bps: what we have paced the link to; None if a connection is not paced.
        stalled_s: since anything was acknowledged, while something is under way.
        timeouts: most retransmission timeouts in a row of one connection.
        probing: a BBR connection is looking for its least round trip, and sends next to nothing.
        ecn: marks can be expected.
    """

    at_s: float
    dt_s: float
    alive: bool
    backlog_bytes: int
    srtt_s: float | None
    min_rtt_s: float | None
    delivered_bytes: int
    sent_bytes: int
    retrans_bytes: int
    delivered: int
    marked: int
    host_us: int
    app_us: int
    sending: int
    unacked: int
    notsent_bytes: int
    paced_bps: float | None
    stalled_s: float
    timeouts: int
    probing: bool
    ecn: bool


class _Sums:
    """Of one step."""

    __slots__ = ("app", "delivered", "delivered_bytes", "fresh", "host_us", "marked", "min_rtt_us", "retrans_bytes",
                 "sent_bytes", "srtt_us")  # fmt: skip

    def __init__(self) -> None:
        self.delivered_bytes = self.sent_bytes = self.retrans_bytes = self.delivered = self.marked = 0
        self.host_us = self.fresh = self.app = 0
        self.srtt_us = self.min_rtt_us = 0

    def add(self, old: TcpInfo, new: TcpInfo) -> bool:
        """One connection; whether it got on."""
        acked = new.bytes_acked - old.bytes_acked
        sent = new.bytes_sent - old.bytes_sent
        if acked < 0 or sent < 0:
            return True  # another connection
        mss = new.mss_bytes
        delivered = _difference32(new.delivered, old.delivered)
        arrived = delivered * mss or acked
        if new.bytes_sent:
            again = max(0, new.bytes_retrans - old.bytes_retrans)
        else:  # a kernel older than 4.19
            again = _difference32(new.total_retrans, old.total_retrans) * mss
            sent = arrived + again
        self.sent_bytes += sent
        self.retrans_bytes += min(again, sent)
        self.host_us += max(0, new.rwnd_limited_us - old.rwnd_limited_us)
        self.host_us += max(0, new.sndbuf_limited_us - old.sndbuf_limited_us)
        if not arrived:
            return False
        self.delivered_bytes += arrived
        self.delivered += delivered
        self.marked += min(delivered, _difference32(new.delivered_ce, old.delivered_ce))
        self.fresh += 1
        self.app += new.flags & 1
        if new.rtt_us and (not self.srtt_us or new.rtt_us < self.srtt_us):
            self.srtt_us = new.rtt_us
        if new.min_rtt_us and (not self.min_rtt_us or new.min_rtt_us < self.min_rtt_us):
            self.min_rtt_us = new.min_rtt_us
        return True


def _difference32(new: int, old: int) -> int:
    """Of counters of 32 bits that may have wrapped once; 0 if they ran backwards."""
    difference = (new - old) % _WRAP
    return difference if difference < _HALF else 0


class SignalTracker:
    """Looks in, steps out.

    Args:
        congestion_control: of the data connections.
    """

    def __init__(self, congestion_control: str) -> None:
        self._bbr = congestion_control.startswith("bbr")
        self._at_s: float | None = None
        self._seen: dict[int, TcpInfo] = {}
        self._progress_s: dict[int, float] = {}

    def add(self, sample: LinkSample) -> Step | None:
        """Take a look; None if no time has passed since the last one, or it is the first."""
        if not math.isfinite(sample.at_s):
            return None
        last_s = self._at_s
        if last_s is not None and 0 <= sample.at_s - last_s < MIN_STEP_S:
            return None
        self._at_s = sample.at_s
        if last_s is None or sample.at_s < last_s:
            # The clock of another process: nothing before it can be compared.
            self._seen = dict(sample.connections)
            self._progress_s = dict.fromkeys(self._seen, sample.at_s)
            return None
        return self._step(sample, sample.at_s - last_s)

    def _step(self, sample: LinkSample, dt_s: float) -> Step:
        sums, progress_s, now = _Sums(), {}, sample.at_s
        sending = unacked = notsent = timeouts = paced = 0
        unpaced = probing = ecn = False
        latest_s = -math.inf
        for number, info in sample.connections:
            old = self._seen.get(number)
            moved = old is None or sums.add(old, info)
            at_s = now if moved or not info.unacked else self._progress_s.get(number, now)
            progress_s[number] = at_s
            if info.unacked:
                latest_s = max(latest_s, at_s)
                timeouts = max(timeouts, info.backoff)
                probing |= self._bbr and info.cwnd_segments <= BBR_PROBE_CWND
            if info.unacked or info.notsent_bytes:
                sending += 1
            unacked += info.unacked
            notsent += info.notsent_bytes
            rate = info.paced_bps
            paced += rate or 0
            unpaced |= rate is None
            ecn |= info.ecn
        self._seen, self._progress_s = dict(sample.connections), progress_s
        dt_us = int(dt_s * 1e6)
        return Step(
            at_s=now,
            dt_s=dt_s,
            alive=sample.alive and bool(sample.connections),
            backlog_bytes=sample.backlog_bytes,
            srtt_s=sums.srtt_us / 1e6 if sums.srtt_us else None,
            min_rtt_s=sums.min_rtt_us / 1e6 if sums.min_rtt_us else None,
            delivered_bytes=sums.delivered_bytes,
            sent_bytes=sums.sent_bytes,
            retrans_bytes=sums.retrans_bytes,
            delivered=sums.delivered,
            marked=sums.marked,
            host_us=min(dt_us, sums.host_us // max(1, sending)),
            app_us=dt_us if 2 * sums.app > sums.fresh else 0,
            sending=sending,
            unacked=unacked,
            notsent_bytes=notsent,
            paced_bps=None if unpaced or not paced else float(paced),
            stalled_s=now - latest_s if latest_s > -math.inf else 0.0,
            timeouts=timeouts,
            probing=probing,
            ecn=ecn,
        )
