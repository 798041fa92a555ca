"""What the router knows of the fleet: plain data, changed only by the router's events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas_net.errors import InternalError

__all__ = ["Assignment", "ClusterKind", "FleetState", "NodeState", "Role"]


class ClusterKind(StrEnum):
    """What a cluster is for."""

    PRFAAS = "prfaas"  # prefill only, reached over the link
    PD = "pd"  # prefill and decode: serves a request end to end


class Role(StrEnum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass
class NodeState:
    """One engine instance.

    Attributes:
        up: whether new work may be given to it.
        max_model_tokens: longest prompt plus output that it admits.
        prefill_chunk_tokens: tokens of one pass through its layers.
        pending_tokens: prompt tokens given to it whose prefill has not ended (prefill nodes).
        running_requests: requests given to it that have not ended.
    """

    node_id: str
    cluster: str
    role: Role
    max_model_tokens: int
    prefill_chunk_tokens: int = 1
    up: bool = True
    pending_tokens: int = 0
    running_requests: int = 0

    @property
    def load(self) -> tuple[int, int, str]:
        """Sorts the least loaded node first, ties by name."""
        return (self.pending_tokens, self.running_requests, self.node_id)


@dataclass
class Assignment:
    """A request in flight and what it costs the nodes that serve it."""

    request_id: str
    prefill_node: str
    decode_node: str
    incremental_tokens: int
    prefilling: bool = True


@dataclass
class FleetState:
    """Nodes, clusters and requests in flight.

    Attributes:
        kinds: clusters whose kind was declared. Any other cluster is a PD cluster from the moment one of its
            nodes decodes, and a PrfaaS cluster before that.
    """

    kinds: Mapping[str, ClusterKind] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)

    def kind_of(self, cluster: str) -> ClusterKind:
        """The kind of a cluster, declared or inferred."""
        declared = self.kinds.get(cluster)
        if declared is not None:
            return declared
        decodes = any(node.cluster == cluster and node.role is Role.DECODE for node in self.nodes.values())
        return ClusterKind.PD if decodes else ClusterKind.PRFAAS

    def up(self, role: Role, *, room_for_tokens: int = 0) -> Iterator[NodeState]:
        """Nodes of a role that are up and admit a sequence of that many tokens."""
        for node in self.nodes.values():
            if node.up and node.role is role and node.max_model_tokens >= room_for_tokens:
                yield node

    @property
    def max_model_tokens(self) -> int | None:
        """Longest prompt plus output that the fleet serves now; None while a role has no node up."""
        longest = [max((n.max_model_tokens for n in self.up(role)), default=0) for role in Role]
        return min(longest) or None

    def assign(self, assignment: Assignment) -> None:
        """Charge a request to its two nodes."""
        self.assignments[assignment.request_id] = assignment
        self.nodes[assignment.prefill_node].pending_tokens += assignment.incremental_tokens
        for node_id in (assignment.prefill_node, assignment.decode_node):
            self.nodes[node_id].running_requests += 1

    def end_prefill(self, request_id: str) -> None:
        """The prefill node is done computing for this request; its place in the queue is free."""
        assignment = self.assignments.get(request_id)
        if assignment is None or not assignment.prefilling:
            return
        assignment.prefilling = False
        node = self.nodes.get(assignment.prefill_node)
        if node is not None:
            node.pending_tokens -= assignment.incremental_tokens
            node.running_requests -= 1

    def release(self, request_id: str) -> None:
        """The request is over, however it ended."""
        self.end_prefill(request_id)
        assignment = self.assignments.pop(request_id, None)
        node = self.nodes.get(assignment.decode_node) if assignment else None
        if node is not None:
            node.running_requests -= 1

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InternalError: the loads of a node are not the sum of what was assigned to it.
        """
        tokens = dict.fromkeys(self.nodes, 0)
        requests = dict.fromkeys(self.nodes, 0)
        for request_id, assignment in self.assignments.items():
            if request_id != assignment.request_id or assignment.incremental_tokens < 1:
                raise InternalError("an assignment is malformed", found=assignment)
            if assignment.prefilling and assignment.prefill_node in self.nodes:
                tokens[assignment.prefill_node] += assignment.incremental_tokens
                requests[assignment.prefill_node] += 1
            if assignment.decode_node in self.nodes:
                requests[assignment.decode_node] += 1
        for node_id, node in self.nodes.items():
            expected = (node_id, tokens[node_id], requests[node_id])
            found = (node.node_id, node.pending_tokens, node.running_requests)
            if expected != found:
                raise InternalError("a node's load is not what it was assigned", expected=expected, found=found)
