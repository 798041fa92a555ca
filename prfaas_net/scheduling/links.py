"""What the router knows of the links between clusters: how much they carry, and how much has been promised to them."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas_net.congestion.verdict import LinkState

__all__ = ["LinkLoad"]

# What share of its budget a link is counted on for while nothing was measured, by state: TCP itself backs off to 0.7
# of its window where a queue builds (RFC 9438); a congested path is given half.
_TRUST = {LinkState.BUILDING: 0.7, LinkState.CONGESTED: 0.5}
# In these states too little is sent to see more: what is available is a lower bound, and the budget is counted on.
_AT_LEAST = (LinkState.IDLE, LinkState.APP_LIMITED)
# Below this a link carries nothing that a prediction could be made of.
MIN_BPS = 1e3


@dataclass(slots=True)
class LinkLoad:
    """All connections from one cluster to another.

    Attributes:
        source, destination: clusters.
        budget_bps: what KVCache may use of it; 0 while that is not known.
        paced_bps: what it is held to now, since it was in trouble; 0: to its budget.
        available_bps: what it carries now, by the last verdict.
        state: the last verdict's.
        rtt_s: of the empty path.
        promised_bits: of requests that were given to it and have not landed.
        transfers: how many those are.
    """

    source: str
    destination: str
    budget_bps: float = 0.0
    available_bps: float = 0.0
    state: LinkState = LinkState.IDLE
    rtt_s: float = 0.0
    promised_bits: float = 0.0
    transfers: int = 0
    paced_bps: float = 0.0

    @property
    def name(self) -> str:
        """``source>destination``."""
        return f"{self.source}>{self.destination}"

    @property
    def usable(self) -> bool:
        """Whether anything may be sent over it."""
        return self.state is not LinkState.DOWN

    @property
    def is_lower_bound(self) -> bool:
        """Whether what is available could not be seen to its full: too little is sent."""
        return self.state in _AT_LEAST

    @property
    def rate_bps(self) -> float:
        """What is counted on, in bits/s; 0 where the link was never described."""
        rate, budget, paced = self.available_bps, self.budget_bps, self.paced_bps
        if paced and (paced < budget or not budget):
            budget = paced
        if rate <= 0.0:
            rate = budget * _TRUST.get(self.state, 1.0)
        elif budget and (rate > budget or self.is_lower_bound):
            rate = budget
        return max(MIN_BPS, rate) if rate > 0.0 else 0.0
