"""The long timescale: splits follow the workload, and do not follow noise."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import BusyError, ConfigError
from prfaas_net.scheduling import (
    Arrival,
    ClusterKind,
    Convert,
    Drain,
    Instruction,
    KeepRole,
    LinkSeen,
    NodeDown,
    NodeSeen,
    Planner,
    PlannerSettings,
    PolicySettings,
    RequestEnded,
    Role,
    Router,
    SetThreshold,
    ThresholdSet,
    make_policy,
)
from prfaas_net.sim.case_study import GBPS, paper_workload, profile

PROFILES = {"prfaas": profile("H200"), "pd": profile("H20")}
STEP_S = 5.0
LENGTHS = [round(paper_workload().lengths.quantile((i + 0.5) / 500)) for i in range(500)]


class World:
    """The case study's fleet with a planner whose instructions are carried out at once."""

    def __init__(self, settings: PlannerSettings | None = None, *, acts: bool = True, carries_out: bool = True) -> None:
        self.acts = acts
        self.carries_out = carries_out
        self._drains_seen = 0
        kinds = {"prfaas": ClusterKind.PRFAAS, "pd": ClusterKind.PD}
        self.router = Router(make_policy("threshold", PolicySettings(19_400)), kinds)
        self.planner = Planner(paper_workload().kv, PROFILES, settings or PlannerSettings())
        self.now = 0.0
        self.said: list[Instruction] = []
        for i in range(4):
            self.seen(f"x{i}", "prfaas", Role.PREFILL)
        for i in range(8):
            self.seen(f"n{i}", "pd", Role.PREFILL if i < 3 else Role.DECODE)
        self.link(100 * GBPS)

    def seen(self, node_id: str, cluster: str, role: Role, **more: Any) -> None:
        more = {"convertible": cluster == "pd"} | more
        seen = NodeSeen(node_id, cluster, role, 1 << 30, profile=PROFILES[cluster], **more)
        self.router.observe(seen, now=self.now)

    def link(self, bps: float) -> None:
        self.router.observe(LinkSeen("prfaas", "pd", LinkState.CLEAR, bps, 100 * GBPS), now=self.now)

    def live(self, seconds: float, output_tokens: float, *, noise: float = 0.0, rng: Random | None = None) -> None:
        """Time passes; requests come at 2 a second with answers of this length, give or take."""
        end = self.now + seconds
        drawn = output_tokens
        since = self.now
        while self.now < end:
            self.now += STEP_S
            if rng is not None and self.now - since >= self.planner.settings.period_s:
                since, drawn = self.now, output_tokens * rng.uniform(1 - noise, 1 + noise)
            for i in range(int(2 * STEP_S)):
                self.planner.arrived(LENGTHS[(int(self.now) * 37 + i * 101) % 500], now=self.now)
                self.planner.answered(round(drawn), now=self.now)
            for instruction in self.planner.step(self.router.state, now=self.now, roles=self.acts):
                self.said.append(instruction)
                if self.carries_out:
                    self.carry_out(instruction)
            self.router.validate_state()

    def carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Drain(node_id):
                self.router.observe(NodeDown(node_id), now=self.now)
            case Convert(node_id, role) | KeepRole(node_id, role):
                self.seen(node_id, "pd", role)
            case SetThreshold(threshold_tokens):
                self.router.observe(ThresholdSet(threshold_tokens), now=self.now)

    @property
    def n_p(self) -> int:
        return sum(n.role is Role.PREFILL and n.cluster == "pd" for n in self.router.state.nodes.values())

    @property
    def drains(self) -> list[str]:
        """Nodes that were told to drain, in order."""
        return [i.node_id for i in self.said if isinstance(i, Drain)]

    @property
    def moves(self) -> int:
        return len(self.drains)

    def fresh_drains(self) -> list[str]:
        """Those that were told since this was last asked."""
        fresh, self._drains_seen = self.drains[self._drains_seen :], len(self.drains)
        return fresh


def test_longer_answers_move_nodes_to_decode_and_back() -> None:
    """L_out 1,024 to 2,048 moves N_p from 3 to 1, and back again; nothing else moves."""
    world = World()
    world.live(2_000, 1_024)
    assert (world.n_p, world.moves) == (3, 0)
    world.live(4_000, 2_048)
    assert (world.n_p, world.moves) == (1, 2)
    world.live(4_000, 1_024)
    assert (world.n_p, world.moves) == (3, 4)
    assert world.planner.threshold_tokens == pytest.approx(19_400, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
def test_noise_of_ten_percent_moves_nothing(seed: int) -> None:
    """Hours of answers whose mean length changes by up to 10 % every few minutes: not one change of roles."""
    world = World()
    world.live(12_000, 1_024, noise=0.1, rng=Random(seed))
    assert world.moves == 0


def test_a_thin_link_raises_the_threshold() -> None:
    """At 8 Gbps less can be sent: t rises, and an instance more prefills at home."""
    world = World()
    world.live(1_000, 1_024)
    wide = world.planner.threshold_tokens
    world.link(8 * GBPS)
    world.live(3_000, 1_024)
    assert wide is not None and world.planner.threshold_tokens is not None
    assert world.planner.threshold_tokens > 1.2 * wide
    assert world.n_p == 4


def test_a_node_is_converted_only_when_nothing_runs_on_it() -> None:
    """A request that came before the drain keeps its node until it has ended; new ones go elsewhere; the next node
    waits for its turn."""
    world = World()
    for i in range(12):
        world.router.decide(Arrival(f"r{i}", 1_000 + i), now=0.0)
    world.live(1_200, 2_048)
    (drained,) = world.drains
    assert not any(isinstance(i, Convert) for i in world.said)
    decision = world.router.decide(Arrival("new", 1_000), now=world.now)
    assert decision.prefill_node != drained
    for i in range(12):
        world.router.observe(RequestEnded(f"r{i}"), now=world.now)
    world.router.observe(RequestEnded("new"), now=world.now)
    world.live(STEP_S, 2_048)
    assert [i.node_id for i in world.said if isinstance(i, Convert)] == [drained]
    world.live(2 * STEP_S, 2_048)
    assert len(world.drains) == 2 and world.n_p == 1


def test_a_node_that_does_not_drain_keeps_its_role() -> None:
    """After its limit it is given work again in the role that it has, and those that were to follow it stay too."""
    world = World(PlannerSettings(drain_limit_s=60.0))
    for i in range(12):
        world.router.decide(Arrival(f"r{i}", 1_000 + i), now=0.0)
    world.live(900, 2_048)
    kept = [i for i in world.said if isinstance(i, KeepRole)]
    assert [i.node_id for i in kept] == world.drains
    assert all(i.role is Role.PREFILL and "drained" in i.reason for i in kept)
    assert world.n_p == 3


def test_the_last_node_of_a_role_never_changes() -> None:
    """Neither when it is planned, nor when the others of its role go while a node drains: the change is called off."""
    world = World()
    for i in range(12):
        world.router.decide(Arrival(f"r{i}", 1_000 + i), now=0.0)
    world.live(1_200, 2_048)
    (drained,) = world.drains
    others = [n for n in ("n0", "n1", "n2") if n != drained]
    world.router.observe(NodeDown(others[0]), now=world.now)
    world.live(STEP_S, 2_048)
    assert not any(isinstance(i, KeepRole) for i in world.said)
    world.router.observe(NodeDown(others[1]), now=world.now)
    world.live(STEP_S, 2_048)
    (kept,) = [i for i in world.said if isinstance(i, KeepRole)]
    assert (kept.node_id, kept.role) == (drained, Role.PREFILL) and "last prefill node" in kept.reason
    world.live(2_000, 2_048)
    assert world.drains == [drained], "one prefill node is left, and one is needed"


def test_a_role_that_nobody_has_any_more_is_filled_without_waiting_out_the_dwell() -> None:
    """All prefill nodes at home die right after a change: a decode node takes over, as soon as it is found twice."""
    world = World()
    world.live(1_200, 2_048)
    assert world.n_p == 1
    last = next(n.node_id for n in world.router.state.up(Role.PREFILL) if n.cluster == "pd")
    world.router.observe(NodeDown(last), now=world.now)
    before = len(world.drains)
    world.live(3 * world.planner.settings.period_s, 2_048)
    assert len(world.drains) == before + 1
    assert [n.cluster for n in world.router.state.up(Role.PREFILL)].count("pd") == 1


def test_nodes_that_cannot_change_are_left_alone() -> None:
    """Of a cluster whose prefill nodes are fixed, none is told to decode."""
    world = World()
    for i in range(2):
        world.seen(f"n{i}", "pd", Role.PREFILL, convertible=False)
    world.live(4_000, 2_048)
    assert world.drains == ["n2"]
    assert world.n_p == 2


def test_a_plan_may_be_made_without_being_carried_out() -> None:
    """What it would do is told, the threshold follows, and no node is touched; later it may act at once."""
    world = World(acts=False)
    world.live(3_000, 2_048)
    plan = world.planner.plan
    assert plan is not None and world.drains == []
    (move,) = plan.moves
    assert (move.cluster, move.before, move.after, move.count) == ("pd", Role.PREFILL, Role.DECODE, 2)
    assert "pd 1:7 would carry" in plan.why
    world.acts = True
    world.live(world.planner.settings.period_s + 2 * STEP_S, 2_048)
    assert len(world.drains) == 2


def test_a_change_that_somebody_else_made_counts_as_one() -> None:
    """Roles that changed by another planner's hand are left alone for as long as after a change of its own."""
    world = World()
    world.live(2_000, 1_024)
    for node_id in ("n0", "n1"):
        world.seen(node_id, "pd", Role.DECODE)
    world.live(world.planner.settings.dwell_s - 2 * STEP_S, 1_024)
    assert world.n_p == 1 and world.drains == []
    world.live(world.planner.settings.period_s + 4 * STEP_S, 1_024)
    assert world.n_p == 3


def test_while_another_planner_drains_a_node_none_is_drained() -> None:
    """One change at a time, whoever makes it; the node counts as what it will be."""
    world = World()
    world.seen("n0", "pd", Role.PREFILL, next_role=Role.DECODE)
    world.live(1_500, 2_048)
    assert world.drains == []
    plan = world.planner.plan
    assert plan is not None and plan.answer.present.pd[0].prefill_instances == 2
    world.seen("n0", "pd", Role.DECODE)
    world.live(1_500, 2_048)
    assert len(world.drains) == 1 and world.n_p == 1


def test_a_change_that_came_to_nothing_is_forgotten() -> None:
    """A node that refused, or died, keeps the planner from nothing."""
    world = World(carries_out=False)
    world.live(1_200, 2_048)
    (drained,) = world.drains
    assert list(world.planner.changing) == [drained]
    world.planner.ended(drained)
    world.planner.ended("nobody")
    assert not world.planner.changing
    world.live(world.planner.settings.dwell_s, 2_048)
    assert len(world.drains) == 2


def test_what_a_link_carried_counts_and_not_what_it_carries_at_the_moment() -> None:
    """One bad second when the planner looks does not move the threshold."""
    world = World()
    world.live(1_000, 1_024)
    wide = world.planner.threshold_tokens
    for _ in range(10):
        world.live(world.planner.settings.period_s - STEP_S, 1_024)
        world.link(8 * GBPS)
        world.live(STEP_S, 1_024)
        world.link(100 * GBPS)
    assert world.planner.threshold_tokens == wide


def test_a_link_that_was_never_filled_is_not_taken_for_thin() -> None:
    """Without a budget, the little that is sent at low load is a lower bound, and not what the link carries."""
    world = World()
    world.router.state.links.clear()
    world.router.observe(LinkSeen("prfaas", "pd", LinkState.APP_LIMITED, GBPS), now=0.0)
    world.live(1_000, 1_024)
    plan = world.planner.plan
    assert plan is not None and math.isinf(plan.answer.question.prfaas[0].egress_bps)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda world: setattr(world.planner, "kv", None), "KVCache"),
        (lambda world: setattr(world.planner, "profiles", {}), "has said how fast"),
        (lambda world: [world.router.observe(NodeDown(f"n{i}"), now=0.0) for i in range(7)], "there are 1"),
    ],
    ids=["size", "speed", "nodes"],
)
def test_why_nothing_can_be_planned_is_said(spoil: Callable[[World], object], says: str) -> None:
    """In a sentence, for whoever looks."""
    world = World()
    for i in range(4):
        world.router.state.nodes[f"x{i}"].profile = None
    spoil(world)
    world.live(1_000, 1_024)
    assert world.planner.plan is None
    assert world.planner.problem is not None and says in world.planner.problem


def test_prompts_that_are_all_about_as_long_are_parted_too() -> None:
    """A few tokens lie between the shortest and the longest: some of them are offloaded, and not all or none."""
    world = World()
    for i in range(200):
        world.planner.arrived(1_000 + i % 40, now=0.0)
        world.planner.answered(64, now=0.0)
    world.planner.step(world.router.state, now=0.0)
    plan = world.planner.plan
    assert plan is not None and 0.2 < plan.chosen.result.offloaded_share < 0.95


def test_profiles_come_from_the_nodes_where_none_are_given() -> None:
    """Every node says how fast it is; that is the cluster's."""
    world = World()
    world.planner.profiles = {}
    world.live(1_000, 1_024)
    assert world.planner.threshold_tokens == pytest.approx(19_400, rel=0.05)


@given(
    seed=st.integers(0, 1000),
    outputs=st.lists(st.sampled_from([256, 1_024, 2_048, 8_192]), min_size=1, max_size=4),
)
@settings(max_examples=8, deadline=None)
def test_whatever_happens_every_role_keeps_a_node_and_loads_add_up(seed: int, outputs: list[int]) -> None:
    """Nodes die and come back, others convert them, drains stall: the planner never takes the last of a role."""
    world, rng = World(PlannerSettings(period_s=20, window_s=60, dwell_s=40, drain_limit_s=30)), Random(seed)
    for step in range(30):
        world.live(STEP_S, outputs[step % len(outputs)])
        pd = [n for n in world.router.state.nodes.values() if n.cluster == "pd" and n.up]
        for drained in world.fresh_drains():
            role = world.router.state.nodes[drained].role
            assert [n for n in pd if n.role is role and n.node_id != drained], "the last of a role was drained"
        match rng.randrange(4):
            case 0 if len(pd) > 4:
                world.router.observe(NodeDown(rng.choice(pd).node_id), now=world.now)
            case 1:
                down = [n for n in world.router.state.nodes.values() if n.cluster == "pd" and not n.up]
                for node in down:
                    if node.node_id not in world.planner.changing:
                        world.seen(node.node_id, "pd", node.role)
            case 2:
                with contextlib.suppress(BusyError):
                    world.router.decide(Arrival(f"r{step}", rng.randint(1, 60_000)), now=world.now)
            case 3:
                for request_id in list(world.router.state.assignments)[:2]:
                    world.router.observe(RequestEnded(request_id), now=world.now)
        world.router.validate_state()


def test_too_few_requests_say_nothing() -> None:
    """Neither a threshold nor a split is derived from a handful."""
    world = World()
    world.planner.arrived(5_000, now=0.0)
    world.planner.answered(50_000, now=0.0)
    assert world.planner.step(world.router.state, now=1_000.0) == []


def test_a_slower_cluster_than_its_profile_counts_as_it_is() -> None:
    """The pace that the router has seen goes into the plan: slower PrfaaS nodes get fewer requests."""
    world = World()
    world.live(1_000, 1_024)
    before = world.planner.threshold_tokens
    world.router.state.corrections["prfaas"].pace = 2.0
    world.live(1_000, 1_024)
    assert before is not None and world.planner.threshold_tokens is not None
    assert world.planner.threshold_tokens > before


def test_bad_settings_are_refused() -> None:
    """A window shorter than the period sees gaps."""
    with pytest.raises(ConfigError, match="window"):
        PlannerSettings(period_s=100, window_s=50)
