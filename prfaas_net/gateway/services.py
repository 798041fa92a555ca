"""What a request needs of the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prfaas_net.cache.manager import Match
from prfaas_net.clock import Clock
from prfaas_net.gateway.cache_desk import CacheDesk
from prfaas_net.gateway.cache_moves import CacheMoves
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import Fleet
from prfaas_net.gateway.request import Finish, ServingRequest, Token
from prfaas_net.scheduling import Arrival, Decision, PrefillEnded, RequestEnded, Router, TransferLanded

__all__ = ["Finish", "Services", "ServingRequest", "Token"]


@dataclass(frozen=True)
class Services:
    """What a request needs of the gateway.

    Attributes:
        clock: for the router and for the times in records.
        moves: brings cached prefixes to where they are wanted; None: nothing does.
        ttft_limit_s: requests whose first token is predicted later than this are refused at once; None: none is.
    """

    router: Router
    fleet: Fleet
    client: NodeClient
    desk: CacheDesk
    clock: Clock
    ttft_limit_s: float | None = None
    moves: CacheMoves | None = None

    def decide(
        self, request: ServingRequest, cached: Match, excluded: Sequence[str] = (), *, again: bool = False
    ) -> Decision:
        """Ask the router.

        Args:
            cached: by node, how long a prefix of the prompt a prefill there could start from. (A node uses only what
                it holds itself.)
            excluded: nodes that have failed the request.
            again: it was let in before, and is no longer turned away for being late.
        """
        # What only some may share stays where it is.
        copyable = {}
        if self.moves is not None and self.router.policy.copies and not request.cache_salt:
            copyable = self.moves.copyable(cached)
        arrival = Arrival(
            request.request_id,
            len(request.token_ids),
            request.sampling.max_tokens,
            node_cached_tokens={node.node_id: node.usable_tokens for node in cached.nodes},
            ttft_limit_s=None if again else self.ttft_limit_s,
            excluded_nodes=tuple(excluded),
            copyable_tokens=copyable,
        )
        return self.router.decide(arrival, now=self.clock.now())

    def cached_on(self, request: ServingRequest, keys: bytes) -> Match:
        """What the prefill nodes hold of the prompt."""
        nodes = self.desk.caches.match(keys, len(request.token_ids)).nodes
        return Match(tuple(node for node in nodes if self.fleet.computes(node.node_id)))

    def observe(self, event: PrefillEnded | TransferLanded | RequestEnded) -> None:
        """Tell the router."""
        self.router.observe(event, now=self.clock.now())
