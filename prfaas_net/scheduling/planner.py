"""The long-timescale planner: every few minutes, the best threshold and prefill:decode split for what is seen.

Pure, like the router: it is told what arrives, looks at the router's state, and answers with instructions. A node that
is to change its role is drained first; it is converted when nothing runs on it any more, so that no request is
dropped. Three things keep it from flapping: a new split must carry a good deal more than the present one, it must do so
several times in a row, and after a change nothing changes for a while.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.lengths import EmpiricalLengths
from prfaas_net.scheduling.profiles import KvSize, NodeProfile
from prfaas_net.scheduling.state import ClusterKind, FleetState, NodeState, Role
from prfaas_net.scheduling.throughput import PdCluster, PrfaasCluster, Solution, Workload, solve

__all__ = ["Convert", "Drain", "Instruction", "KeepRole", "Planner", "PlannerSettings", "SetThreshold"]


@dataclass(frozen=True)
class PlannerSettings:
    """How eager the planner is. The paper says only "minutes to hours".

    Attributes:
        period_s: from one look to the next.
        window_s: how far back requests count.
        least_requests: fewer of them say nothing.
        least_gain: a new split must carry this share more than the present one with its own best threshold. 10 % is
            what a change of 10 % in output length can promise at the case study's optimum, and is not worth a drain.
        confirmations: times in a row that it must be found better.
        dwell_s: from one change of roles in a cluster to the next.
        drain_limit_s: a node that has not drained by then keeps its role.
        threshold_change: a new threshold is set if it differs by this share.
    """

    period_s: float = 180.0
    window_s: float = 900.0
    least_requests: int = 100
    least_gain: float = 0.10
    confirmations: int = 2
    dwell_s: float = 600.0
    drain_limit_s: float = 900.0
    threshold_change: float = 0.05

    def __post_init__(self) -> None:
        if self.period_s <= 0 or self.window_s < self.period_s or self.confirmations < 1 or self.least_gain < 0:
            raise ConfigError(
                "a planner needs a period, a window that is no shorter, one confirmation or more, and no negative gain",
                found=f"{self.period_s} s, {self.window_s} s, {self.confirmations}, {self.least_gain}",
            )


@dataclass(frozen=True)
class SetThreshold:
    """Route with this ``t`` from now on."""

    threshold_tokens: int
    reason: str


@dataclass(frozen=True)
class Drain:
    """Give this node no new work: it will change its role."""

    node_id: str
    role: Role
    reason: str


@dataclass(frozen=True)
class Convert:
    """Nothing runs on this node any more: let it take its new role."""

    node_id: str
    role: Role


@dataclass(frozen=True)
class KeepRole:
    """This node did not drain in time: let it go on in the role it has."""

    node_id: str
    role: Role


Instruction = SetThreshold | Drain | Convert | KeepRole


@dataclass
class _Draining:
    node_id: str
    cluster: str
    before: Role
    after: Role
    since_s: float


@dataclass
class Planner:
    """Looks at a fleet and says what to change.

    Args:
        kv: S_kv(l) of the model.
        profiles: by cluster, of one instance; corrected by the pace that the router has seen there.
        egress_bps: of PrfaaS clusters whose link was never described.
    """

    kv: KvSize
    profiles: Mapping[str, NodeProfile]
    settings: PlannerSettings = PlannerSettings()
    egress_bps: float = math.inf
    threshold_tokens: int | None = None
    solution: Solution | None = None
    _lengths: deque[tuple[float, int]] = field(default_factory=deque)
    _outputs: deque[tuple[float, int]] = field(default_factory=deque)
    _draining: list[_Draining] = field(default_factory=list)
    _changed_s: dict[str, float] = field(default_factory=dict)
    _wanted: tuple[int, ...] | None = None
    _times_wanted: int = 0
    _looked_s: float = -math.inf

    def arrived(self, incremental_tokens: int, *, now: float) -> None:
        """A request has come whose prompt needs so many tokens computed."""
        self._lengths.append((now, incremental_tokens))

    def answered(self, output_tokens: int, *, now: float) -> None:
        """A request has ended after so many tokens."""
        self._outputs.append((now, output_tokens))

    def next_deadline(self) -> float:
        """When :meth:`step` has something to do, at the latest."""
        return self._looked_s + self.settings.period_s

    def step(self, state: FleetState, *, now: float) -> list[Instruction]:
        """Go on with drains, and look at the whole again if its time has come."""
        instructions = self._go_on(state, now)
        if now < self.next_deadline():
            return instructions
        self._looked_s = now
        self._forget(now)
        if min(len(self._lengths), len(self._outputs)) < self.settings.least_requests:
            return instructions
        return instructions + self._plan(state, now)

    def _forget(self, now: float) -> None:
        for seen in (self._lengths, self._outputs):
            while seen and seen[0][0] < now - self.settings.window_s:
                seen.popleft()

    def _workload(self) -> Workload:
        outputs = sum(tokens for _, tokens in self._outputs) / len(self._outputs)
        return Workload(EmpiricalLengths(tokens for _, tokens in self._lengths), outputs, self.kv)

    def _plan(self, state: FleetState, now: float) -> list[Instruction]:
        work = self._workload()
        prfaas, pd = self._clusters(state)
        if not pd or sum(cluster.instances for cluster in pd) < 2:
            return []
        present = solve(work, prfaas, pd, fixed_split=True)
        best = solve(work, prfaas, pd)
        found: list[Instruction] = []
        chosen = present
        if self._draining:
            # One change at a time: what is under way was decided on, and its end will be looked at.
            self._times_wanted = 0
        elif self._convinced(present, best):
            found = self._change(state, present, best, now)
            chosen = best if found else present
        self.solution = chosen
        t = int(chosen.result.t_tokens) if math.isfinite(chosen.result.t_tokens) else 0
        old = self.threshold_tokens
        if prfaas and (old is None or abs(t - old) > self.settings.threshold_change * max(1, old)):
            self.threshold_tokens = t
            reason = f"{chosen.result.bottleneck} binds at {chosen.result.lambda_max:.2f} requests/s"
            found.append(SetThreshold(t, reason))
        return found

    def _clusters(self, state: FleetState) -> tuple[list[PrfaasCluster], list[PdCluster]]:
        """The fleet as it is, roles that are being changed counted as changed."""
        after = {d.node_id: d.after for d in self._draining}
        counts: dict[str, dict[Role, int]] = {}
        for node in state.nodes.values():
            if node.up or node.node_id in after:
                roles = counts.setdefault(node.cluster, dict.fromkeys(Role, 0))
                roles[after.get(node.node_id, node.role)] += 1
        prfaas, pd = [], []
        for name, roles in sorted(counts.items()):
            profile = self.profiles.get(name)
            if profile is None:
                continue
            pace = state.corrections[name].pace if name in state.corrections else 1.0
            profile = replace(profile, prefill_s=profile.prefill_s.scaled(pace))
            if state.kind_of(name) is ClusterKind.PRFAAS:
                prfaas.append(PrfaasCluster(roles[Role.PREFILL], profile, self._egress_bps(state, name), name))
            else:
                pd.append(PdCluster(roles[Role.PREFILL], roles[Role.DECODE], profile, name))
        return prfaas, pd

    def _egress_bps(self, state: FleetState, cluster: str) -> float:
        rates = [link.rate_bps for (source, _), link in state.links.items() if source == cluster and link.rate_bps > 0]
        return sum(rates) or self.egress_bps

    def _convinced(self, present: Solution, best: Solution) -> bool:
        """Whether the better split has been better by enough, and often enough."""
        split = tuple(cluster.prefill_instances for cluster in best.pd)
        better = best.result.lambda_max > (1 + self.settings.least_gain) * present.result.lambda_max
        if not better or split == tuple(c.prefill_instances for c in present.pd):
            self._wanted, self._times_wanted = None, 0
            return False
        # What counts is the direction: the exact optimum moves a little with every sample.
        direction = tuple(
            (new > old) - (new < old) for new, old in zip(split, (c.prefill_instances for c in present.pd), strict=True)
        )
        self._times_wanted = self._times_wanted + 1 if direction == self._wanted else 1
        self._wanted = direction
        return self._times_wanted >= self.settings.confirmations

    def _change(self, state: FleetState, present: Solution, best: Solution, now: float) -> list[Instruction]:
        found: list[Instruction] = []
        for old, new in zip(present.pd, best.pd, strict=True):
            moved = new.prefill_instances - old.prefill_instances
            if not moved or now - self._changed_s.get(old.name, -math.inf) < self.settings.dwell_s:
                continue
            before, after = (Role.DECODE, Role.PREFILL) if moved > 0 else (Role.PREFILL, Role.DECODE)
            reason = (
                f"{old.name}: {present.result.bottleneck} binds at {present.result.lambda_max:.2f} requests/s; "
                f"{new.prefill_instances}:{new.decode_instances} would carry {best.result.lambda_max:.2f}"
            )
            for node in _least_loaded(state, old.name, before)[: abs(moved)]:
                self._draining.append(_Draining(node.node_id, old.name, before, after, now))
                found.append(Drain(node.node_id, after, reason))
            self._changed_s[old.name] = now
        self._times_wanted = 0
        return found

    def _go_on(self, state: FleetState, now: float) -> list[Instruction]:
        """Convert what has drained; give up on what does not drain."""
        found: list[Instruction] = []
        for draining in list(self._draining):
            node = state.nodes.get(draining.node_id)
            if node is None:
                self._draining.remove(draining)
            elif not _in_use(state, draining.node_id):
                self._draining.remove(draining)
                found.append(Convert(draining.node_id, draining.after))
            elif now - draining.since_s > self.settings.drain_limit_s:
                self._draining.remove(draining)
                found.append(KeepRole(draining.node_id, draining.before))
        return found


def _least_loaded(state: FleetState, cluster: str, role: Role) -> Sequence[NodeState]:
    nodes = [n for n in state.nodes.values() if n.up and n.cluster == cluster and n.role is role]
    return sorted(nodes, key=lambda node: node.load)


def _in_use(state: FleetState, node_id: str) -> bool:
    node = state.nodes[node_id]
    return node.running_requests > 0 or node.pending_tokens > 0
