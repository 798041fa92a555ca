"""The router: an arrival in, a decision with its reasons out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from prfaas_net.errors import BusyError, InternalError, RefusedError, UsageError
from prfaas_net.scheduling.admission import overloaded
from prfaas_net.scheduling.candidates import Candidate, Predictor
from prfaas_net.scheduling.correction import Correction
from prfaas_net.scheduling.events import (
    Alternative,
    Arrival,
    Decision,
    FleetEvent,
    LinkSeen,
    NodeDown,
    NodeForgotten,
    NodeSeen,
    PrefillEnded,
    QueueSeen,
    RequestEnded,
    ThresholdSet,
    TransferLanded,
    TransferProgress,
)
from prfaas_net.scheduling.links import LinkLoad
from prfaas_net.scheduling.policy import Policy, Ranking
from prfaas_net.scheduling.state import Alone, Assignment, ClusterKind, FleetState, NodeState, Role

__all__ = ["Router"]

# Events remembered for story(): some minutes of a busy gateway, a few MB at most.
STORY_EVENTS = 10_000
# Of the ways to serve a request, so many are told with the decision.
MAX_TOLD = 8

Entry = tuple[float, str, "Arrival | Decision | FleetEvent"]


class Router:
    """Decides where each request is prefilled and decoded.

    It is told everything through :meth:`observe` and asked through :meth:`decide`; between the two it charges
    each request to its nodes and its link, so that queues are known without asking anyone.

    Args:
        kinds: clusters whose kind is declared.
        predictor: how times are predicted; by default transfers cost nothing.
        story_events: how many events are remembered.
    """

    def __init__(
        self,
        policy: Policy,
        kinds: Mapping[str, ClusterKind] | None = None,
        predictor: Predictor | None = None,
        *,
        story_events: int = STORY_EVENTS,
    ) -> None:
        self.policy = policy
        self.predictor = predictor or Predictor()
        self.state = FleetState(kinds=dict(kinds or {}))
        self._story: deque[Entry] = deque(maxlen=story_events)

    def decide(self, arrival: Arrival, *, now: float) -> Decision:
        """Choose the nodes for a request and charge it to them until :class:`RequestEnded`.

        Raises:
            OverloadedError: every candidate is predicted to miss the request's limit.
            BusyError: no node of a needed role is up.
            RefusedError: no node that is up admits a sequence of this length.
            UsageError: a request of this id is in flight.
        """
        request_id = arrival.request_id
        if request_id in self.state.assignments:
            raise UsageError("a request of this id is in flight", request=request_id)
        self._story.append((now, request_id, arrival))
        found = self._candidates(arrival, now)
        # Whatever the policy: a link that is down is no way, unless there is no other.
        candidates = [c for c in found if c.link is None or c.link.usable] or found
        limit_s = arrival.ttft_limit_s
        if limit_s is not None:
            soonest_s = min(c.ttft_s for c in candidates)
            if soonest_s > limit_s:
                raise overloaded(request_id, limit_s=limit_s, soonest_s=soonest_s)
        ranking = self.policy.rank(arrival, candidates, self.state, now=now)
        if not ranking.order:
            raise BusyError(
                f"policy {self.policy.name} admits none of the prefill nodes that are up",
                do="try again later",
                request=request_id,
            )
        best = ranking.order[0]
        if limit_s is not None and best.ttft_s > limit_s:
            # The policy's own choice would miss it; the best of its others that does not is taken.
            best = next((c for c in ranking.order if c.ttft_s <= limit_s), best)
        down = (f"{len(found) - len(candidates)} refused: their link is down",) if len(candidates) < len(found) else ()
        decision = self._decision(request_id, best, ranking, down, candidates)
        self.state.assign(
            Assignment(
                request_id, best.node.node_id, best.decode.node_id, best.incremental_tokens, best.prefill_s, now,
                now + best.ttft_s, best.link, best.link_bits, best.node.pace,
            )
        )  # fmt: skip
        self._story.append((now, request_id, decision))
        return decision

    def observe(self, event: FleetEvent, *, now: float) -> None:
        """Take note of something that happened.

        Events about nodes or requests that are not known are ignored: they may arrive late.
        """
        state = self.state
        match event:
            case PrefillEnded(request_id):
                self._prefill_ended(request_id, now)
            case TransferProgress(request_id, left_bytes):
                state.progress(request_id, 8.0 * left_bytes)
            case TransferLanded(request_id):
                self._landed(request_id, now)
            case RequestEnded(request_id):
                state.release(request_id, now)
            case NodeSeen():
                self._seen(event, now)
            case NodeDown(node_id):
                if node_id in state.nodes:
                    state.nodes[node_id].up, state.nodes[node_id].next_role = False, None
                    state.changed()
            case NodeForgotten(node_id):
                state.nodes.pop(node_id, None)
                state.changed()
            case QueueSeen(node_id, foreign_tokens, foreign_requests):
                if node_id in state.nodes:
                    state.nodes[node_id].foreign_tokens = max(0, foreign_tokens)
                    state.nodes[node_id].foreign_requests = max(0, foreign_requests)
            case LinkSeen():
                self._link_seen(event)
            case ThresholdSet():
                pass  # the policy's business
        self.policy.observe(event, state, now=now)
        self._story.append((now, _subject(event), event))

    def story(self, subject: str) -> list[tuple[float, Arrival | Decision | FleetEvent]]:
        """What happened to a request, a node or a link, as (now, event), oldest first."""
        return [(at, event) for at, about, event in self._story if about == subject]

    def log(self) -> list[tuple[float, Arrival | Decision | FleetEvent]]:
        """Everything that is remembered, oldest first; :func:`prfaas_net.scheduling.replay.replay` plays it again."""
        return [(at, event) for at, _, event in self._story]

    def validate_state(self) -> None:
        """Check every invariant.

        Raises:
            InternalError: one does not hold.
        """
        self.state.validate()
        bound = self._story.maxlen
        if bound is None or len(self._story) > bound:
            raise InternalError("the story outgrew its bound", expected=bound, found=len(self._story))

    def _prefill_ended(self, request_id: str, now: float) -> None:
        state = self.state
        assignment = state.assignments.get(request_id)
        ran_s = state.end_prefill(request_id, now)
        node = state.nodes.get(assignment.prefill_node) if assignment and ran_s else None
        if assignment is not None and node is not None and ran_s is not None:
            # Against the time without either correction, so that both learn from the same.
            node.observe_pace(assignment.work_s / assignment.pace, ran_s)

    def _landed(self, request_id: str, now: float) -> None:
        assignment = self.state.land(request_id)
        node = self.state.nodes.get(assignment.prefill_node) if assignment else None
        if assignment is not None and node is not None:
            node.correction.arrived(now - assignment.landed_at_s, now=now)

    def _decision(
        self,
        request_id: str,
        best: Candidate,
        ranking: Ranking,
        down: tuple[str, ...],
        candidates: Sequence[Candidate],
    ) -> Decision:
        node, decode = best.node, best.decode
        return Decision(
            request_id=request_id,
            policy=self.policy.name,
            prefill_cluster=node.cluster,
            prefill_node=node.node_id,
            decode_cluster=decode.cluster,
            decode_node=decode.node_id,
            chunk_tokens=node.prefill_chunk_tokens,
            cached_tokens=best.cached_tokens,
            incremental_tokens=best.incremental_tokens,
            threshold_tokens=ranking.threshold_tokens,
            reasons=(
                *ranking.reasons,
                *down,
                f"prefill on {node.node_id}: {node.pending_tokens} tokens queued there",
                f"decode on {decode.node_id}: {decode.running_requests} requests running there",
            ),
            copy_from=best.copy_from,
            link_bytes=int(best.link_bits / 8),
            wait_s=best.wait_s,
            prefill_s=best.prefill_s,
            ttft_s=best.ttft_s,
            fallback=tuple([c.node.node_id for c in ranking.order if c.node is not node][:3]),
            alternatives=tuple([_alternative(c, chosen=c is best) for c in candidates[:MAX_TOLD]]),
        )

    def _seen(self, event: NodeSeen, now: float) -> None:
        known = self.state.nodes.get(event.node_id)
        node = NodeState(
            event.node_id, event.cluster, event.role, event.max_model_tokens, event.prefill_chunk_tokens,
            up=event.next_role is None, profile=event.profile, max_batch=event.max_batch, alone=event.alone,
            convertible=event.convertible, next_role=event.next_role,
            shared=self.state.corrections.setdefault(event.cluster, Correction()),
        )  # fmt: skip
        self.state.nodes[event.node_id] = node
        self.state.changed()
        if known is not None:
            # What is in flight stays charged: its calls end one by one, also when the node has restarted.
            node.pending_tokens, node.running_requests = known.pending_tokens, known.running_requests
            node.queue, node.queued_s, node.head_since_s = known.queue, known.queued_s, known.head_since_s
            node.foreign_tokens, node.foreign_requests = known.foreign_tokens, known.foreign_requests
            node.correction = known.correction if known.profile == event.profile else Correction()
        else:
            self._recharge(node, now)

    def _recharge(self, node: NodeState, now: float) -> None:
        """A node that was forgotten with requests in flight and is back: they count again."""
        node.head_since_s = now
        for assignment in self.state.assignments.values():
            if assignment.prefill_node == node.node_id and assignment.prefilling:
                node.pending_tokens += assignment.incremental_tokens
                node.running_requests += 1
                node.queue[assignment.request_id] = assignment.work_s
                node.queued_s += assignment.work_s
            if assignment.decode_node == node.node_id:
                node.running_requests += 1

    def _link_seen(self, event: LinkSeen) -> None:
        key = (event.source, event.destination)
        link = self.state.links.get(key)
        if link is None:
            link = self.state.links[key] = LinkLoad(event.source, event.destination)
        link.state = event.state
        link.available_bps = event.available_bps or 0.0
        link.paced_bps = event.paced_bps or 0.0
        if event.budget_bps is not None:
            link.budget_bps = event.budget_bps
        if event.rtt_s is not None:
            link.rtt_s = event.rtt_s

    def _candidates(self, arrival: Arrival, now: float) -> list[Candidate]:
        """Every way to serve the request that the policy wants to see, never none."""
        needed, state, policy = arrival.prompt_tokens + arrival.output_tokens, self.state, self.policy
        decoders = self._decoders(needed, arrival.excluded_nodes)
        if not decoders:
            raise self._nobody(Role.DECODE, arrival)
        if not policy.every_decode_cluster and len(decoders) > 1:
            decoders = [min(decoders, key=lambda node: node.load)]
        found = self.predictor.candidates(arrival, decoders, state, now=now, needed_tokens=needed)
        if state.alone():
            found += self.predictor.alone(arrival, decoders, found, state, now=now, needed_tokens=needed)
        if policy.copies and (arrival.cached_tokens or arrival.copyable_tokens):
            found += self.predictor.with_copies(arrival, found, state, now=now)
        if len(decoders) > 1:
            for candidate in found:
                candidate.decode_wait_s = _decode_wait_s(candidate.decode, arrival)
        if not found:
            raise self._nobody(Role.PREFILL, arrival)
        return found

    def _decoders(self, needed_tokens: int, excluded: Sequence[str]) -> list[NodeState]:
        """The least loaded decode node of every cluster that could take the request; one that takes KVCache first."""
        found = []
        for nodes in self.state.groups(Role.DECODE).values():
            best, alone = None, None
            for node in nodes:
                if node.max_model_tokens < needed_tokens or node.node_id in excluded:
                    continue
                if node.alone is Alone.ONLY:
                    alone = node if alone is None or _lighter(node, alone) else alone
                elif best is None or _lighter(node, best):
                    best = node
            best = best or alone
            if best is not None:
                found.append(best)
        return found

    def _nobody(self, role: Role, arrival: Arrival) -> BusyError | RefusedError:
        """Why no node of a role can take the request."""
        needed = arrival.prompt_tokens + arrival.output_tokens
        excluded = arrival.excluded_nodes
        longest = max((n.max_model_tokens for n in self.state.up(role) if n.node_id not in excluded), default=0)
        if longest:
            return RefusedError(
                f"no {role.value} node admits a sequence this long",
                expected=f"at most {longest} tokens of prompt and output",
                found=needed,
                do="shorten the prompt or ask for fewer tokens",
                request=arrival.request_id,
            )
        known = sum(node.role is role for node in self.state.nodes.values())
        return BusyError(
            f"no other {role.value} node is up" if excluded else f"no {role.value} node is up",
            expected=f"at least one {role.value} node that answers /health",
            found=f"{known} known, none up",
            do=f"start a {role.value} node or wait until it is back",
            request=arrival.request_id,
        )


def _lighter(node: NodeState, other: NodeState) -> bool:
    """Whether a decode node runs fewer requests than another, or comes first by name."""
    ours, theirs = node.running_requests + node.foreign_requests, other.running_requests + other.foreign_requests
    return ours < theirs or (ours == theirs and node.node_id < other.node_id)


def _alternative(candidate: Candidate, *, chosen: bool) -> Alternative:
    """A candidate as it is told to people."""
    link = candidate.link
    return Alternative(
        chosen,
        candidate.node.cluster,
        candidate.node.node_id,
        candidate.decode.node_id,
        candidate.cached_tokens,
        candidate.incremental_tokens,
        candidate.wait_s,
        candidate.prefill_s,
        candidate.ttft_s,
        None if link is None else link.name,
        None if link is None else link.state.value,
        0.0 if link is None else link.rate_bps,
        candidate.link_wait_s + candidate.link_s,
    )


def _decode_wait_s(node: NodeState, arrival: Arrival) -> float:
    """Predicted seconds until a decode node has a place in its batch; 0 where its batch is not known."""
    decode = node.profile.decode if node.profile else None
    over = node.running_requests + node.foreign_requests + 1 - node.max_batch
    if not node.max_batch or over <= 0 or decode is None:
        return 0.0
    return over * arrival.output_tokens * decode.step_s / node.max_batch


def _subject(event: FleetEvent) -> str:
    """What an event is about, for :meth:`Router.story`."""
    match event:
        case PrefillEnded() | RequestEnded() | TransferLanded() | TransferProgress():
            return event.request_id
        case LinkSeen():
            return f"{event.source}>{event.destination}"
        case ThresholdSet():
            return "threshold"
        case _:
            return event.node_id
