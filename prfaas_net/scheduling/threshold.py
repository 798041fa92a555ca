"""``threshold``: the paper's policy, with both of its predicates and what decides between them.

While bandwidth is *scarce* every cluster's cache is judged alone: ``l`` is the prompt less what the local PD cluster
holds. While it is *abundant* the longest prefix that any cluster holds counts, and is copied to where the prompt is
computed (paper, section 3.4.3). The paper does not say when the one becomes the other; here a link's promised
work and its verdict do, with hysteresis and a dwell time, so that one burst does not flip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.candidates import Candidate
from prfaas_net.scheduling.events import Arrival, FleetEvent, LinkSeen, ThresholdSet
from prfaas_net.scheduling.policies import towards
from prfaas_net.scheduling.policy import Policy, PolicySettings, Ranking, register
from prfaas_net.scheduling.state import ClusterKind, FleetState

__all__ = ["Bandwidth", "ThresholdPolicy"]

# Seconds of promised work on the busiest link: above the first bandwidth is scarce, below the second abundant. A
# prompt of the case study occupies a link of 100 Gbps for 0.08 s.
SCARCE_BACKLOG_S, ABUNDANT_BACKLOG_S = 2.0, 0.5
# Share of a link's budget that must be available for abundance, and below which it is scarce.
ABUNDANT_SHARE, SCARCE_SHARE = 0.5, 0.25
# Seconds from one change to the next.
DWELL_S = 5.0


class Bandwidth(StrEnum):
    """Which predicate applies."""

    SCARCE = "scarce"
    ABUNDANT = "abundant"


class ThresholdPolicy(Policy):
    """Offload a request when its incremental prefill length exceeds ``t``, strictly (paper, section 3.3)."""

    name = "threshold"

    def __init__(self, threshold_tokens: int) -> None:
        self.threshold_tokens = 0
        self._set(threshold_tokens)
        self.bandwidth = Bandwidth.SCARCE
        self.changed_s = float("-inf")

    @property
    def copies(self) -> bool:  # type: ignore[override]
        """Prefixes are copied between clusters only while bandwidth is abundant."""
        return self.bandwidth is Bandwidth.ABUNDANT

    def observe(self, event: FleetEvent, state: FleetState, *, now: float) -> None:
        if isinstance(event, ThresholdSet):
            self._set(event.threshold_tokens)
        elif isinstance(event, LinkSeen) and now - self.changed_s >= DWELL_S:
            found = self._judge(state)
            if found is not self.bandwidth:
                self.bandwidth, self.changed_s = found, now

    def rank(self, arrival: Arrival, candidates: Sequence[Candidate], state: FleetState, *, now: float) -> Ranking:
        at_home = [c for c in candidates if c.local] or [c for c in candidates if c.kind is ClusterKind.PD]
        plain = [c for c in candidates if c.copy_from is None]
        if self.bandwidth is Bandwidth.ABUNDANT:
            # Each candidate may use the longest prefix there is; those with a copy have it in incremental_tokens.
            length = min(c.incremental_tokens for c in candidates)
        else:
            # With no local prefill node there is no local cache to speak of, and l is the whole prompt.
            length = min((c.incremental_tokens for c in at_home if c.copy_from is None), default=arrival.prompt_tokens)
        remote = length > self.threshold_tokens
        sign, place = (">", "the PrfaaS cluster") if remote else ("<=", "the local PD cluster")
        reason = f"l = {length} {sign} t = {self.threshold_tokens} tokens: {place}"
        order, fallback = towards(plain, remote=remote)
        if self.bandwidth is Bandwidth.ABUNDANT:
            copy = next((c for c in candidates if c.copy_from and c.node is order[0].node), None)
            if copy is not None:
                order = [copy, *order]
                fallback = (*fallback, f"bandwidth is abundant: a prefix is copied from {copy.copy_from}")
        return Ranking(order, (reason, *fallback), self.threshold_tokens)

    def _set(self, threshold_tokens: int) -> None:
        if threshold_tokens < 0:
            raise ConfigError("a threshold cannot be negative", expected="tokens", found=threshold_tokens)
        self.threshold_tokens = threshold_tokens

    def _judge(self, state: FleetState) -> Bandwidth:
        """What the links say now; in between the two marks, what they said before."""
        links = [link for link in state.links.values() if link.rate_bps > 0.0]
        if not links:
            return Bandwidth.SCARCE
        backlog_s = max(link.promised_bits / link.rate_bps for link in links)
        share = min(link.rate_bps / (link.budget_bps or link.rate_bps) for link in links)
        bad = any(link.state in (LinkState.BUILDING, LinkState.CONGESTED, LinkState.DOWN) for link in links)
        if bad or backlog_s > SCARCE_BACKLOG_S or share < SCARCE_SHARE:
            return Bandwidth.SCARCE
        if backlog_s < ABUNDANT_BACKLOG_S and share >= ABUNDANT_SHARE:
            return Bandwidth.ABUNDANT
        return self.bandwidth


def _make(settings: PolicySettings) -> Policy:
    return ThresholdPolicy(settings.threshold_tokens)


register("threshold", _make)
