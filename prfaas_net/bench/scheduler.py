"""How fast the router decides, with a fleet and requests in flight; and how fast the simulator runs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.scheduling import (
    Arrival,
    ClusterKind,
    LinkSeen,
    NodeSeen,
    PolicySettings,
    Predictor,
    PrefillEnded,
    RequestEnded,
    Role,
    Router,
    TransferLanded,
    make_policy,
    policy_names,
)
from prfaas_net.sim.case_study import GBPS, paper, paper_workload, profile
from prfaas_net.sim.paper_event import paper_fleet
from prfaas_net.sim.requests import poisson
from prfaas_net.sim.simulation import Simulation

__all__ = ["bench_scheduler", "show_scheduler"]

NODES = 64
IN_FLIGHT = 10_000
# Of the fleet: PrfaaS prefill, and prefill and decode of each of two PD clusters.
SHARES = {"prfaas": (24, 0), "pd-a": (8, 12), "pd-b": (8, 12)}
MAX_TOKENS = 1 << 20
# Of requests in flight, so many still wait for their prefill; the others decode.
PREFILLING_SHARE = 0.1


def _router(policy: str) -> Router:
    kinds = {name: ClusterKind.PD if decode else ClusterKind.PRFAAS for name, (_, decode) in SHARES.items()}
    settings = PolicySettings(paper()["fleet"]["t_tokens"], Random(1))
    router = Router(make_policy(policy, settings), kinds, Predictor(paper_workload().kv, True, 800 * GBPS))
    for name, (prefill, decode) in SHARES.items():
        hardware = profile("H20" if decode else "H200")
        for i in range(prefill):
            router.observe(NodeSeen(f"{name}-p{i}", name, Role.PREFILL, MAX_TOKENS, 512, hardware), now=0.0)
        for i in range(decode):
            router.observe(NodeSeen(f"{name}-d{i}", name, Role.DECODE, MAX_TOKENS, 512, hardware, 20), now=0.0)
        for other, (_, decodes) in SHARES.items():
            if decodes and other != name:
                router.observe(LinkSeen(name, other, LinkState.CLEAR, 100 * GBPS, 100 * GBPS, 0.02), now=0.0)
    return router


def _arrival(number: int, rng: Random, lengths: list[int]) -> Arrival:
    tokens = lengths[int(rng.random() * len(lengths))]
    # What a KVCache manager says: a prefix on some clusters, more of it on one node.
    cached = {"pd-a": int(tokens * rng.random() * 0.5), "prfaas": int(tokens * rng.random() * 0.3)}
    more = {f"pd-a-p{int(rng.random() * 8)}": int(tokens * 0.6)}
    return Arrival(f"r{number}", tokens, 1024, cached, more, ttft_limit_s=1e9)


def _decisions(policy: str, count: int) -> dict[str, Any]:
    """Times of ``count`` decisions, each followed by the events of another request."""
    rng = Random(7)
    lengths = [round(paper_workload().lengths.quantile((i + 0.5) / 5000)) for i in range(5000)]
    router = _router(policy)
    now, first, prefilling = 0.0, 0, []
    for number in range(IN_FLIGHT):
        router.decide(_arrival(number, rng, lengths), now=now)
        prefilling.append(number)
    for number in prefilling[: int(IN_FLIGHT * (1 - PREFILLING_SHARE))]:
        router.observe(PrefillEnded(f"r{number}"), now=now)
        router.observe(TransferLanded(f"r{number}"), now=now)
    decide_us, cpu_us, observe_us = [], [], []
    waiting = int(IN_FLIGHT * (1 - PREFILLING_SHARE))
    gc.collect()
    gc.disable()
    try:
        for number in range(IN_FLIGHT, IN_FLIGHT + count):
            now += 0.01
            arrival = _arrival(number, rng, lengths)
            begun_cpu, begun = time.thread_time_ns(), time.perf_counter_ns()
            router.decide(arrival, now=now)
            decide_us.append((time.perf_counter_ns() - begun) / 1e3)
            cpu_us.append((time.thread_time_ns() - begun_cpu) / 1e3)
            begun = time.perf_counter_ns()
            router.observe(PrefillEnded(f"r{waiting}"), now=now)
            router.observe(TransferLanded(f"r{waiting}"), now=now)
            router.observe(RequestEnded(f"r{first}"), now=now)
            observe_us.append((time.perf_counter_ns() - begun) / 3e3)
            waiting, first = waiting + 1, first + 1
    finally:
        gc.enable()
    router.validate_state()
    for times in (decide_us, cpu_us, observe_us):
        times.sort()
    mean_us = sum(decide_us) / count
    return {
        "policy": policy,
        "decisions_per_s": 1e6 / mean_us,
        "mean_us": mean_us,
        "p50_us": decide_us[count // 2],
        "p99_us": decide_us[math.ceil(0.99 * count) - 1],
        # Of this thread alone: what other processes take from a busy machine is not in it.
        "p99_cpu_us": cpu_us[math.ceil(0.99 * count) - 1],
        "event_p50_us": observe_us[count // 2],
        "in_flight": len(router.state.assignments),
        "nodes": len(router.state.nodes),
    }


def _simulated(count: int, policy: str, *, detector: bool) -> dict[str, Any]:
    """How long the case study takes to simulate, at 0.9 load; with the congestion detector at its link, or without."""
    work, fleet = paper_workload(), paper()["fleet"]
    rate = 0.9 * paper()["expected"]["table_6"]["lambda_max"]["prfaas_pd"]
    simulation = Simulation(
        paper_fleet(fleet["n_prfaas"], fleet["n_p"], fleet["n_d"], pipelined=True),
        make_policy(policy, PolicySettings(fleet["t_tokens"], Random(1))),
        detector=detector,
    )
    begun = time.perf_counter()
    result = simulation.run(poisson(work.lengths, 1024, rate_req_s=rate, count=count, seed=1))
    took_s = time.perf_counter() - begun
    return {
        "policy": policy,
        "detector": detector,
        "requests": result.finished,
        "events": result.events,
        "seconds": took_s,
        "requests_per_s": result.finished / took_s,
        "a_million_takes_s": 1e6 * took_s / result.finished,
    }


def bench_scheduler(
    *, decisions: int = 20_000, simulated: int = 100_000, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Decisions of every policy with 64 nodes and 10,000 requests in flight, and the simulator's speed."""
    rows = []
    for policy in policy_names():
        progress(f"decisions of {policy}")
        rows.append(_decisions(policy, decisions))
    runs = []
    for policy in ("threshold", "earliest-finish"):
        progress(f"{simulated:,} requests simulated with {policy}")
        runs.append(_simulated(simulated, policy, detector=False))
    progress(f"{simulated // 10:,} requests with the congestion detector")
    runs.append(_simulated(max(1, simulated // 10), "earliest-finish", detector=True))
    return {"nodes": NODES, "in_flight": IN_FLIGHT, "decisions": rows, "simulator": runs}


def show_scheduler(report: dict[str, Any], console: Console) -> None:
    """Tables for people."""
    table = Table(title=f"Decisions with {report['nodes']} nodes and {report['in_flight']:,} requests in flight")
    for name in ("policy", "decisions/s", "mean", "P50", "P99", "P99 CPU", "an event"):
        table.add_column(name, justify="right")
    for row in report["decisions"]:
        table.add_row(
            row["policy"], f"{row['decisions_per_s']:,.0f}",
            *(f"{row[key]:.0f} us" for key in ("mean_us", "p50_us", "p99_us", "p99_cpu_us", "event_p50_us")),
        )  # fmt: skip
    console.print(table)
    for run in report["simulator"]:
        detector = "with the detector" if run["detector"] else "without a detector"
        console.print(
            f"simulator, {run['policy']}, {detector}: {run['requests_per_s']:,.0f} requests/s, "
            f"a million in {run['a_million_takes_s']:.0f} s"
        )
