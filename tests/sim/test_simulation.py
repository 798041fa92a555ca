"""Whole runs: what must hold of every one, and what single mechanisms do."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import UsageError
from prfaas_net.scheduling import (
    Convert,
    LinkSeen,
    Planner,
    PlannerSettings,
    PolicySettings,
    Role,
    Router,
    dump_log,
    load_log,
    make_policy,
    policy_names,
    replay,
)
from prfaas_net.sim.case_study import GBPS, paper_workload, profile
from prfaas_net.sim.fleet import FleetSpec, NodeFailure, bursty, drop, steady
from prfaas_net.sim.paper_event import paper_fleet
from prfaas_net.sim.requests import SimRequest, poisson
from prfaas_net.sim.result import SimResult
from prfaas_net.sim.simulation import Simulation


def settings() -> PolicySettings:
    return PolicySettings(19_400, Random(3))


def run(
    policy: str = "earliest-finish", *, load: float = 0.8, count: int = 400, fleet: FleetSpec | None = None,
    seed: int = 1, ttft_limit_s: float | None = None,
) -> tuple[Simulation, SimResult]:  # fmt: skip
    work = paper_workload()
    simulation = Simulation(
        fleet or paper_fleet(4, 3, 5, pipelined=True),
        make_policy(policy, settings()),
        seed=seed,
        validate_every=1,
        ttft_limit_s=ttft_limit_s,
    )
    requests = poisson(work.lengths, 1024, rate_req_s=3.24 * load, count=count, seed=seed)
    return simulation, simulation.run(requests)


@pytest.mark.parametrize("policy", policy_names())
def test_every_request_ends_and_nothing_stays_behind(policy: str) -> None:
    """Whatever the policy: all are served, all loads return to nothing, and no prediction is needed for that."""
    simulation, result = run(policy)
    state = simulation.router.state
    assert result.finished == result.arrivals == 400
    assert not state.assignments
    assert all(n.pending_tokens == n.running_requests == 0 and not n.queue for n in state.nodes.values())
    assert all(link.promised_bits == link.transfers == 0 for link in state.links.values())
    assert min(result.ttft_s) > 0


def test_the_same_seed_gives_the_same_run() -> None:
    """Bit for bit; another seed gives another run."""
    first, again, other = run()[1], run()[1], run(seed=2)[1]
    assert first.ttft_s == again.ttft_s
    assert first.ttft_s != other.ttft_s


def test_a_request_alone_takes_its_prefill_and_its_transfer() -> None:
    """Pipelined, the transfer hides behind the prefill; not pipelined, it comes after it."""
    work = paper_workload()
    prompt = SimRequest(0.0, 32_768, 8)
    for pipelined, expected in ((True, 1.844), (False, 1.844 + 8 * work.kv(32_768) / 1e11)):
        simulation = Simulation(paper_fleet(1, 1, 1, pipelined=pipelined), make_policy("remote", settings()))
        assert simulation.run([prompt]).ttft_s[0] == pytest.approx(expected)


def test_a_thin_link_bounds_the_first_token() -> None:
    """With B below Phi, TTFT is S / B."""
    work = paper_workload()
    fleet = paper_fleet(1, 1, 1, pipelined=True, steps=steady(GBPS))
    simulation = Simulation(fleet, make_policy("remote", settings()))
    assert simulation.run([SimRequest(0.0, 32_768, 8)]).ttft_s[0] == pytest.approx(8 * work.kv(32_768) / 1e9)


def test_predictions_are_what_happens() -> None:
    """With profiles that are true and an empty link, the router foresees every TTFT within some milliseconds."""
    _, result = run("threshold")
    assert max(result.error_s) < 0.4
    assert sum(result.error_s) / len(result.error_s) < 0.02


def test_a_slower_cluster_than_its_profile_is_found_out() -> None:
    """Its pace is learned, and predictions follow."""
    fleet = paper_fleet(4, 3, 5, pipelined=True)
    slow = replace(fleet, clusters=(replace(fleet.clusters[0], speed=0.7), fleet.clusters[1]))
    simulation, result = run(load=0.5, count=600, fleet=slow)
    paces = [n.pace for n in simulation.router.state.nodes.values() if n.cluster == "prfaas"]
    assert paces == pytest.approx([1 / 0.7] * 4, rel=0.02)
    early, late = list(result.error_s)[:50], list(result.error_s)[-200:]
    assert sum(late) / 200 < 0.5 * sum(early) / 50


@pytest.mark.parametrize("policy", ["threshold", "earliest-finish"])
def test_a_dead_prfaas_cluster_costs_speed_and_no_request(policy: str) -> None:
    """Its requests go to the local cluster, and come back to it when it is back."""
    failures = tuple(NodeFailure(f"prfaas-prefill-{i}", 40.0, 70.0) for i in range(4))
    fleet = replace(paper_fleet(4, 3, 5, pipelined=True), failures=failures)
    _, result = run(policy, load=0.5, fleet=fleet)
    assert result.finished == 400 and result.lost == 0 and result.retried > 0
    remote = [off for at, off in zip(result.arrived_s, result.offloaded, strict=True) if 40.0 < at < 70.0]
    assert not any(remote)
    assert any(off for at, off in zip(result.arrived_s, result.offloaded, strict=True) if at > 80.0)


@pytest.mark.parametrize("policy", ["threshold", "earliest-finish"])
def test_a_link_that_is_down_is_not_used_and_comes_back(policy: str) -> None:
    """The detector says so within a second or two; what was under way lands when the link is back."""
    fleet = paper_fleet(4, 3, 5, pipelined=True, steps=drop(100 * GBPS, 0.0, at_s=[40.0], for_s=30.0), rtt_s=0.02)
    simulation, result = run(policy, load=0.5, fleet=fleet)
    heard = [e.state for _, e in simulation.router.story("prfaas>pd") if isinstance(e, LinkSeen)]
    assert LinkState.DOWN in heard and heard[-1] is not LinkState.DOWN
    assert result.finished == 400 and result.lost == 0
    rows = list(zip(result.arrived_s, result.offloaded, strict=True))
    assert not any(offloaded for at_s, offloaded in rows if 44.0 < at_s < 70.0)
    assert any(offloaded for at_s, offloaded in rows if at_s > 85.0)


def test_a_dead_decode_node_loses_its_requests_to_others() -> None:
    """They are prefilled again and decoded elsewhere."""
    fleet = replace(paper_fleet(4, 3, 5, pipelined=True), failures=(NodeFailure("pd-decode-0", 30.0),))
    _, result = run(load=0.4, fleet=fleet)
    assert result.finished == 400 and result.retried > 5


def test_room_on_decode_nodes_is_waited_for() -> None:
    """With room for two prompts at a time, everything still ends."""
    fleet = paper_fleet(4, 3, 5, pipelined=True)
    tight = replace(fleet, clusters=(fleet.clusters[0], replace(fleet.clusters[1], room_bytes=6e9)))
    _, result = run(load=0.3, count=150, fleet=tight)
    assert result.finished == 150


def test_load_is_shed_at_once_when_nobody_can_meet_the_limit() -> None:
    """Overloaded twofold, those who are taken in are served in time; the others are told at once."""
    _, result = run(load=2.0, count=900, ttft_limit_s=15.0)
    assert 0.2 < result.shed / result.arrivals < 0.7
    assert result.finished + result.shed == 900
    within = sum(ttft <= 15.5 for ttft in result.ttft_s) / len(result.ttft_s)
    assert within > 0.98


def test_the_link_is_not_filled_beyond_its_budget() -> None:
    """When the link falls to 2 Gbps the longest prompts alone are offloaded, and the backlog stays bounded."""
    fleet = paper_fleet(4, 3, 5, pipelined=True, steps=drop(100 * GBPS, 2 * GBPS, at_s=[20.0], for_s=80.0))
    simulation, result = run(load=0.6, count=300, fleet=fleet)
    assert result.finished == 300
    before = [o for at, o in zip(result.arrived_s, result.offloaded, strict=True) if at < 20]
    during = [o for at, o in zip(result.arrived_s, result.offloaded, strict=True) if 25 < at < 100]
    assert sum(during) / len(during) < 0.5 * sum(before) / len(before)
    assert simulation.router.state.links["prfaas", "pd"].budget_bps == 100 * GBPS


def test_shared_prefixes_shorten_prefill() -> None:
    """The second turn of a conversation computes its new part only, where the first was decoded."""
    fleet = replace(paper_fleet(1, 1, 1, pipelined=True), cached=True)
    blocks = tuple(range(40))
    turns = [SimRequest(0.0, 40 * 512, 8, blocks), SimRequest(60.0, 44 * 512, 8, (*blocks, 40, 41, 42, 43))]
    simulation = Simulation(fleet, make_policy("local", settings()))
    result = simulation.run(turns)
    assert result.ttft_s[1] == pytest.approx(fleet.clusters[1].profile.prefill_s(4 * 512))


def test_a_log_replayed_gives_the_same_decisions() -> None:
    """Through JSON and back, into a router made from the same settings."""
    simulation, _ = run(count=200)
    log = load_log(dump_log(simulation.router.log()))
    fresh = Router(
        make_policy("earliest-finish", settings()), simulation.router.state.kinds, simulation.router.predictor
    )
    pairs = list(replay(log, fresh))
    assert len(pairs) == 200
    assert all(old == new for old, new in pairs)


def test_roles_change_while_serving_and_no_request_is_dropped() -> None:
    """Answers twice as long make two prefill nodes decode; everything that was asked for is answered."""
    work = paper_workload()
    planner = Planner(
        work.kv,
        {"prfaas": profile("H200"), "pd": profile("H20")},
        PlannerSettings(period_s=60, window_s=200, dwell_s=200, least_requests=50),
    )
    simulation = Simulation(
        paper_fleet(4, 3, 5, pipelined=True), make_policy("threshold", settings()), planner=planner, validate_every=1
    )
    requests = poisson(work.lengths, 2048, rate_req_s=1.6, count=1500, seed=4)
    result = simulation.run(requests)
    assert result.finished == 1500 and result.lost == result.retried == 0
    converted = [i for _, i in result.instructions if isinstance(i, Convert)]
    assert [i.role for i in converted] == [Role.DECODE, Role.DECODE]
    assert len(result.thresholds) > 1


def test_a_step_in_output_length_moves_two_nodes_and_back_and_noise_moves_none() -> None:
    """1,024 to 2,048 and back, every minute up to 10 % off: N_p goes from 3 to 1 and to 3 again, in four changes."""
    work, rng = paper_workload(), Random(7)
    planner = Planner(
        work.kv,
        {"prfaas": profile("H200"), "pd": profile("H20")},
        PlannerSettings(period_s=60, window_s=300, dwell_s=200, least_requests=50),
    )
    noise = [rng.uniform(0.9, 1.1) for _ in range(200)]
    requests = [
        replace(r, output_tokens=round((2048 if 600 <= r.at_s < 1500 else 1024) * noise[int(r.at_s / 60)]))
        for r in poisson(work.lengths, 1024, rate_req_s=1.5, count=3600, seed=1)
    ]
    policy = make_policy("threshold", settings())
    simulation = Simulation(paper_fleet(4, 3, 5, pipelined=True), policy, planner=planner, detector=False)
    result = simulation.run(requests)
    moves = [(at_s, i.role) for at_s, i in result.instructions if isinstance(i, Convert)]
    assert [role for _, role in moves] == [Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL]
    assert 600 < moves[0][0] < moves[1][0] < 1500 < moves[2][0]
    assert result.finished == 3600 and result.lost == result.retried == 0


def test_cross_traffic_comes_and_goes_by_its_seed() -> None:
    """On and off times are drawn once."""
    steps = bursty(100 * GBPS, 10 * GBPS, on_s=5, off_s=20, until_s=500, seed=4)
    assert steps == bursty(100 * GBPS, 10 * GBPS, on_s=5, off_s=20, until_s=500, seed=4)
    assert {bps for _, bps in steps} == {100 * GBPS, 10 * GBPS}
    _, result = run(load=0.5, count=200, fleet=paper_fleet(4, 3, 5, pipelined=True, steps=steps))
    assert result.finished == 200


def test_a_simulation_runs_once() -> None:
    """Its state is that of its end."""
    simulation, _ = run(count=10)
    with pytest.raises(UsageError, match="once"):
        simulation.run([])
