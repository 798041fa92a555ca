"""A link that transfers share: what it carries at the moment is divided among them, never faster than data is made.

The model is fluid. By default the link serves as our transport does: what began first (whose deadline is earliest)
takes all it can use, and what it leaves goes to the next. ``fair`` gives every transfer an equal share instead, as
independent TCP connections have it. Either way a transfer that is made more slowly than its share takes what is made,
and leaves the rest to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas_net.sim.loop import Loop

__all__ = ["LEAST_BPS", "Flow", "SimLink"]

# Bits that rounding may leave of a transfer that is over.
NOTHING_BITS = 1.0
# Of a link whose capacity is gone: it still carries this much, so that everything ends.
LEAST_BPS = 1e3


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer.

    Attributes:
        bits: in all; ``sent_bits``: so far.
        made_from_s, made_until_s: while it is being made, at a constant rate; equal where all of it is there.
        landed: called with ``tag`` when the last bit has arrived.
    """

    bits: float
    made_from_s: float
    made_until_s: float
    landed: Callable[[object], None]
    tag: object
    sent_bits: float = 0.0
    rate_bps: float = 0.0
    behind: bool = False

    def made_bits(self, now: float) -> float:
        """How much of it exists."""
        if now >= self.made_until_s:
            return self.bits
        return self.bits * (now - self.made_from_s) / (self.made_until_s - self.made_from_s)

    @property
    def make_bps(self) -> float:
        return self.bits / (self.made_until_s - self.made_from_s)


@dataclass(eq=False)
class SimLink:
    """All connections from one cluster to another.

    Attributes:
        capacity_bps: what it carries now, cross traffic taken off.
        rtt_s: a transfer lands half of it after its last bit was sent.
        pace_bps: what all transfers together are held to.
        fair: equal shares, rather than first come, first served.
        woken: called when a transfer begins.
        sent_bits: by all transfers, so far.
        offered_bits: what it could have carried, so far.
    """

    loop: Loop
    source: str
    destination: str
    capacity_bps: float
    rtt_s: float = 0.0
    fair: bool = False
    pace_bps: float = math.inf
    woken: Callable[[], None] | None = None
    flows: list[Flow] = field(default_factory=list)
    sent_bits: float = 0.0
    offered_bits: float = 0.0
    _since_s: float = 0.0
    _epoch: int = 0

    def set_capacity(self, capacity_bps: float) -> None:
        """The link carries something else from now on."""
        self._advance()
        self.capacity_bps = max(LEAST_BPS, capacity_bps)
        self._share()

    def set_pace(self, pace_bps: float) -> None:
        """Transfers together send no faster from now on."""
        self._advance()
        self.pace_bps = pace_bps
        self._share()

    def send(self, bits: float, made_in_s: float, landed: Callable[[object], None], tag: object) -> Flow:
        """Begin a transfer whose data is made within ``made_in_s`` from now (0: it is all there)."""
        self._advance()
        now = self.loop.now
        flow = Flow(max(bits, NOTHING_BITS), now, now + made_in_s, landed, tag, behind=made_in_s <= 0)
        self.flows.append(flow)
        self._share()
        if self.woken is not None:
            self.woken()
        return flow

    def cancel(self, flow: Flow) -> None:
        """Forget a transfer: one of its ends is gone."""
        if flow in self.flows:
            self._advance()
            self.flows.remove(flow)
            self._share()

    def backlog_bits(self) -> float:
        """What has been made and not been sent."""
        self._advance()
        now = self.loop.now
        return sum(flow.made_bits(now) - flow.sent_bits for flow in self.flows)

    @property
    def behind(self) -> bool:
        """Whether a transfer could send more than it may."""
        return any(flow.behind for flow in self.flows)

    def wanted_bps(self) -> float:
        """What transfers would send if nothing held them back; without end where one is behind what is made of it."""
        return math.inf if self.behind else sum(flow.make_bps for flow in self.flows)

    def busy_bits(self) -> float:
        """What was sent so far, up to now."""
        self._advance()
        return self.sent_bits

    def _advance(self) -> None:
        """Carry all transfers from the last change to now."""
        now = self.loop.now
        passed_s = now - self._since_s
        if passed_s <= 0.0:
            return
        self._since_s = now
        self.offered_bits += self.capacity_bps * passed_s
        for flow in self.flows:
            bits = flow.rate_bps * passed_s
            flow.sent_bits += bits
            self.sent_bits += bits

    def _share(self) -> None:
        """End what is over, divide the link among the rest, and wake up when the division stops being right."""
        now = self.loop.now
        over = [f for f in self.flows if f.bits - f.sent_bits <= NOTHING_BITS and now >= f.made_until_s - 1e-9]
        if over:
            self.flows = [f for f in self.flows if f not in over]
            for flow in over:
                self.loop.after(self.rtt_s / 2, flow.landed, flow.tag)
        self._epoch += 1
        if not self.flows:
            return
        self._divide(now)
        self.loop.after(max(1e-9, self._steady_s(now)), self._wake, self._epoch)

    def _divide(self, now: float) -> None:
        left_bps = min(self.capacity_bps, self.pace_bps)
        waiting: list[tuple[float, Flow]] = []
        for flow in self.flows:
            if flow.behind or now >= flow.made_until_s:
                # Whether it has caught up with what is made; rounding must not make it lag for ever.
                behind = now >= flow.made_until_s or flow.made_bits(now) - flow.sent_bits > NOTHING_BITS
                flow.behind = behind
            waiting.append((math.inf if flow.behind else flow.make_bps, flow))
        if self.fair:
            # The slowest made first: what they do not take is divided among the others.
            waiting.sort(key=lambda pair: pair[0])
        for i, (cap_bps, flow) in enumerate(waiting):
            share_bps = left_bps / (len(waiting) - i) if self.fair else left_bps
            flow.rate_bps = min(cap_bps, share_bps)
            if cap_bps > share_bps:
                flow.behind = True
            left_bps -= flow.rate_bps

    def _steady_s(self, now: float) -> float:
        """Seconds until a transfer ends, is made whole, or has caught up."""
        soonest = math.inf
        for flow in self.flows:
            making = now < flow.made_until_s
            if flow.rate_bps <= 0.0:
                continue
            if not flow.behind:
                until_s = flow.made_until_s - now
            elif making:
                until_s = flow.made_until_s - now
                gain_bps = flow.rate_bps - flow.make_bps
                if gain_bps > 0:
                    until_s = min(until_s, max(0.0, flow.made_bits(now) - flow.sent_bits) / gain_bps)
            else:
                until_s = (flow.bits - flow.sent_bits) / flow.rate_bps
            soonest = min(soonest, until_s)
        return soonest

    def _wake(self, epoch: object) -> None:
        if epoch == self._epoch:
            self._advance()
            self._share()
