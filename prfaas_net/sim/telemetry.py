"""What the kernel would say of a simulated link's sockets, and what the real detector makes of it.

A fluid link knows what every transfer sends and what the path carries. From that, at each look, the counters and round
trips of one TCP connection (BBR's, as our links choose it between hosts) that carries all of it are made up:

* what we send beyond what the path carries stands in its queue, and what does not fit there is lost and sent again;
* TCP itself follows what arrives within a round trip, and leaves one bandwidth-delay product in the queue (BBR's window
  is two of them);
* others who take the path keep a share of its queue full while they are there;
* a path that carries nothing lets timeouts pile up.

Everything behind that is what a node and a gateway run: detector, pacing budget, what is news, the sum of a link. One
connection stands for all: what a cluster's nodes would each see of the shared path is taken to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from prfaas_net.congestion.budget import BudgetFollower
from prfaas_net.congestion.detectors import DETECTORS
from prfaas_net.congestion.looking import LOOK_IDLE_S, MANY_CONNECTIONS, VerdictNews, look_within_s
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.congestion.verdict import LinkState, Verdict
from prfaas_net.scheduling import LinkBook, LinkSeen
from prfaas_net.sim.loop import Loop
from prfaas_net.sim.network import LEAST_BPS, SimLink

__all__ = ["LinkTelemetry"]

# Jumbo frames, as datacenters have them.
MSS_BYTES = 8948
# The path's queue, in bandwidth-delay products at its best: what switches of a leased line are bought with.
BUFFER_BDP = 1.0
# A path without delay would have no queue; and no smoothed round trip is shorter than this between two hosts.
LEAST_RTT_S = 1e-4
# Of the queue, while others take the path: a few loss-based flows keep it between half full and full.
RIVALS_SHARE = 0.5
# Smoothed round trips are as steady as that on a quiet path.
JITTER_S = 2e-4
# First retransmission timeout (Linux, at least), and so the rate at which timeouts pile up: each doubles it.
RTO_S = 0.2
# More connections than this a link of a cluster surely has: it is looked at as such.
CONNECTIONS = MANY_CONNECTIONS + 1


class LinkTelemetry:
    """The looks of one link, from the moment when it has something to send until it has been quiet for a while.

    Args:
        best_bps: what the path carries at its best; ``budget_bps`` what KVCache may use of it.
        rivals: what it does not carry is taken by others, who queue; otherwise it is just not there.
        beat_s: how often the state is told though nothing happened.
        told: called with what a gateway would make of it, half a round trip later.
    """

    def __init__(
        self, loop: Loop, link: SimLink, *, best_bps: float, budget_bps: float, rivals: bool, beat_s: float,
        rng: Random, told: Callable[[LinkSeen], None],
    ) -> None:  # fmt: skip
        self._loop, self._link, self._rng, self._told = loop, link, rng, told
        self._best_bps = best_bps
        self._rivals = rivals
        self._beat_s = beat_s
        self._base_s = max(LEAST_RTT_S, link.rtt_s)
        self._buffer_bits = BUFFER_BDP * best_bps * self._base_s
        self._detector = next(iter(DETECTORS.values()))("bbr")
        self._follower = BudgetFollower(int(budget_bps))
        self._news = VerdictNews()
        self._book = LinkBook()
        # Before anything can be measured there is one look, at nothing.
        self._looked_s = self._stalled_since_s = self._told_s = loop.now
        self._delivered_bits = self._sent_bits = self._again_bits = 0.0
        self._queue_bits, self._tcp_bps = 0.0, budget_bps
        self._epoch, self._looking, self._idle = 0, False, True
        self.name = f"{link.source}>{link.destination}"
        self.looks = 0
        self.verdicts: list[tuple[float, LinkState]] = []
        link.woken = self._wake
        link.set_pace(budget_bps)

    def _wake(self) -> None:
        """There is something to send: an idle link is looked at now."""
        if not self._looking or self._idle:
            if not self._looking:
                # Where nothing was sent there was nothing to see, but the last look was not long ago.
                self._looked_s = max(self._looked_s, self._loop.now - self._rng.uniform(*LOOK_IDLE_S) / 2)
                self._detector.observe(self._sample(self._looked_s))
            self._looking, self._idle = True, False
            self._epoch += 1
            self._look(self._epoch)

    def _look(self, epoch: object) -> None:
        if epoch != self._epoch:
            return
        self.looks += 1
        verdict = self._detector.observe(self._sample(self._loop.now))
        before = self._follower.budget_bps
        if self._follower.follow(verdict, now=verdict.at_s) != before:
            self._link.set_pace(self._follower.budget_bps)
        self._tell(verdict)
        self._next(verdict.state)

    def _next(self, state: LinkState) -> None:
        """Look again soon; not at all where nothing is sent and nothing can change any more."""
        in_use = bool(self._link.flows)
        self._idle = state is LinkState.IDLE and not in_use
        self._looking = not self._idle or self._follower.budget_bps < self._follower.configured_bps
        if self._looking:
            bounds = look_within_s(state, in_use=in_use, connections=CONNECTIONS)
            self._loop.after(self._rng.uniform(*bounds), self._look, self._epoch)

    def _tell(self, verdict: Verdict) -> None:
        news, now = self._news.is_news(verdict), self._loop.now
        if not news and now - self._told_s < self._beat_s:
            return
        self._told_s = now
        if news and (not self.verdicts or self.verdicts[-1][1] is not verdict.state):
            self.verdicts.append((now, verdict.state))
        report = {
            "peer": self._link.destination, "state": verdict.state.value, "available_bps": verdict.available_bps,
            "base_rtt_s": verdict.base_rtt_s, "budget_bps": self._follower.budget_bps,
            "configured_budget_bps": self._follower.configured_bps,
        }  # fmt: skip
        for seen in self._book.note(self._link.source, self._link.source, [(self._link.destination, report)]):
            self._loop.after(self._base_s / 2, self._hear, seen)

    def _hear(self, seen: LinkSeen) -> None:
        self._told(seen)

    # What TCP would show.

    def _sample(self, now: float) -> LinkSample:
        link = self._link
        passed_s, self._looked_s = now - self._looked_s, now
        # Of a path that is dead not even the little counts that lets the simulation go on.
        delivered = link.busy_bits() - self._delivered_bits if link.capacity_bps > LEAST_BPS else 0.0
        self._delivered_bits += delivered
        wanted_bps = link.wanted_bps()
        lost = self._queue(min(wanted_bps, self._follower.budget_bps), passed_s)
        self._sent_bits += delivered + lost
        self._again_bits += lost
        backlog_bits = link.backlog_bits()
        info = self._info(wanted_bps, delivered / passed_s if passed_s > 0 else 0.0, backlog_bits)
        return LinkSample(now, True, int(backlog_bits / 8), ((0, info),))

    def _queue(self, wanted_bps: float, passed_s: float) -> float:
        """Fill or drain the queue; bits that did not fit."""
        capacity_bps = self._link.capacity_bps
        if wanted_bps > capacity_bps and self._queue_bits > 0:
            # Its window is full: what it sends follows what is acknowledged.
            self._tcp_bps += (capacity_bps - self._tcp_bps) * min(1.0, passed_s / self._base_s)
        else:
            self._tcp_bps = wanted_bps
        sent_bps = min(wanted_bps, self._tcp_bps)
        room_bits = max(0.0, self._buffer_bits - self._rivals_bits)
        wished_bits = max(0.0, self._queue_bits + (sent_bps - capacity_bps) * passed_s)
        self._queue_bits = min(wished_bits, room_bits)
        return wished_bits - self._queue_bits

    @property
    def _rivals_bits(self) -> float:
        there = self._rivals and self._link.capacity_bps < 0.999 * self._best_bps
        return RIVALS_SHARE * self._buffer_bits if there else 0.0

    @property
    def _drain_bps(self) -> float:
        """Rate at which the queue empties: of the whole path, where others have their part of it."""
        return self._best_bps if self._rivals else self._link.capacity_bps

    def _info(self, wanted_bps: float, rate_bps: float, backlog_bits: float) -> TcpInfo:
        link, now = self._link, self._loop.now
        sending, dead = bool(link.flows), link.capacity_bps <= LEAST_BPS
        if not (sending and dead):
            self._stalled_since_s = now
        timeouts = int(math.log2(1 + (now - self._stalled_since_s) / RTO_S))
        queued_s = (self._queue_bits + self._rivals_bits) / self._drain_bps if not dead else 0.0
        rtt_s = self._base_s + queued_s + abs(self._rng.gauss(0.0, JITTER_S))
        limited = not link.behind or wanted_bps < 0.98 * min(self._follower.budget_bps, link.capacity_bps)
        delivered_bytes = int(self._delivered_bits / 8)
        return TcpInfo(
            retransmits=timeouts, backoff=timeouts, options=0, flags=int(limited), rto_us=int(1e6 * (RTO_S + rtt_s)),
            mss_bytes=MSS_BYTES, unacked=max(1, int(rate_bps * rtt_s / 8 / MSS_BYTES)) if sending else 0, lost=0,
            last_ack_ms=int(1e3 * (now - self._stalled_since_s)), rtt_us=int(1e6 * rtt_s),
            rttvar_us=int(1e6 * JITTER_S), cwnd_segments=max(10, int(2 * rate_bps * self._base_s / 8 / MSS_BYTES)),
            total_retrans=int(self._again_bits / 8 / MSS_BYTES), pacing_bytes_per_s=int(self._follower.budget_bps / 8),
            max_pacing_bytes_per_s=int(self._follower.budget_bps / 8), bytes_acked=delivered_bytes,
            notsent_bytes=0 if limited else int(backlog_bits / 8), min_rtt_us=int(1e6 * self._base_s),
            delivery_rate_bytes_per_s=int(rate_bps / 8), busy_us=0, rwnd_limited_us=0, sndbuf_limited_us=0,
            delivered=delivered_bytes // MSS_BYTES, delivered_ce=0, bytes_sent=int(self._sent_bits / 8),
            bytes_retrans=int(self._again_bits / 8),
        )  # fmt: skip
