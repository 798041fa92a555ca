"""``prfaas sim compare``: every policy on the same arrivals, over workloads, links and loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import (
    DEFAULT_POLICY,
    EmpiricalLengths,
    PolicySettings,
    Workload,
    make_policy,
    policy_names,
    solve,
)
from prfaas_net.sim.case_study import GBPS, paper, paper_pd, paper_prfaas, paper_workload
from prfaas_net.sim.fleet import bursty, drop, steady
from prfaas_net.sim.paper_event import paper_fleet
from prfaas_net.sim.requests import (
    SimRequest,
    at_rate,
    mooncake_conversation,
    poisson,
    read_trace,
    uncached_tokens,
    with_jitter,
)
from prfaas_net.sim.result import SimResult
from prfaas_net.sim.simulation import Simulation

__all__ = ["LINKS", "LOADS", "ORACLE", "WORKLOADS", "Cell", "compare", "run_cell"]

# ``threshold`` with a ``t`` that is re-optimised in the very moment in which the link drops and recovers: an oracle,
# since nobody tells a gateway so soon. It is run on links that drop.
ORACLE = "threshold-oracle"
WORKLOADS = ("paper", "mooncake-conversation")
LINKS = ("steady", "drop", "bursty")
LOADS = (0.5, 0.7, 0.8, 0.9)
PAPER_REQUESTS = 20_000
# A first token later than this does not count as good: about the P99 of the case study at half its load.
TTFT_LIMIT_S = 10.0
# The link of ``drop``: 8 Gbps for a minute, every 400 s, so that a run sees many of them.
DROP_BPS, DROP_FIRST_S, DROP_EVERY_S, DROP_FOR_S = 8 * GBPS, 200.0, 400.0, 60.0
# Of a drop's throughput: what still lands of the time before it is not counted.
DROP_SETTLE_S = 2.0
# The link of ``bursty``: cross traffic leaves this much while it is on.
BURST_BPS, BURST_ON_S, BURST_OFF_S = 10 * GBPS, 20.0, 60.0
RTT_S = 0.02
# The trace's clock ticks every 3 s.
MOONCAKE_TICK_S = 3.0


@dataclass(frozen=True)
class Cell:
    """One row: a policy on a workload, a link and a load.

    Attributes:
        load: share of what the fleet carries of this workload with the best threshold.
        requests: at most so many; a trace is cut there.
        trace: a file, where the workload is none of those that come with the package.
        jitter: whether the ticks of Mooncake's clock are spread out.
        pipelined: whether a layer's KVCache leaves while the next one computes.
        detector: whether the router hears of the link from the congestion detector; else it is told the truth.
    """

    workload: str
    link: str
    load: float
    policy: str
    requests: int = PAPER_REQUESTS
    seed: int = 1
    trace: str | None = None
    jitter: bool = True
    pipelined: bool = True
    detector: bool = True


@dataclass(frozen=True)
class _Case:
    """A workload on the case study's hardware: what it can carry, and the threshold that carries it."""

    work: Workload
    lambda_max: float
    t_tokens: int
    requests: tuple[SimRequest, ...]


@cache
def _case(workload: str, trace: str | None, jitter: bool, seed: int) -> _Case:
    if workload == "paper":
        # The printed throughput, so that loads are those of the paper.
        printed = paper()["expected"]["table_6"]["lambda_max"]["prfaas_pd"]
        return _Case(paper_workload(), printed, paper()["fleet"]["t_tokens"], ())
    if trace is not None:
        requests = read_trace(Path(trace))
    elif workload == "mooncake-conversation":
        requests = mooncake_conversation()
    else:
        raise ConfigError(
            "unknown workload", expected=f"one of {', '.join(WORKLOADS)}, or a trace file", found=workload
        )
    if jitter and workload.startswith("mooncake"):
        requests = with_jitter(requests, MOONCAKE_TICK_S, seed)
    mean_output = sum(r.output_tokens for r in requests) / len(requests)
    work = Workload(EmpiricalLengths(uncached_tokens(requests)), mean_output, paper_workload().kv)
    best = solve(work, [paper_prfaas()], [paper_pd()], fixed_split=True).result
    return _Case(work, best.lambda_max, int(best.t_tokens), tuple(requests))


def _steps(link: str, until_s: float, seed: int) -> tuple[tuple[float, float], ...]:
    full_bps = paper()["workload"]["link_gbps"] * GBPS
    if link == "steady":
        return steady(full_bps)
    if link == "drop":
        return drop(full_bps, DROP_BPS, at_s=_drops(until_s), for_s=DROP_FOR_S)
    if link == "bursty":
        return bursty(full_bps, BURST_BPS, on_s=BURST_ON_S, off_s=BURST_OFF_S, until_s=until_s, seed=seed)
    raise ConfigError("unknown kind of link", expected=f"one of {', '.join(LINKS)}", found=link)


def _drops(until_s: float) -> list[float]:
    count = max(1, int((until_s - DROP_FIRST_S - DROP_FOR_S) / DROP_EVERY_S) + 1)
    return [DROP_FIRST_S + i * DROP_EVERY_S for i in range(count)]


def run_cell(cell: Cell) -> tuple[dict[str, Any], SimResult]:
    """Simulate one row."""
    case = _case(cell.workload, cell.trace, cell.jitter, cell.seed)
    rate = cell.load * case.lambda_max
    requests: Iterator[SimRequest] | Sequence[SimRequest]
    if case.requests:
        requests = at_rate(case.requests[: cell.requests], rate)
        count = len(requests)
    else:
        count = cell.requests
        requests = poisson(
            case.work.lengths, int(case.work.output_tokens), rate_req_s=rate, count=count, seed=cell.seed
        )
    span_s = count / rate
    n_p, n_d = paper()["fleet"]["n_p"], paper()["fleet"]["n_d"]
    fleet = paper_fleet(
        paper()["fleet"]["n_prfaas"], n_p, n_d, pipelined=cell.pipelined, steps=_steps(cell.link, span_s, cell.seed),
        rtt_s=RTT_S,
    )  # fmt: skip
    # Cross traffic queues; a link that drops is just thinner.
    links = tuple(replace(spec, rivals=cell.link == "bursty") for spec in fleet.links)
    fleet = replace(fleet, cached=bool(case.requests), links=links)
    settings = PolicySettings(case.t_tokens, Random(cell.seed))
    name = "threshold" if cell.policy == ORACLE else cell.policy
    simulation = Simulation(fleet, make_policy(name, settings), seed=cell.seed, detector=cell.detector)
    if cell.policy == ORACLE:
        _foresee_drops(simulation, case, span_s)
    result = simulation.run(requests)
    found = result.figures(ttft_limit_s=TTFT_LIMIT_S)
    row: dict[str, Any] = {
        "workload": cell.workload, "link": cell.link, "load": cell.load, "policy": cell.policy,
        "ttft_mean_s": found.mean, "ttft_mean_ci95_s": found.mean_ci, "ttft_p90_s": found.p90,
        "ttft_p99_s": found.p99, "goodput_req_s": found.goodput_req_s, "throughput_req_s": found.throughput_req_s,
        "offloaded_share": found.offloaded_share, "link_use": found.link_use, "lost": result.lost,
        "prediction_error_s": found.prediction_error_s, "offered_req_s": rate, "requests": found.requests,
        "detector": cell.detector,
    }  # fmt: skip
    if cell.link == "drop":
        row |= _through_drops(result, case, rate, span_s)
    return row, result


def _foresee_drops(simulation: Simulation, case: _Case, span_s: float) -> None:
    thin = solve(case.work, [paper_prfaas(egress_bps=DROP_BPS)], [paper_pd()], fixed_split=True).result.t_tokens
    for at_s in _drops(span_s):
        simulation.loop.at(at_s, simulation.set_threshold, int(thin))
        simulation.loop.at(at_s + DROP_FOR_S, simulation.set_threshold, case.t_tokens)


def _through_drops(result: SimResult, case: _Case, rate: float, span_s: float) -> dict[str, float]:
    """Throughput while the link is thin, beside what the best threshold for that link carries, roles as they are."""
    starts = [at for at in _drops(span_s) if at + DROP_FOR_S <= span_s]
    landed = sum(result.landed_between(at + DROP_SETTLE_S, at + DROP_FOR_S) for at in starts)
    seconds = max(1e-9, len(starts) * (DROP_FOR_S - DROP_SETTLE_S))
    thin = [paper_prfaas(egress_bps=DROP_BPS)]
    kept_roles = solve(case.work, thin, [paper_pd()], fixed_split=True).result.lambda_max
    free_roles = solve(case.work, thin, [paper_pd()]).result.lambda_max
    return {
        "drop_throughput_req_s": landed / seconds,
        "drop_oracle_req_s": min(rate, kept_roles),
        "drop_oracle_new_roles_req_s": min(rate, free_roles),
    }


def compare(
    cells: Sequence[Cell], *, jobs: int = 1, progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Run all cells, ``jobs`` at a time, and judge the default policy against ``threshold``."""
    rows = []
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            for i, (row, _) in enumerate(pool.map(run_cell, cells)):
                rows.append(row)
                progress(_line(row, i + 1, len(cells)))
    else:
        for i, cell in enumerate(cells):
            rows.append(run_cell(cell)[0])
            progress(_line(rows[-1], i + 1, len(cells)))
    return {"rows": rows, "default_policy": DEFAULT_POLICY, "against_threshold": against_threshold(rows)}


def against_threshold(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Default over threshold, cell by cell: below 1 is better."""
    at = {(r["workload"], r["link"], r["load"], r["policy"]): r for r in rows}
    found = []
    for (workload, link, load, policy), ours in at.items():
        theirs = at.get((workload, link, load, "threshold"))
        if policy == DEFAULT_POLICY and theirs is not None:
            ratios = {f"{k}_ratio": ours[f"ttft_{k}_s"] / theirs[f"ttft_{k}_s"] for k in ("mean", "p90", "p99")}
            found.append({"workload": workload, "link": link, "load": load, **ratios})
    return found


def cells(
    workloads: Sequence[str] = WORKLOADS, links: Sequence[str] = LINKS, loads: Sequence[float] = LOADS,
    policies: Sequence[str] | None = None, **settings: Any,
) -> list[Cell]:  # fmt: skip
    """Every combination."""
    return [
        Cell(workload, link, load, policy, **settings)
        for workload in workloads
        for link in links
        for load in loads
        for policy in policies or [*policy_names(), *([ORACLE] if link == "drop" else [])]
    ]


def _line(row: dict[str, Any], done: int, total: int) -> str:
    return (
        f"{done} of {total}: {row['workload']}, {row['link']} link, load {row['load']}, {row['policy']}: "
        f"mean {row['ttft_mean_s']:.2f} s, P90 {row['ttft_p90_s']:.2f} s"
    )
