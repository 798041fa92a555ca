"""What the router knows of the fleet: plain data, changed only by the router's events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prfaas_net.errors import InternalError
from prfaas_net.scheduling.correction import Correction
from prfaas_net.scheduling.links import LinkLoad
from prfaas_net.scheduling.profiles import NodeProfile, PiecewiseLinear

__all__ = ["Alone", "Assignment", "ClusterKind", "FleetState", "NodeState", "Role"]

# Of a node that said nothing of its speed; corrected by what it shows. One H200 instance of the paper's 1T model
# prefills 16,000 tokens/s (27,000 tokens in 1.7 s).
UNKNOWN_PREFILL_S = PiecewiseLinear.straight(0.0, 1 / 16_000)
# What rounding may leave of a sum that should be 0, in seconds and in bits.
ROUNDING_S, ROUNDING_BITS = 1e-6, 1e3


class ClusterKind(StrEnum):
    """What a cluster is for."""

    PRFAAS = "prfaas"  # prefill only, reached over the link
    PD = "pd"  # prefill and decode: serves a request end to end


class Role(StrEnum):
    """What a node does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Alone(StrEnum):
    """Whether a decode node computes prompts itself, for its own decoding."""

    NEVER = "never"  # a prompt's KVCache always comes from a prefill node
    SPARE = "spare"  # where its cluster has no prefill node for it
    ONLY = "only"  # it serves requests end to end, and takes no KVCache from others


@dataclass(slots=True)
class NodeState:
    """One engine instance.

    Attributes:
        up: whether new work may be given to it.
        max_model_tokens: longest prompt plus output that it admits.
        prefill_chunk_tokens: tokens of one pass through its layers.
        profile: how long it takes; None if it did not say.
        max_batch: requests that decode together; 0 if it did not say.
        alone: whether it computes prompts itself (decode nodes).
        convertible: whether it can take the other role.
        next_role: the role that it is about to take, for which it drains; it is not up meanwhile.
        pending_tokens: prompt tokens given to it whose prefill has not ended (prefill nodes).
        running_requests: requests given to it that have not ended.
        queue: by request, the predicted seconds of every prefill given to it that has not ended, oldest first.
        queued_s: their sum.
        head_since_s: when the oldest of them was begun.
        foreign_tokens: prompt tokens that others have queued there, as the node last said; ``foreign_requests``: those
            of others that it runs.
        correction: how its times differ from what was predicted.
        shared: the same of its whole cluster, whose nodes are of one kind; counts until it has been seen itself.
    """

    node_id: str
    cluster: str
    role: Role
    max_model_tokens: int
    prefill_chunk_tokens: int = 1
    up: bool = True
    profile: NodeProfile | None = None
    max_batch: int = 0
    alone: Alone = Alone.NEVER
    convertible: bool = False
    next_role: Role | None = None
    pending_tokens: int = 0
    running_requests: int = 0
    queue: dict[str, float] = field(default_factory=dict)
    queued_s: float = 0.0
    head_since_s: float = 0.0
    foreign_tokens: int = 0
    foreign_requests: int = 0
    correction: Correction = field(default_factory=Correction)
    shared: Correction = field(default_factory=Correction)

    @property
    def pace(self) -> float:
        """Observed over predicted time of a prefill."""
        return self.correction.pace if self.correction.seen else self.shared.pace

    @property
    def load(self) -> tuple[int, int, str]:
        """Sorts the least loaded node first, ties by name."""
        return (self.pending_tokens, self.running_requests + self.foreign_requests, self.node_id)

    def prefill_s(self, tokens: int) -> float:
        """Predicted seconds to compute so many tokens, as this node has shown itself so far."""
        curve = self.profile.prefill_s if self.profile else UNKNOWN_PREFILL_S
        return curve(tokens) * self.pace

    def observe_pace(self, profile_s: float, took_s: float) -> None:
        """A prefill that takes ``profile_s`` by the profile took ``took_s`` here."""
        for correction in (self.correction, self.shared):
            correction.ran(profile_s * correction.pace, took_s)

    def wait_s(self, now: float) -> float:
        """Predicted seconds until it could begin a request that arrives now."""
        wait = self.queued_s
        if wait > 0.0:
            # The oldest one is running; a prediction that it has outrun does not shorten the others.
            elapsed = now - self.head_since_s
            if elapsed > 0.0:
                head = next(iter(self.queue.values()))
                wait -= head if elapsed > head else elapsed
        if self.foreign_tokens:
            wait += self.prefill_s(self.foreign_tokens)
        return wait if wait > 0.0 else 0.0


@dataclass(slots=True)
class Assignment:
    """A request in flight and what it costs the nodes and the link that serve it.

    Attributes:
        work_s: predicted seconds of its prefill.
        given_s: when it was given to its nodes.
        landed_at_s: when its KVCache was predicted to have landed.
        link: what it crosses; None inside a cluster.
        link_bits: what it has still to send over it.
        pace: of its node when its work was predicted.
    """

    request_id: str
    prefill_node: str
    decode_node: str
    incremental_tokens: int
    work_s: float = 0.0
    given_s: float = 0.0
    landed_at_s: float = 0.0
    link: LinkLoad | None = None
    link_bits: float = 0.0
    pace: float = 1.0
    prefilling: bool = True
    landed: bool = False


@dataclass
class FleetState:
    """Nodes, clusters, links and requests in flight.

    Attributes:
        kinds: clusters whose kind was declared. Any other cluster is a PD cluster from the moment one of its
            nodes decodes or can, and a PrfaaS cluster before that.
        links: by (source, destination).
        corrections: by cluster, of all its nodes.
    """

    kinds: Mapping[str, ClusterKind] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    links: dict[tuple[str, str], LinkLoad] = field(default_factory=dict)
    corrections: dict[str, Correction] = field(default_factory=dict)
    _groups: dict[Role, dict[str, list[NodeState]]] = field(default_factory=dict, repr=False)
    _kinds: dict[str, ClusterKind] = field(default_factory=dict, repr=False)
    _alone: dict[str, list[NodeState]] | None = field(default=None, repr=False)

    def changed(self) -> None:
        """Nodes have come, gone or changed their role: what was derived of them is stale."""
        self._groups.clear()
        self._kinds.clear()
        self._alone = None

    def kind_of(self, cluster: str) -> ClusterKind:
        """The kind of a cluster, declared or inferred."""
        known = self._kinds.get(cluster)
        if known is None:
            decodes = [n for n in self.nodes.values() if n.role is Role.DECODE or n.convertible]
            is_pd = any(node.cluster == cluster for node in decodes)
            known = self.kinds.get(cluster) or (ClusterKind.PD if is_pd else ClusterKind.PRFAAS)
            self._kinds[cluster] = known
        return known

    def groups(self, role: Role) -> dict[str, list[NodeState]]:
        """Nodes of a role that are up, by cluster, in order of cluster name."""
        found = self._groups.get(role)
        if found is None:
            found = {}
            for node in sorted(self.nodes.values(), key=lambda n: n.cluster):
                if node.up and node.role is role:
                    found.setdefault(node.cluster, []).append(node)
            self._groups[role] = found
        return found

    def alone(self) -> dict[str, list[NodeState]]:
        """Decode nodes that are up and compute prompts themselves, by cluster."""
        if self._alone is None:
            self._alone = {}
            for cluster, nodes in self.groups(Role.DECODE).items():
                if able := [node for node in nodes if node.alone is not Alone.NEVER]:
                    self._alone[cluster] = able
        return self._alone

    def up(self, role: Role, *, room_for_tokens: int = 0) -> Iterator[NodeState]:
        """Nodes of a role that are up and admit a sequence of that many tokens."""
        for nodes in self.groups(role).values():
            for node in nodes:
                if node.max_model_tokens >= room_for_tokens:
                    yield node

    @property
    def max_model_tokens(self) -> int | None:
        """Longest prompt plus output that the fleet serves now; None while a role has no node up."""
        longest = {role: max((n.max_model_tokens for n in self.up(role)), default=0) for role in Role}
        by_itself = max((n.max_model_tokens for nodes in self.alone().values() for n in nodes), default=0)
        return max(min(longest.values()), by_itself) or None

    def assign(self, assignment: Assignment) -> None:
        """Charge a request to its two nodes and its link."""
        self.assignments[assignment.request_id] = assignment
        node = self.nodes[assignment.prefill_node]
        node.pending_tokens += assignment.incremental_tokens
        node.running_requests += 1
        if not node.queue:
            node.queued_s, node.head_since_s = 0.0, assignment.given_s
        node.queue[assignment.request_id] = assignment.work_s
        node.queued_s += assignment.work_s
        self.nodes[assignment.decode_node].running_requests += 1
        if assignment.link is not None:
            assignment.link.promised_bits += assignment.link_bits
            assignment.link.transfers += 1

    def end_prefill(self, request_id: str, now: float) -> float | None:
        """The prefill node is done computing for this request; its place in the queue is free.

        Returns:
            How long it ran, in seconds, where that can be told: only of the one that was next.
        """
        assignment = self.assignments.get(request_id)
        if assignment is None or not assignment.prefilling:
            return None
        assignment.prefilling = False
        node = self.nodes.get(assignment.prefill_node)
        if node is None or request_id not in node.queue:
            return None
        node.pending_tokens -= assignment.incremental_tokens
        node.running_requests -= 1
        was_next = next(iter(node.queue)) == request_id
        node.queued_s -= node.queue.pop(request_id)
        if not node.queue:
            node.queued_s = 0.0
        ran_s = now - node.head_since_s if was_next else None
        if was_next:
            node.head_since_s = now
        return ran_s

    def progress(self, request_id: str, left_bits: float) -> None:
        """So much of a request's KVCache has still to cross its link."""
        assignment = self.assignments.get(request_id)
        if assignment is None or assignment.link is None or assignment.landed:
            return
        left_bits = min(max(0.0, left_bits), assignment.link_bits)
        assignment.link.promised_bits = max(0.0, assignment.link.promised_bits - (assignment.link_bits - left_bits))
        assignment.link_bits = left_bits

    def land(self, request_id: str) -> Assignment | None:
        """A request's KVCache has landed; None if it is not known, or had landed before."""
        assignment = self.assignments.get(request_id)
        if assignment is None or assignment.landed:
            return None
        self.progress(request_id, 0.0)
        assignment.landed = True
        if assignment.link is not None:
            assignment.link.transfers -= 1
            if not assignment.link.transfers:
                assignment.link.promised_bits = 0.0
        return assignment

    def release(self, request_id: str, now: float) -> None:
        """The request is over, however it ended."""
        self.end_prefill(request_id, now)
        self.land(request_id)
        assignment = self.assignments.pop(request_id, None)
        node = self.nodes.get(assignment.decode_node) if assignment else None
        if node is not None:
            node.running_requests -= 1

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InternalError: the loads of a node or a link are not the sum of what was assigned to it.
        """
        tokens = dict.fromkeys(self.nodes, 0)
        requests = dict.fromkeys(self.nodes, 0)
        works = dict.fromkeys(self.nodes, 0.0)
        bits = dict.fromkeys(self.links, 0.0)
        transfers = dict.fromkeys(self.links, 0)
        for request_id, assignment in self.assignments.items():
            if request_id != assignment.request_id or assignment.incremental_tokens < 1:
                raise InternalError("an assignment is malformed", found=assignment)
            if assignment.prefilling and assignment.prefill_node in self.nodes:
                tokens[assignment.prefill_node] += assignment.incremental_tokens
                works[assignment.prefill_node] += assignment.work_s
                requests[assignment.prefill_node] += 1
            if assignment.decode_node in self.nodes:
                requests[assignment.decode_node] += 1
            if assignment.link is not None and not assignment.landed:
                key = (assignment.link.source, assignment.link.destination)
                bits[key] += assignment.link_bits
                transfers[key] += 1
        for node_id, node in self.nodes.items():
            if node.up and node.next_role is not None:
                raise InternalError("a node that drains is given work", found=node_id)
            expected = (node_id, tokens[node_id], requests[node_id])
            found = (node.node_id, node.pending_tokens, node.running_requests)
            if expected != found:
                raise InternalError("a node's load is not what it was assigned", expected=expected, found=found)
            if abs(works[node_id] - node.queued_s) > ROUNDING_S * (1 + works[node_id]):
                raise InternalError(
                    "a node's queue is not what it was assigned", expected=works[node_id], found=node.queued_s
                )
        for key, link in self.links.items():
            if (
                transfers[key] != link.transfers
                or abs(bits[key] - link.promised_bits) > ROUNDING_BITS + bits[key] / 1e6
            ):
                raise InternalError(
                    f"link {link.name} is not promised what it was assigned",
                    expected=(transfers[key], bits[key]),
                    found=(link.transfers, link.promised_bits),
                )
