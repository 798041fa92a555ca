"""``earliest-finish``: predict the time to the first token on every candidate, and charge each for those behind it.

Plain greed takes whichever candidate is predicted to end first, and so lets a long prompt take a slow node while the
fast one is just busy. What a choice costs *others* is added: a prompt that occupies one of ``k`` nodes for ``s``
seconds delays, by ``s / k``, everybody who arrives while the queue that it joins lasts. That queue lasts for a small
multiple (``price``) of the wait that the prompt itself finds, and nobody waits where nobody queues. A node on which a
prompt is relatively fast is thereby preferred as load rises (comparative advantage), which carries more.

A link is not charged so: what waits for one that has been squeezed is gone the moment that it recovers, whereas what
was put on a slower node instead has still to be computed. For the same reason a link that carries less than its budget
is expected to recover, within ``RECOVERY_S`` on average. A candidate is refused when its link is down, or so far behind
(``LINK_PATIENCE_S``) that computing at home is sooner for certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

from prfaas_net.scheduling.candidates import Candidate
from prfaas_net.scheduling.events import Arrival
from prfaas_net.scheduling.policy import Policy, PolicySettings, Ranking, register
from prfaas_net.scheduling.state import FleetState

__all__ = ["EarliestFinishPolicy"]

# How long a transfer may be held up by its link after the prompt was computed: about the longest prefill of the case
# study on the slower hardware, so that computing at home is never worse.
LINK_PATIENCE_S = 20.0
# A link below this share of its budget is squeezed, and recovers after so long on average where nothing else is known:
# cross traffic comes in bursts of some tens of seconds. Simulated with 20, 30 and 60 s, it made 3 % of the mean.
SQUEEZED_SHARE, RECOVERY_S = 0.95, 30.0
# A copied prefix must save this much: predictions are not exact, and a copy occupies a link.
COPY_GAIN_S = 0.1


class EarliestFinishPolicy(Policy):
    """Rank by predicted TTFT plus ``price`` times what the choice costs others.

    Args:
        price: how many times the wait that a prompt finds its node's queue is taken to last; 0 is plain greed.
        link_patience_s: how much later than at home what crosses a link may be there.
    """

    name = "earliest-finish"
    copies = True
    every_decode_cluster = True

    def __init__(self, price: float = 3.0, link_patience_s: float = LINK_PATIENCE_S) -> None:
        self.price = price
        self.link_patience_s = link_patience_s

    def rank(self, arrival: Arrival, candidates: Sequence[Candidate], state: FleetState, *, now: float) -> Ranking:
        if len(candidates) == 1:
            return Ranking(candidates, (f"{_name(candidates[0])} is the only candidate",))
        soonest_s = min([c.ttft_s for c in candidates if c.link is None], default=inf)
        costs = [(self._cost(c), i) for i, c in enumerate(candidates) if self._within_budget(c, soonest_s)]
        refused = len(candidates) - len(costs)
        if not costs:
            costs = [(self._cost(c), i) for i, c in enumerate(candidates)]
        costs.sort()
        order = [candidates[i] for _, i in costs]
        best = order[0]
        if len(order) > 1:
            other = order[1]
            reason = f"ready in {best.ttft_s:.2f} s on {_name(best)}, {other.ttft_s:.2f} s on {_name(other)}"
            if best.ttft_s > other.ttft_s:
                reason += ", which others need more"
        else:
            reason = f"ready in {best.ttft_s:.2f} s on {_name(best)}"
        if refused:
            return Ranking(order, (reason, f"{refused} of {len(candidates)} refused: their link has no budget left"))
        return Ranking(order, (reason,))

    def _cost(self, c: Candidate) -> float:
        """Predicted TTFT and what others pay, in seconds."""
        cost = c.ttft_s + c.decode_wait_s + self.price * c.wait_s * c.prefill_s / c.peers
        link = c.link
        if link is not None and link.rate_bps < SQUEEZED_SHARE * link.budget_bps:
            # Of the time that the link holds it up, only what it will take if the link recovers by chance at any time.
            sending_s = c.link_wait_s + c.link_s
            held_up_s = c.ttft_s - c.wait_s - c.prefill_s
            if held_up_s > 0.0:
                cost -= min(held_up_s, sending_s - RECOVERY_S * (1.0 - exp(-sending_s / RECOVERY_S)))
        return cost + COPY_GAIN_S if c.copy_from is not None else cost

    def _within_budget(self, c: Candidate, soonest_s: float) -> bool:
        if c.link is None:
            return True
        return c.link.usable and c.link_wait_s + c.link_s <= soonest_s + self.link_patience_s


def _name(candidate: Candidate) -> str:
    if candidate.copy_from is not None:
        return f"{candidate.node.node_id} with a prefix from {candidate.copy_from}"
    return candidate.node.node_id


def _make(settings: PolicySettings) -> Policy:
    patience_s = LINK_PATIENCE_S if settings.link_patience_s is None else settings.link_patience_s
    return EarliestFinishPolicy(settings.price, patience_s)


register("earliest-finish", _make)
