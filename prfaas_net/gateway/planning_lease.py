"""Of several gateways that plan for one fleet, one at a time changes roles: the one that holds the nodes' lease.

The lease lies on the nodes whose role can change: each grants it to one gateway at a time, for some seconds. Whoever
has it from more than half of them may act. Two gateways cannot both have more than half, so no third party is needed,
and a gateway that dies, or that is cut off from most nodes, stops acting when its time is up, by its own clock.
Nodes that were never reached count as if they could change: a gateway that sees a part of its fleet must not take it
for the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pydantic import ValidationError

from prfaas_net.clock import Clock
from prfaas_net.errors import PrfaasError
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.nodes.role_messages import LeaseAnswer, LeaseCall

__all__ = ["PlannerLease"]

# A node that does not answer by then counts as one that has not granted it.
ASK_TIMEOUT_S = 2.0


class PlannerLease:
    """This gateway's hold on the right to change roles.

    Args:
        holder: a name that no other gateway has.
        ttl_s: how long it lasts without being renewed; it is renewed when a third of it has passed.

    Attributes:
        other: who has it, as far as nodes said.
    """

    def __init__(self, client: NodeClient, holder: str, clock: Clock, ttl_s: float) -> None:
        self.holder = holder
        self.other: str | None = None
        self._client = client
        self._clock = clock
        self._ttl_s = ttl_s
        self._until_s = float("-inf")
        self._asked_s = float("-inf")

    def held(self, now: float) -> bool:
        """Whether this gateway may change roles."""
        return now < self._until_s

    async def renew(self, nodes: Sequence[WatchedNode]) -> bool:
        """Ask for it, if it is time; returns whether it is held."""
        now = self._clock.now()
        if now - self._asked_s >= self._ttl_s / 3:
            self._asked_s = now
            await self._ask(nodes)
        return self.held(self._clock.now())

    async def give_back(self, nodes: Sequence[WatchedNode]) -> None:
        """Let another gateway have it at once."""
        if self.held(self._clock.now()):
            self._until_s = float("-inf")
            await asyncio.gather(*(self._call(node, 0.0) for node in _voters(nodes) if node.up))

    async def _ask(self, nodes: Sequence[WatchedNode]) -> None:
        """One node after the other, in the same order for all gateways: whoever has the first will have the rest."""
        voters = _voters(nodes)
        asked_s = self._clock.now()
        granted: list[WatchedNode] = []
        for node in voters:
            answer = await self._call(node, self._ttl_s) if node.up else None
            if answer is None:
                continue
            if not answer.granted:
                self.other, self._until_s = answer.holder, float("-inf")
                for grantor in granted:
                    await self._call(grantor, 0.0)
                granted.clear()
                break
            granted.append(node)
        if 2 * len(granted) > len(voters):
            self.other = None
            self._until_s = asked_s + self._ttl_s

    async def _call(self, node: WatchedNode, ttl_s: float) -> LeaseAnswer | None:
        """What a node says; None: nothing."""
        call = LeaseCall(holder=self.holder, ttl_s=ttl_s)
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                stream = await self._client.open(node.name, node.url, "/v1/lease", call)
                try:
                    return LeaseAnswer.model_validate(await stream.next())
                finally:
                    stream.close()
        except (PrfaasError, TimeoutError, ValidationError):
            return None


def _voters(nodes: Sequence[WatchedNode]) -> list[WatchedNode]:
    """Nodes that have a say: those whose role can change, and those of which nothing is known yet."""
    return sorted(
        (node for node in nodes if node.engine is None and (node.info is None or node.info.convertible)),
        key=lambda node: node.url,
    )
