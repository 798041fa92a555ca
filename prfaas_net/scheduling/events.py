"""What the router is told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas_net.errors import UsageError
from prfaas_net.scheduling.state import ClusterKind, NodeState, Role

__all__ = [
    "Arrival",
    "Candidate",
    "Decision",
    "FleetEvent",
    "NodeDown",
    "NodeForgotten",
    "NodeSeen",
    "PrefillEnded",
    "RequestEnded",
]


@dataclass(frozen=True)
class Arrival:
    """A request wants to be served.

    Attributes:
        output_tokens: most tokens it may generate.
        cached_tokens: by cluster, how long a prefix of the prompt is cached there.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 1
    cached_tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise UsageError(
                "a request has at least one prompt token and one output token",
                found=f"{self.prompt_tokens} and {self.output_tokens}",
            )

    def cached_in(self, cluster: str) -> int:
        """Usable prefix in a cluster, in tokens: the last prompt token is always computed, for its logits."""
        return max(0, min(self.cached_tokens.get(cluster, 0), self.prompt_tokens - 1))


@dataclass(frozen=True)
class NodeSeen:
    """A node is up; it is new, has come back, or says again what it is."""

    node_id: str
    cluster: str
    role: Role
    max_model_tokens: int
    prefill_chunk_tokens: int = 1


@dataclass(frozen=True)
class NodeDown:
    """A node takes no new work."""

    node_id: str


@dataclass(frozen=True)
class NodeForgotten:
    """A node is gone for good."""

    node_id: str


@dataclass(frozen=True)
class PrefillEnded:
    """A request's prompt has been computed (or given up); the prefill node's queue is shorter."""

    request_id: str


@dataclass(frozen=True)
class RequestEnded:
    """A request is over, however it ended."""

    request_id: str


FleetEvent = NodeSeen | NodeDown | NodeForgotten | PrefillEnded | RequestEnded


@dataclass(frozen=True)
class Candidate:
    """One way to serve a request: the least loaded prefill node of one cluster.

    Attributes:
        local: whether it stands in the cluster where the request will be decoded.
        cached_tokens: prefix of the prompt that its cluster holds.
        incremental_tokens: what it would have to compute.
    """

    node: NodeState
    kind: ClusterKind
    local: bool
    cached_tokens: int
    incremental_tokens: int


@dataclass(frozen=True)
class Decision:
    """Where a request is prefilled and decoded, and why.

    Attributes:
        chunk_tokens: token granularity in which the prefill node completes layers.
        cached_tokens: prefix that the prefill cluster holds.
        incremental_tokens: what is prefilled, ``l`` of the paper for that cluster.
        threshold_tokens: ``t`` when the decision was made; None if the policy has none.
        reasons: short sentences, for ``explain``.
    """

    request_id: str
    policy: str
    prefill_cluster: str
    prefill_node: str
    decode_cluster: str
    decode_node: str
    chunk_tokens: int
    cached_tokens: int
    incremental_tokens: int
    threshold_tokens: int | None
    reasons: tuple[str, ...]
