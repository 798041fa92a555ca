"""What the router is told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import UsageError
from prfaas_net.scheduling.profiles import NodeProfile
from prfaas_net.scheduling.state import Alone, Role

__all__ = [
    "Alternative",
    "Arrival",
    "Decision",
    "FleetEvent",
    "LinkSeen",
    "NodeDown",
    "NodeForgotten",
    "NodeSeen",
    "PrefillEnded",
    "QueueSeen",
    "RequestEnded",
    "ThresholdSet",
    "TransferLanded",
    "TransferProgress",
]

_NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True)
class Arrival:
    """A request wants to be served.

    Attributes:
        output_tokens: most tokens it may generate.
        cached_tokens: by cluster, how long a prefix of the prompt is cached there.
        node_cached_tokens: by node, where one holds more of it than its cluster shares.
        ttft_limit_s: the first token is worthless later than this after ``now``; None: whenever it comes.
        excluded_nodes: nodes that have failed it already.
        copyable_tokens: by cluster, how long a prefix could be copied out of it, where that is not ``cached_tokens``.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 1
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    node_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    ttft_limit_s: float | None = None
    excluded_nodes: tuple[str, ...] = ()
    copyable_tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise UsageError(
                "a request has at least one prompt token and one output token",
                found=f"{self.prompt_tokens} and {self.output_tokens}",
            )

    def cached_in(self, cluster: str, node_id: str | None = None) -> int:
        """Usable prefix in a cluster, or on one of its nodes: the last prompt token is always computed, for its
        logits."""
        cached = self.cached_tokens.get(cluster, 0)
        if node_id is not None and self.node_cached_tokens:
            cached = max(cached, self.node_cached_tokens.get(node_id, 0))
        return max(0, min(cached, self.prompt_tokens - 1))


@dataclass(frozen=True)
class NodeSeen:
    """A node is up; it is new, has come back, or says again what it is.

    Attributes:
        profile: how long it takes; without one the router learns its pace from nothing.
        max_batch: requests that it decodes together; 0 if it does not say.
        alone: whether it computes prompts itself (decode nodes).
        convertible: whether it can take the other role.
        next_role: the role that it is about to take: it ends what it has, and gets no new work.
    """

    node_id: str
    cluster: str
    role: Role
    max_model_tokens: int
    prefill_chunk_tokens: int = 1
    profile: NodeProfile | None = None
    max_batch: int = 0
    alone: Alone = Alone.NEVER
    convertible: bool = False
    next_role: Role | None = None


@dataclass(frozen=True)
class NodeDown:
    """A node takes no new work."""

    node_id: str


@dataclass(frozen=True)
class NodeForgotten:
    """A node is gone for good."""

    node_id: str


@dataclass(frozen=True)
class QueueSeen:
    """A node says how many prompt tokens others than us have queued there, and how many requests of theirs it runs."""

    node_id: str
    foreign_tokens: int
    foreign_requests: int = 0


@dataclass(frozen=True)
class LinkSeen:
    """A link says what it carries.

    Attributes:
        state: the detector's verdict.
        available_bps: what it could carry for us now; None if that is unknown.
        budget_bps: what KVCache may use of it; None leaves it as it was.
        paced_bps: what it is held to now, since it was in trouble; None: to its budget.
    """

    source: str
    destination: str
    state: LinkState
    available_bps: float | None = None
    budget_bps: float | None = None
    rtt_s: float | None = None
    paced_bps: float | None = None


@dataclass(frozen=True)
class ThresholdSet:
    """The planner has found another ``t``."""

    threshold_tokens: int


@dataclass(frozen=True)
class PrefillEnded:
    """A request's prompt has been computed (or given up); the prefill node's queue is shorter."""

    request_id: str


@dataclass(frozen=True)
class TransferProgress:
    """So much of a request's KVCache has still to cross its link."""

    request_id: str
    left_bytes: float


@dataclass(frozen=True)
class TransferLanded:
    """A request's KVCache has landed whole."""

    request_id: str


@dataclass(frozen=True)
class RequestEnded:
    """A request is over, however it ended."""

    request_id: str


FleetEvent = (
    NodeSeen
    | NodeDown
    | NodeForgotten
    | QueueSeen
    | LinkSeen
    | ThresholdSet
    | PrefillEnded
    | TransferProgress
    | TransferLanded
    | RequestEnded
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to serve a request that was considered, with what was predicted of it.

    Attributes:
        chosen: whether it was the one.
        cached_tokens: prefix of the prompt that the node can use.
        wait_s, prefill_s: until it could begin, and how long it then computes.
        link: what its KVCache crosses, as ``source>destination``; None inside a cluster.
        link_state: the verdict on it at that time, and ``link_available_bps`` what it was taken to carry.
        link_s: how long its KVCache takes on it, what was promised to others before included.
        ttft_s: until the KVCache has landed and decoding can begin.
    """

    chosen: bool
    prefill_cluster: str
    prefill_node: str
    decode_node: str
    cached_tokens: int
    incremental_tokens: int
    wait_s: float
    prefill_s: float
    ttft_s: float
    link: str | None = None
    link_state: str | None = None
    link_available_bps: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Where a request is prefilled and decoded, and why.

    Attributes:
        chunk_tokens: token granularity in which the prefill node completes layers.
        cached_tokens: prefix that the prefill cluster holds, or gets as a copy first.
        incremental_tokens: what is prefilled, ``l`` of the paper for that cluster.
        threshold_tokens: ``t`` when the decision was made; None if the policy has none.
        reasons: short sentences, for ``explain``.
        copy_from: the cluster whose cached prefix is copied over first; None if nothing is copied.
        link_bytes: what crosses a link for it.
        wait_s, prefill_s, ttft_s: predicted; until it begins, of the prefill itself, and until its KVCache has landed.
        fallback: prefill nodes to try next, best first.
        alternatives: what was considered, the one that was chosen included.
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
    copy_from: str | None = None
    link_bytes: int = 0
    wait_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    fallback: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
