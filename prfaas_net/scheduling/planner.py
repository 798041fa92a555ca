"""The long-timescale planner: every few minutes, the best threshold and prefill:decode split for what is seen.

Pure, like the router: it is told what arrives, looks at the router's state, and answers with instructions. A node that
is to change its role is drained first; it is converted when nothing runs on it any more, so that no request is
dropped. Three things keep it from flapping: a new split must carry a good deal more than the present one, it must do so
several times in a row, and after a change, whoever made it, nothing changes for a while. Nodes change one after the
other, and the last one of a role in its cluster never does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prfaas_net.scheduling.lengths import EmpiricalLengths
from prfaas_net.scheduling.links import LinkLoad
from prfaas_net.scheduling.planning import (
    Convert,
    Drain,
    Instruction,
    KeepRole,
    Move,
    Plan,
    PlannerSettings,
    Question,
    SetThreshold,
    Solved,
    clusters_of,
    instances,
)
from prfaas_net.scheduling.profiles import KvSize, NodeProfile
from prfaas_net.scheduling.state import FleetState, NodeState, Role
from prfaas_net.scheduling.throughput import Solution, Workload

__all__ = ["Planner"]


@dataclass
class _Draining:
    """A change that is under way.

    Attributes:
        told: whether it was said that nothing of ours runs there any more.
    """

    node_id: str
    cluster: str
    before: Role
    after: Role
    since_s: float
    told: bool = False


@dataclass
class Planner:
    """Looks at a fleet and says what to change.

    :meth:`step` does it all; a shell that has better things to do than wait for the search asks :meth:`go_on` and
    :meth:`question`, lets a thread answer the question, and passes the answer to :meth:`conclude`.

    Args:
        kv: S_kv(l) of the model; None: not known yet.
        profiles: by cluster, of one instance; corrected by the pace that the router has seen there. Of other clusters
            what their nodes say counts.
        egress_bps: of PrfaaS clusters whose link was never described.

    Attributes:
        threshold_tokens: the ``t`` that was said last.
        plan: what the last look found; None before the first.
        problem: why there is no plan, or no new one.
    """

    kv: KvSize | None
    profiles: Mapping[str, NodeProfile] = field(default_factory=dict)
    settings: PlannerSettings = field(default_factory=PlannerSettings)
    egress_bps: float = math.inf
    threshold_tokens: int | None = None
    plan: Plan | None = None
    problem: str | None = "it has not looked yet"
    _lengths: deque[tuple[float, int]] = field(default_factory=deque)
    _outputs: deque[tuple[float, int]] = field(default_factory=deque)
    _moves: list[Move] = field(default_factory=list)
    _draining: list[_Draining] = field(default_factory=list)
    _changed_s: dict[str, float] = field(default_factory=dict)
    _roles: dict[str, Role] = field(default_factory=dict)
    _rates: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)
    _wanted: tuple[int, ...] | None = None
    _times_wanted: int = 0
    _looked_s: float = -math.inf

    def arrived(self, incremental_tokens: int, *, now: float) -> None:
        """A request has come whose prompt needs so many tokens computed."""
        self._lengths.append((now, incremental_tokens))

    def answered(self, output_tokens: int, *, now: float) -> None:
        """A request has ended after so many tokens."""
        self._outputs.append((now, output_tokens))

    def ended(self, node_id: str) -> None:
        """A change came to nothing (the node could not be reached, refused, or died): let it be."""
        if any(draining.node_id == node_id for draining in self._draining):
            self._draining = [d for d in self._draining if d.node_id != node_id]
            self._moves.clear()

    @property
    def solution(self) -> Solution | None:
        """What the fleet is, or is being made to be."""
        return None if self.plan is None else self.plan.chosen

    @property
    def changing(self) -> tuple[str, ...]:
        """Nodes whose change is under way."""
        return tuple(draining.node_id for draining in self._draining)

    def next_deadline(self) -> float:
        """When there is something to do, at the latest."""
        return self._looked_s + self.settings.period_s

    def step(self, state: FleetState, *, now: float, roles: bool = True) -> list[Instruction]:
        """Go on with changes, and look at the whole again if its time has come.

        Args:
            roles: whether roles may be changed; else only the threshold is.
        """
        instructions = self.go_on(state, now=now, roles=roles)
        question = self.question(state, now=now)
        if question is not None:
            instructions += self.conclude(question.answer(), state, now=now, roles=roles)
        return instructions

    # -- looking --------------------------------------------------------------------------------------------------

    def question(self, state: FleetState, *, now: float) -> Question | None:
        """What is to be solved, if it is time to look and there is something to go by."""
        if now < self.next_deadline():
            return None
        self._looked_s = now
        for seen in (self._lengths, self._outputs):
            while seen and seen[0][0] < now - self.settings.window_s:
                seen.popleft()
        after = {draining.node_id: draining.after for draining in self._draining}
        prfaas, pd, silent = clusters_of(state, self.profiles, after, self._egress_bps(state))
        self.problem = self._problem(len(pd), sum(c.instances for c in pd), silent)
        if self.problem is not None or self.kv is None:
            return None
        outputs = sum(tokens for _, tokens in self._outputs) / len(self._outputs)
        work = Workload(EmpiricalLengths(tokens for _, tokens in self._lengths), outputs, self.kv)
        return Question(now, len(self._lengths), work, tuple(prfaas), tuple(pd))

    def conclude(self, answer: Solved, state: FleetState, *, now: float, roles: bool = True) -> list[Instruction]:
        """What is to be done about it."""
        moves, why = self._judge(answer, state, now)
        start = bool(moves) and roles and self._times_wanted >= self.settings.confirmations
        if start:
            self._moves = list(moves)
            self._times_wanted, self._wanted = 0, None
            self._changed_s |= {move.cluster: now for move in moves}
        chosen = answer.best if start else answer.present
        t = chosen.result.t_tokens
        threshold = (int(t) if math.isfinite(t) else 0) if answer.question.prfaas else None
        self.plan = Plan(now, answer, chosen, threshold, tuple(moves), why)
        found = self._start(state, now) if start else []
        old = self.threshold_tokens
        if threshold is not None and (
            old is None or abs(threshold - old) > self.settings.threshold_change * max(1, old)
        ):
            self.threshold_tokens = threshold
            reason = f"{chosen.result.bottleneck} binds at {chosen.result.lambda_max:.2f} requests/s"
            found.append(SetThreshold(threshold, reason))
        return found

    def _problem(self, n_clusters: int, n_instances: int, silent: Sequence[str]) -> str | None:
        """Why nothing can be planned."""
        least, seen = self.settings.least_requests, min(len(self._lengths), len(self._outputs))
        if self.kv is None:
            return "no node has said how large its KVCache is"
        if silent:
            return f"no node of {', '.join(silent)} has said how fast it is: give one a profile"
        if not n_clusters or n_instances < 2:
            return f"a PD cluster with two nodes that are up is needed: there are {n_instances}"
        if seen < least:
            return f"{seen} requests in the last {self.settings.window_s:g} s: fewer than {least} say nothing"
        return None

    def _judge(self, answer: Solved, state: FleetState, now: float) -> tuple[list[Move], str]:
        """What to change, and whether that is worth it; counts how often it was."""
        present, best = answer.present.result, answer.best.result
        moves = answer.moves
        carried = f"{present.bottleneck} binds at {present.lambda_max:.2f} requests/s"
        if not moves:
            self._wanted, self._times_wanted = None, 0
            return [], f"{carried}; no other split carries more"
        would = f"{carried}; {instances(answer.best)} would carry {best.lambda_max:.2f}"
        bare = [c.name for c in answer.present.pd if not (c.prefill_instances and c.decode_instances)]
        if bare:
            # A role that nobody plays there is filled, whatever it gains: a PD cluster serves end to end.
            moves = [move for move in moves if move.cluster in bare]
            would = (
                f"{', '.join(bare)} has nobody of one role; {instances(answer.best)} would carry {best.lambda_max:.2f}"
            )
        elif best.lambda_max <= (1 + self.settings.least_gain) * present.lambda_max:
            self._wanted, self._times_wanted = None, 0
            return [], f"{would}: not worth a change"
        if self._draining or self._moves or any(node.next_role for node in state.nodes.values()):
            # What is under way was decided on, and its end will be looked at.
            self._times_wanted = 0
            return moves, f"{would}: after the change that is under way"
        # What counts is the direction: the exact optimum moves a little with every sample.
        direction = tuple(move.gains for move in moves)
        self._times_wanted = self._times_wanted + 1 if direction == self._wanted else 1
        self._wanted = direction
        if self._times_wanted < self.settings.confirmations:
            return moves, f"{would}: found {self._times_wanted} times of {self.settings.confirmations}"
        dwell_s = 0.0 if bare else self.settings.dwell_s
        ready = [move for move in moves if now - self._changed_s.get(move.cluster, -math.inf) >= dwell_s]
        if not ready:
            self._times_wanted -= 1
            return moves, f"{would}: the last change is not long enough ago"
        return ready, would

    def _egress_bps(self, state: FleetState) -> dict[str, float]:
        """By cluster, what its links carried on average since the last look."""
        rates: dict[str, float] = {}
        for (source, destination), (total_bps, n) in self._rates.items():
            if (source, destination) in state.links:
                rates[source] = rates.get(source, 0.0) + total_bps / n
            self._rates[source, destination] = (total_bps / n, 1)
        return {name: rates.get(name, self.egress_bps) for name in {node.cluster for node in state.nodes.values()}}

    # -- changing -------------------------------------------------------------------------------------------------

    def go_on(self, state: FleetState, *, now: float, roles: bool = True) -> list[Instruction]:
        """Convert what has drained, give up on what does not drain, begin with the next."""
        self._note(state, now)
        found: list[Instruction] = []
        for draining in list(self._draining):
            node = state.nodes.get(draining.node_id)
            if node is None or (node.role is draining.after and node.next_role is None):
                self._draining.remove(draining)
                if node is None:
                    self._moves.clear()
                continue
            why = self._why_not(state, draining, now)
            if why is not None:
                self.ended(draining.node_id)
                found.append(KeepRole(draining.node_id, draining.before, why))
            elif not draining.told and not _in_use(node):
                draining.told = True
                found.append(Convert(draining.node_id, draining.after))
        if not roles:
            self._moves.clear()
        return found + self._start(state, now)

    def _why_not(self, state: FleetState, draining: _Draining, now: float) -> str | None:
        """Why a change must not go on."""
        others = [n for n in _able(state, draining.cluster, draining.before) if n.node_id != draining.node_id]
        if not others:
            return f"it is the last {draining.before.value} node of {draining.cluster} now"
        if now - draining.since_s > self.settings.drain_limit_s:
            return f"it has not drained in {self.settings.drain_limit_s:g} s"
        return None

    def _start(self, state: FleetState, now: float) -> list[Instruction]:
        """Begin with the next node that is to change, if its turn has come."""
        if not self._moves or self._draining or any(node.next_role for node in state.nodes.values()):
            return []
        move = self._moves.pop(0)
        able = _able(state, move.cluster, move.before)
        node = min((n for n in able if n.convertible), key=lambda n: n.load, default=None)
        if node is None or len(able) < 2:
            # Nodes have gone since it was planned: the last one of a role stays.
            self._moves.clear()
            return []
        if move.count > 1:
            self._moves.insert(0, move.less())
        self._draining.append(_Draining(node.node_id, move.cluster, move.before, move.after, now))
        return [Drain(node.node_id, move.after, move.reason)]

    def _note(self, state: FleetState, now: float) -> None:
        """What has changed, and what links carry."""
        for node in state.nodes.values():
            before = self._roles.get(node.node_id)
            if before is not node.role:
                self._roles[node.node_id] = node.role
                if before is not None:
                    self._changed_s[node.cluster] = now
        for key, link in state.links.items():
            if _tells(link):
                total_bps, n = self._rates.get(key, (0.0, 0))
                self._rates[key] = (total_bps + link.rate_bps, n + 1)


def _tells(link: LinkLoad) -> bool:
    """Whether a link's rate says how much it carries: not, where too little was sent to see and no budget is known."""
    return link.rate_bps > 0 and (link.budget_bps > 0 or not link.is_lower_bound)


def _able(state: FleetState, cluster: str, role: Role) -> list[NodeState]:
    """Nodes of a cluster that do the work of a role now."""
    return [n for n in state.nodes.values() if n.cluster == cluster and n.role is role and n.up]


def _in_use(node: NodeState) -> bool:
    return node.running_requests > 0 or node.pending_tokens > 0
