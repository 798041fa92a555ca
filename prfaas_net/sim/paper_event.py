"""``prfaas sim paper``, the event part: where the case study's fleets saturate, and TTFT with queues.

First come, first served, Poisson arrivals, no batching of prefills; KVCache is sent after the prefill, as the paper's
table 6 counts it. Because E[T(L)] exceeds T(E[L]), a fleet saturates below what the paper's formula says.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
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
REQUESTS = {"0.5": 40_000, "0.7": 80_000, "0.8": 160_000, "0.9": 1_200_000}
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
    *, scale: float = 1.0, seed: int = 1, jobs: int = 1, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Saturation points and TTFT by load.

    Args:
        scale: on the number of requests of every run.
        jobs: runs at a time; with more than one, progress is told by whole runs.
    """
    rates = paper()["expected"]["table_6"]["lambda_max"]
    counts = {load: max(2000, int(count * scale)) for load, count in REQUESTS.items()}
    # The longest runs first, so that none is left over at the end.
    runs = [(name, load, rates[name], counts[load], seed) for load in reversed(REQUESTS) for name in rates]
    runs += [(name, "", rates[name], max(2000, int(SATURATION_REQUESTS * scale)), seed) for name in rates]
    found: dict[tuple[str, str], list[float]] = {}
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            for run, figures in zip(runs, pool.map(_figures, runs), strict=True):
                found[run[:2]] = figures
                progress(f"{run[0]} at {run[1] or 'saturation'}: done")
    else:
        for run in runs:
            found[run[:2]] = _figures(run, progress)
    return {
        # The link is steady, and so the router is told what it carries: looking at it would take longer than the rest.
        "detector": False,
        "saturation_req_s": {name: found[name, ""][0] for name in rates},
        "ttft_s": {load: {name: found[name, load][:2] for name in rates} for load in REQUESTS},
        "ttft_ci95_s": {load: {name: found[name, load][2:] for name in rates} for load in REQUESTS},
    }


def _figures(run: tuple[str, str, float, int, int], progress: Callable[[str], None] = lambda what: None) -> list[float]:
    """Of one run: the rate at which it saturates, or mean, P90 and how sure both are."""
    name, load, lambda_max, count, seed = run
    if not load:
        return [_saturation(name, lambda_max, count, seed)]
    found = _run(name, float(load) * lambda_max, count, seed, progress).figures()
    return [found.mean, found.p90, found.mean_ci, found.p90_ci]


def _run(name: str, rate: float, count: int, seed: int, progress: Callable[[str], None]) -> SimResult:
    fleet, policy = system(name)
    work = paper_workload()

    def tell(done: int, seconds: float) -> None:
        progress(f"{name} at {rate:.2f} req/s: {done:,} of {count:,} requests, {seconds / 3600:.1f} h simulated")

    simulation = Simulation(fleet, policy, seed=seed, detector=False, progress=tell)
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
