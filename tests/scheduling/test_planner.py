"""The long timescale: splits follow the workload, and do not follow noise."""

from __future__ import annotations

from random import Random

import pytest

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import ConfigError
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

    def __init__(self, settings: PlannerSettings | None = None) -> None:
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

    def seen(self, node_id: str, cluster: str, role: Role) -> None:
        self.router.observe(NodeSeen(node_id, cluster, role, 1 << 30, profile=PROFILES[cluster]), now=self.now)

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
            for instruction in self.planner.step(self.router.state, now=self.now):
                self.said.append(instruction)
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
    def moves(self) -> int:
        return sum(isinstance(i, Drain) for i in self.said)


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
    """A request that came before the drain keeps its node until it has ended; new ones go elsewhere."""
    world = World()
    for i in range(12):
        world.router.decide(Arrival(f"r{i}", 1_000 + i), now=0.0)
    world.live(1_200, 2_048)
    drained = [i.node_id for i in world.said if isinstance(i, Drain)]
    assert len(drained) == 2 and not any(isinstance(i, Convert) for i in world.said)
    decision = world.router.decide(Arrival("new", 1_000), now=world.now)
    assert decision.prefill_node not in drained
    for i in range(12):
        world.router.observe(RequestEnded(f"r{i}"), now=world.now)
    world.live(STEP_S, 2_048)
    assert sorted(i.node_id for i in world.said if isinstance(i, Convert)) == sorted(drained)


def test_a_node_that_does_not_drain_keeps_its_role() -> None:
    """After its limit it is given work again in the role that it has."""
    world = World(PlannerSettings(drain_limit_s=60.0))
    for i in range(12):
        world.router.decide(Arrival(f"r{i}", 1_000 + i), now=0.0)
    world.live(900, 2_048)
    kept = [i for i in world.said if isinstance(i, KeepRole)]
    assert len(kept) >= 2 and all(i.role is Role.PREFILL for i in kept)
    assert world.n_p == 3


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
