"""The router: an arrival in, a decision with its reasons out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from prfaas_net.errors import BusyError, InternalError, RefusedError, UsageError
from prfaas_net.scheduling.events import (
    Arrival,
    Candidate,
    Decision,
    FleetEvent,
    NodeDown,
    NodeForgotten,
    NodeSeen,
    PrefillEnded,
    RequestEnded,
)
from prfaas_net.scheduling.policy import Policy
from prfaas_net.scheduling.state import Assignment, ClusterKind, FleetState, NodeState, Role

__all__ = ["Router"]

# Events remembered for story(): some minutes of a busy gateway, a few MB at most.
STORY_EVENTS = 10_000


class Router:
    """Decides where each request is prefilled and decoded.

    It is told everything through :meth:`observe` and asked through :meth:`decide`; between the two it charges
    each request to its nodes, so that the least loaded node is known without asking anyone.
    """

    def __init__(self, policy: Policy, kinds: Mapping[str, ClusterKind] | None = None) -> None:
        self.policy = policy
        self.state = FleetState(kinds=dict(kinds or {}))
        self._story: deque[tuple[float, str, Arrival | Decision | FleetEvent]] = deque(maxlen=STORY_EVENTS)

    def decide(self, arrival: Arrival, *, now: float) -> Decision:
        """Choose the nodes for a request and charge it to them until :class:`RequestEnded`.

        Raises:
            BusyError: no node of a needed role is up.
            RefusedError: no node that is up admits a sequence of this length.
            UsageError: a request of this id is in flight.
        """
        if arrival.request_id in self.state.assignments:
            raise UsageError("a request of this id is in flight", request=arrival.request_id)
        self._story.append((now, arrival.request_id, arrival))
        decode = min(self._eligible(Role.DECODE, arrival), key=lambda node: node.load)
        candidates = self._candidates(arrival, decode)
        ranking = self.policy.rank(arrival, candidates, self.state, now=now)
        if not ranking.order:
            raise BusyError(
                f"policy {self.policy.name} admits none of the prefill nodes that are up",
                do="try again later",
                request=arrival.request_id,
            )
        best = ranking.order[0]
        decision = Decision(
            request_id=arrival.request_id,
            policy=self.policy.name,
            prefill_cluster=best.node.cluster,
            prefill_node=best.node.node_id,
            decode_cluster=decode.cluster,
            decode_node=decode.node_id,
            chunk_tokens=best.node.prefill_chunk_tokens,
            cached_tokens=best.cached_tokens,
            incremental_tokens=best.incremental_tokens,
            threshold_tokens=ranking.threshold_tokens,
            reasons=(
                *ranking.reasons,
                f"prefill on {best.node.node_id}: {best.node.pending_tokens} tokens queued there",
                f"decode on {decode.node_id}: {decode.running_requests} requests running there",
            ),
        )
        self.state.assign(Assignment(arrival.request_id, best.node.node_id, decode.node_id, best.incremental_tokens))
        self._story.append((now, arrival.request_id, decision))
        return decision

    def observe(self, event: FleetEvent, *, now: float) -> None:
        """Take note of something that happened.

        Events about nodes or requests that are not known are ignored: they may arrive late.
        """
        state = self.state
        match event:
            case NodeSeen():
                self._seen(event)
            case NodeDown(node_id):
                if node_id in state.nodes:
                    state.nodes[node_id].up = False
            case NodeForgotten(node_id):
                state.nodes.pop(node_id, None)
            case PrefillEnded(request_id):
                state.end_prefill(request_id)
            case RequestEnded(request_id):
                state.release(request_id)
        subject = event.request_id if isinstance(event, (PrefillEnded, RequestEnded)) else event.node_id
        self._story.append((now, subject, event))

    def story(self, subject: str) -> list[tuple[float, Arrival | Decision | FleetEvent]]:
        """What happened to a request or a node, as (now, event), oldest first."""
        return [(at, event) for at, about, event in self._story if about == subject]

    def validate_state(self) -> None:
        """Check every invariant.

        Raises:
            InternalError: one does not hold.
        """
        self.state.validate()
        if len(self._story) > STORY_EVENTS:
            raise InternalError("the story outgrew its bound", expected=STORY_EVENTS, found=len(self._story))

    def _seen(self, event: NodeSeen) -> None:
        known = self.state.nodes.get(event.node_id)
        node = NodeState(event.node_id, event.cluster, event.role, event.max_model_tokens, event.prefill_chunk_tokens)
        self.state.nodes[event.node_id] = node
        if known is not None:
            # What is in flight stays charged: its calls end one by one, also when the node has restarted.
            node.pending_tokens, node.running_requests = known.pending_tokens, known.running_requests
        else:
            self._recharge(node)

    def _recharge(self, node: NodeState) -> None:
        """A node that was forgotten with requests in flight and is back: they count again."""
        for assignment in self.state.assignments.values():
            if assignment.prefill_node == node.node_id and assignment.prefilling:
                node.pending_tokens += assignment.incremental_tokens
                node.running_requests += 1
            if assignment.decode_node == node.node_id:
                node.running_requests += 1

    def _eligible(self, role: Role, arrival: Arrival) -> list[NodeState]:
        """Nodes that could take the request, never empty."""
        needed = arrival.prompt_tokens + arrival.output_tokens
        nodes = list(self.state.up(role, room_for_tokens=needed))
        if nodes:
            return nodes
        longest = max((node.max_model_tokens for node in self.state.up(role)), default=0)
        if longest:
            raise RefusedError(
                f"no {role.value} node admits a sequence this long",
                expected=f"at most {longest} tokens of prompt and output",
                found=needed,
                do="shorten the prompt or ask for fewer tokens",
                request=arrival.request_id,
            )
        known = sum(node.role is role for node in self.state.nodes.values())
        raise BusyError(
            f"no {role.value} node is up",
            expected=f"at least one {role.value} node that answers /health",
            found=f"{known} known, none up",
            do=f"start a {role.value} node or wait until it is back",
            request=arrival.request_id,
        )

    def _candidates(self, arrival: Arrival, decode: NodeState) -> list[Candidate]:
        """The least loaded prefill node of every cluster, in order of cluster name."""
        best: dict[str, NodeState] = {}
        for node in self._eligible(Role.PREFILL, arrival):
            if node.cluster not in best or node.load < best[node.cluster].load:
                best[node.cluster] = node
        return [
            Candidate(
                node=node,
                kind=self.state.kind_of(cluster),
                local=cluster == decode.cluster,
                cached_tokens=arrival.cached_in(cluster),
                incremental_tokens=arrival.prompt_tokens - arrival.cached_in(cluster),
            )
            for cluster, node in sorted(best.items())
        ]
