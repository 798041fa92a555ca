"""What the planner works with: its settings, its instructions, and the question that a look at the fleet comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.profiles import NodeProfile
from prfaas_net.scheduling.state import Alone, ClusterKind, FleetState, Role
from prfaas_net.scheduling.throughput import T_STEP_TOKENS, PdCluster, PrfaasCluster, Solution, Workload, solve

__all__ = [
    "Convert",
    "Drain",
    "Instruction",
    "KeepRole",
    "Move",
    "Plan",
    "PlannerSettings",
    "Question",
    "SetThreshold",
    "Solved",
    "clusters_of",
    "instances",
]


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
    """Give this node no new work: it will change its role. (A node that can drain by itself is told to.)"""

    node_id: str
    role: Role
    reason: str


@dataclass(frozen=True)
class Convert:
    """Nothing of ours runs on this node any more: let it take its new role. (One that drains by itself does so.)"""

    node_id: str
    role: Role


@dataclass(frozen=True)
class KeepRole:
    """Call the change off, and let this node go on in the role it has."""

    node_id: str
    role: Role
    reason: str = ""


Instruction = SetThreshold | Drain | Convert | KeepRole


@dataclass(frozen=True)
class Move:
    """So many nodes of a PD cluster change their role."""

    cluster: str
    before: Role
    after: Role
    count: int
    reason: str

    @property
    def gains(self) -> int:
        """1 where prefill gains nodes, -1 where decode does."""
        return 1 if self.after is Role.PREFILL else -1

    def less(self) -> Move:
        """What is left after one of them."""
        return replace(self, count=self.count - 1)


@dataclass(frozen=True)
class Question:
    """A look at the fleet and at what it serves.

    Attributes:
        at_s: when it was asked.
        requests: whose lengths count.
    """

    at_s: float
    requests: int
    work: Workload
    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]

    def answer(self) -> Solved:
        """Search, for tens of milliseconds and more; touches nothing."""
        low, high = self.work.lengths.support
        # Prompts that are all about as long need a finer threshold than the case study's hundred tokens.
        step = max(1, min(T_STEP_TOKENS, round((high - low) / 100)))
        present = solve(self.work, self.prfaas, self.pd, fixed_split=True, step_tokens=step)
        return Solved(self, present, solve(self.work, self.prfaas, self.pd, step_tokens=step))


@dataclass(frozen=True)
class Solved:
    """The best threshold with the splits as they are, and with the best splits."""

    question: Question
    present: Solution
    best: Solution

    @property
    def moves(self) -> list[Move]:
        """What leads from the one to the other."""
        found = []
        for old, new in zip(self.present.pd, self.best.pd, strict=True):
            moved = new.prefill_instances - old.prefill_instances
            if not moved:
                continue
            before, after = (Role.DECODE, Role.PREFILL) if moved > 0 else (Role.PREFILL, Role.DECODE)
            present, best = self.present.result, self.best.result
            reason = (
                f"{old.name}: {present.bottleneck} binds at {present.lambda_max:.2f} requests/s; "
                f"{new.prefill_instances}:{new.decode_instances} would carry {best.lambda_max:.2f}"
            )
            found.append(Move(old.name, before, after, abs(moved), reason))
        return found


@dataclass(frozen=True)
class Plan:
    """What a look has found.

    Attributes:
        chosen: what the fleet is, or is being made to be; ``threshold_tokens`` is its ``t``, None without PrfaaS.
        moves: changes that would be worth it.
        why: what is or is not done about them, in one line.
    """

    at_s: float
    answer: Solved
    chosen: Solution
    threshold_tokens: int | None
    moves: tuple[Move, ...]
    why: str


def clusters_of(
    state: FleetState, profiles: Mapping[str, NodeProfile], after: Mapping[str, Role], egress_bps: Mapping[str, float]
) -> tuple[list[PrfaasCluster], list[PdCluster], list[str]]:
    """The fleet as it is, roles that are being changed counted as changed.

    Args:
        profiles: of one instance, by cluster; of other clusters what a node of theirs says of itself.
        after: roles that nodes are about to have, by node; those that nodes themselves tell of count too.

    Returns:
        PrfaaS clusters, PD clusters, and the names of those that nobody says the speed of.
    """
    counts: dict[str, dict[tuple[Role, bool], int]] = {}
    told = dict(profiles)
    for node in sorted(state.nodes.values(), key=lambda node: node.node_id):
        role = after.get(node.node_id) or node.next_role or node.role
        counted = node.up or role is not node.role
        if not counted or node.alone is Alone.ONLY:
            continue
        kinds = counts.setdefault(node.cluster, {(role, fixed): 0 for role in Role for fixed in (True, False)})
        kinds[role, not node.convertible] += 1
        if node.profile is not None:
            told.setdefault(node.cluster, node.profile)
    prfaas, pd, silent = [], [], []
    for name, kinds in sorted(counts.items()):
        profile = told.get(name)
        if profile is None:
            silent.append(name)
            continue
        pace = state.corrections[name].pace if name in state.corrections else 1.0
        profile = replace(profile, prefill_s=profile.prefill_s.scaled(pace))
        n_prefill, n_decode = (kinds[role, True] + kinds[role, False] for role in (Role.PREFILL, Role.DECODE))
        if state.kind_of(name) is ClusterKind.PRFAAS:
            prfaas.append(PrfaasCluster(n_prefill, profile, egress_bps[name], name))
        else:
            fixed = (kinds[Role.PREFILL, True], kinds[Role.DECODE, True])
            pd.append(PdCluster(n_prefill, n_decode, profile, name, *fixed))
    return prfaas, pd, silent


def instances(solution: Solution) -> str:
    """``pd 3:5``: prefill and decode instances of every PD cluster."""
    return ", ".join(f"{c.name} {c.prefill_instances}:{c.decode_instances}" for c in solution.pd)
