"""``prfaas sim paper``, the event part: where the case study's fleets saturate, and TTFT with queues.

First come, first served, Poisson arrivals, no batching of prefills; KVCache is sent after the prefill, as the paper's
table 6 counts it. Because E[T(L)] exceeds T(E[L]), a fleet saturates below what the paper's formula says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from prfaas_net.scheduling import Policy, PolicySettings, make_policy
from prfaas_net.sim.case_study import GBPS, paper, paper_workload, profile
from prfaas_net.sim.fleet import ClusterSpec, FleetSpec, LinkSpec, steady
from prfaas_net.sim.requests import poisson
from prfaas_net.sim.result import SimResult
from prfaas_net.sim.simulation import Simulation

__all__ = ["event_part", "paper_fleet", "system"]

# Requests of a run by load: the closer to saturation, the longer a queue remembers.
REQUESTS = {"0.5": 40_000, "0.7": 80_000, "0.8": 160_000, "0.9": 600_000}
SATURATION_REQUESTS = 60_000
# Offered over what the formula says, so that every stage has always something to do.
OVERLOAD = 1.25
LINK_RTT_S = 0.0


def paper_fleet(
    n_prfaas: int, n_p: int, n_d: int, *, pipelined: bool, steps: tuple[tuple[float, float], ...] | None = None,
    rtt_s: float = LINK_RTT_S,
) -> FleetSpec:  # fmt: skip
    """The case study's hardware in this number; ``steps`` are what the link carries."""
    numbers = paper()["workload"]
    clusters = [ClusterSpec("pd", profile("H20"), n_p, n_d)]
    links: tuple[LinkSpec, ...] = ()
    if n_prfaas:
        clusters.insert(0, ClusterSpec("prfaas", profile("H200"), n_prfaas))
        links = (LinkSpec("prfaas", "pd", steps or steady(numbers["link_gbps"] * GBPS), rtt_s),)
    return FleetSpec(
        tuple(clusters), links, paper_workload().kv, pipelined=pipelined,
        local_bps=numbers["intra_cluster_gbps"] * GBPS,
    )  # fmt: skip


def system(name: str) -> tuple[FleetSpec, Policy]:
    """One of the three systems of table 6, with the policy that it is run with."""
    fleet, settings = paper()["fleet"], PolicySettings(paper()["fleet"]["t_tokens"])
    if name == "homogeneous":
        return paper_fleet(0, 9, 3, pipelined=False), make_policy("local", settings)
    if name == "naive":
        return paper_fleet(fleet["n_prfaas"], 0, fleet["n_pd"], pipelined=False), make_policy("remote", settings)
    return (
        paper_fleet(fleet["n_prfaas"], fleet["n_p"], fleet["n_d"], pipelined=False),
        make_policy("threshold", settings),
    )


def event_part(
    *, scale: float = 1.0, seed: int = 1, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Saturation points and TTFT by load.

    Args:
        scale: on the number of requests of every run.
    """
    names = paper()["expected"]["table_6"]["lambda_max"]
    saturation = {}
    for name, lambda_max in names.items():
        progress(f"saturation of {name}")
        saturation[name] = _saturation(name, lambda_max, max(2000, int(SATURATION_REQUESTS * scale)), seed)
    ttft: dict[str, dict[str, list[float]]] = {}
    intervals: dict[str, dict[str, list[float]]] = {}
    for load, count in REQUESTS.items():
        ttft[load], intervals[load] = {}, {}
        for name, lambda_max in names.items():
            progress(f"{name} at {load} of its load")
            found = _run(name, float(load) * lambda_max, max(2000, int(count * scale)), seed, progress).figures()
            ttft[load][name] = [found.mean, found.p90]
            intervals[load][name] = [found.mean_ci, found.p90_ci]
    return {"saturation_req_s": saturation, "ttft_s": ttft, "ttft_ci95_s": intervals}


def _run(name: str, rate: float, count: int, seed: int, progress: Callable[[str], None]) -> SimResult:
    fleet, policy = system(name)
    work = paper_workload()

    def tell(done: int, seconds: float) -> None:
        progress(f"{name} at {rate:.2f} req/s: {done:,} of {count:,} requests, {seconds / 3600:.1f} h simulated")

    simulation = Simulation(fleet, policy, seed=seed, progress=tell)
    requests = poisson(work.lengths, int(work.output_tokens), rate_req_s=rate, count=count, seed=seed)
    return simulation.run(requests)


def _saturation(name: str, lambda_max: float, count: int, seed: int) -> float:
    """Requests/s at which the first stage is full: what each prefill stage completes when it is never idle, over the
    share of requests that it gets."""
    rate = OVERLOAD * lambda_max
    result = _run(name, rate, count, seed, lambda what: None)
    start_s, end_s = 0.2 * count / rate, count / rate
    arrived, ttft = np.asarray(result.arrived_s), np.asarray(result.ttft_s)
    remote = np.frombuffer(bytes(result.offloaded), dtype=np.uint8)
    landed = arrived + ttft
    within = (landed >= start_s) & (landed < end_s)
    rates = []
    for side in (0, 1):
        share = float((remote == side).mean())
        if share > 0:
            rates.append(float((within & (remote == side)).sum()) / (end_s - start_s) / share)
    return min(rates)
