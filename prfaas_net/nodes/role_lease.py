"""One planner at a time: the lease on a node's role. Reads no clock: ``now`` is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas_net.nodes.role_messages import LeaseAnswer, LeaseCall

__all__ = ["RoleLease"]


@dataclass
class RoleLease:
    """Who may change the role of a node.

    It counts on the node's clock from when it was asked for, and for its holder from before it asked: so the holder
    stops in time, whatever the network does. It is lost when the node restarts: such a node is not changing its role.
    """

    _holder: str | None = None
    _until_s: float = 0.0

    def holder(self, now: float) -> str | None:
        """Who holds it; None: nobody."""
        return self._holder if now < self._until_s else None

    def ask(self, call: LeaseCall, *, now: float) -> LeaseAnswer:
        """Grant it, prolong it, take it back, or say who has it."""
        holder = self.holder(now)
        if holder not in (None, call.holder):
            return LeaseAnswer(granted=False, holder=holder, left_s=self._until_s - now)
        self._holder, self._until_s = (call.holder, now + call.ttl_s) if call.ttl_s else (None, 0.0)
        return LeaseAnswer(granted=True, holder=self._holder, left_s=call.ttl_s)

    def allows(self, holder: str | None, *, now: float) -> bool:
        """Whether this planner (or, without one, a person) may change the role now."""
        return self.holder(now) in (None, holder)
