"""``prfaas plan``: can this model be prefilled in another datacenter, and does it pay?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import (
    EmpiricalLengths,
    Estimate,
    KvSize,
    LengthDistribution,
    NodeProfile,
    PdCluster,
    PrfaasCluster,
    Throughput,
    TruncatedLogNormal,
    Workload,
    kv_throughput_bps,
    solve,
    throughput,
    zero_load_ttft_s,
)
from prfaas_net.sim.case_study import GBPS, paper
from prfaas_net.sim.requests import read_trace, uncached_tokens

__all__ = ["Sizing", "default_price", "parse_lengths", "size"]

LENGTHS_TOKENS = (1024, 8192, 32_768, 131_072)
# How finely the points of break-even are found.
BREAK_EVEN_STEPS = 24
# Largest output length that is asked about.
LONGEST_OUTPUT_TOKENS = 1 << 17


@dataclass(frozen=True)
class Sizing:
    """A fleet that somebody thinks of.

    Attributes:
        prefill, pd: profiles of an instance of the PrfaaS and of the PD cluster.
        price: of a PrfaaS instance, in PD instances.
        local_bps: inside the PD cluster.
    """

    model: str
    kv: KvSize
    prefill: NodeProfile
    pd: NodeProfile
    n_prfaas: int
    n_pd: int
    link_bps: float
    lengths: LengthDistribution
    output_tokens: float
    price: float
    local_bps: float
    estimate: Estimate = Estimate.MEAN_TIME

    @property
    def work(self) -> Workload:
        return Workload(self.lengths, self.output_tokens, self.kv)

    @property
    def prfaas_cluster(self) -> PrfaasCluster:
        return PrfaasCluster(self.n_prfaas, self.prefill, self.link_bps)


def parse_lengths(text: str) -> LengthDistribution:
    """``lognormal:MU,SIGMA,SHORTEST,LONGEST``, ``fixed:TOKENS``, or a trace file.

    Raises:
        ConfigError: it is none of these.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            mu, sigma, low, high = (float(part) for part in rest.split(","))
            return TruncatedLogNormal(mu, sigma, low, high)
        if kind == "fixed":
            return EmpiricalLengths([float(rest)])
    except ValueError:
        pass
    else:
        if Path(text).exists():
            return EmpiricalLengths(uncached_tokens(read_trace(Path(text))))
    raise ConfigError(
        "not a distribution of lengths",
        expected="lognormal:MU,SIGMA,SHORTEST,LONGEST, fixed:TOKENS, or a trace (.jsonl, .csv)",
        found=repr(text),
    )


def size(sizing: Sizing) -> dict[str, Any]:
    """Everything that ``prfaas plan`` says."""
    if sizing.n_pd < 2 or sizing.n_prfaas < 1:
        raise ConfigError(
            "a fleet needs one PrfaaS instance or more, and two PD instances or more",
            found=f"{sizing.n_prfaas} and {sizing.n_pd}",
        )
    work = sizing.work
    best = solve(work, [sizing.prfaas_cluster], [_split(sizing.n_pd, sizing)], estimate=sizing.estimate)
    pd = best.pd[0]
    count = sizing.n_prfaas + sizing.n_pd
    same_cost = int(sizing.n_prfaas * sizing.price + sizing.n_pd)
    alone, priced = (_alone(sizing, n) for n in (count, same_cost))
    # Everything is prefilled remotely; every PD instance decodes.
    naive_pd = PdCluster(0, sizing.n_pd, sizing.pd)
    naive = throughput(work, [sizing.prfaas_cluster], [naive_pd], 0, estimate=sizing.estimate)
    rate = best.result.lambda_max
    report: dict[str, Any] = {
        "model": sizing.model,
        "kv": _kv(sizing),
        "best": _described(best.result, sizing) | {"n_p": pd.prefill_instances, "n_d": pd.decode_instances},
        "homogeneous": alone | {"instances": count},
        "homogeneous_equal_cost": priced | {"instances": same_cost},
        "naive": _described(naive, sizing) | {"n_p": 0, "n_d": sizing.n_pd},
        "ratios": {
            "equal_count": rate / alone["lambda_max"],
            "equal_cost": rate / priced["lambda_max"],
            "over_naive": rate / naive.lambda_max,
        },
        "required_egress_gbps": best.result.egress_bps / GBPS,
        "link_gbps": sizing.link_bps / GBPS,
        "naive_egress_gbps": _wanted_egress_bps(sizing) / GBPS,
        "breaks_even": _break_even(sizing),
    }
    report["verdict"] = _verdict(report)
    return report


def _split(instances: int, sizing: Sizing) -> PdCluster:
    return PdCluster(1, instances - 1, sizing.pd)


def _alone(sizing: Sizing, instances: int) -> dict[str, Any]:
    """PD instances only, in their best split."""
    best = solve(sizing.work, [], [_split(instances, sizing)], estimate=sizing.estimate)
    split = {"n_p": best.pd[0].prefill_instances, "n_d": best.pd[0].decode_instances}
    return _described(best.result, sizing) | split


def _described(result: Throughput, sizing: Sizing) -> dict[str, Any]:
    def ttft_s(pipelined: bool) -> list[float]:
        found = zero_load_ttft_s(
            sizing.work, result.t_tokens, long=sizing.prefill, short=sizing.pd, remote_bps=sizing.link_bps,
            local_bps=sizing.local_bps, pipelined=pipelined,
        )  # fmt: skip
        return list(found)

    return {
        "lambda_max": result.lambda_max,
        "t_tokens": None if math.isinf(result.t_tokens) else int(result.t_tokens),
        "offloaded_share": result.offloaded_share,
        "bottleneck": result.bottleneck,
        "egress_gbps": result.egress_bps / GBPS,
        "ttft_s": ttft_s(False),
        "ttft_pipelined_s": ttft_s(True),
    }


def _kv(sizing: Sizing) -> dict[str, Any]:
    kv = sizing.kv
    rows = [
        {
            "tokens": tokens,
            "kv_bytes": round(kv(tokens)),
            "prefill_s": sizing.prefill.prefill_s(tokens),
            "phi_gbps": kv_throughput_bps(kv, sizing.prefill, tokens) / GBPS,
        }
        for tokens in LENGTHS_TOKENS
    ]
    return {
        "constant_bytes": round(kv.constant_bytes),
        "bytes_per_token": round(kv.bytes_per_token),
        "window_bytes_per_token": round(kv.window_bytes_per_token),
        "window_tokens": kv.window_tokens,
        "rows": rows,
    }


def _wanted_egress_bps(sizing: Sizing) -> float:
    """What the PrfaaS cluster would send if it prefilled everything and no link held it back (equation 2)."""
    unheld = replace(sizing, link_bps=1e18)
    return throughput(unheld.work, [unheld.prfaas_cluster], [PdCluster(0, 10**6, sizing.pd)], 0).egress_bps


def _break_even(sizing: Sizing) -> dict[str, float | None]:
    """The thinnest link and the longest mean output at which it still carries as much as equally many PD instances."""
    count = sizing.n_prfaas + sizing.n_pd

    def gain(link_bps: float, output_tokens: float) -> float:
        asked = replace(sizing, link_bps=link_bps, output_tokens=output_tokens)
        ours = solve(asked.work, [asked.prfaas_cluster], [_split(asked.n_pd, asked)], estimate=asked.estimate)
        return ours.result.lambda_max / float(_alone_rate(asked, count))

    link = _bisect(lambda bps: gain(bps, sizing.output_tokens) >= 1.0, 1e6, 10e12)
    output = _bisect(lambda tokens: gain(sizing.link_bps, tokens) < 1.0, sizing.output_tokens, LONGEST_OUTPUT_TOKENS)
    return {"link_gbps": None if link is None else link / GBPS, "output_tokens": output}


def _alone_rate(sizing: Sizing, instances: int) -> float:
    best = solve(sizing.work, [], [_split(instances, sizing)], estimate=sizing.estimate)
    return best.result.lambda_max


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Where ``holds`` begins, on a logarithmic scale; None if it does not by ``high``."""
    if not holds(high):
        return None
    if holds(low):
        return low
    for _ in range(BREAK_EVEN_STEPS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _verdict(report: dict[str, Any]) -> dict[str, Any]:
    """Whether it pays, and why."""
    ratios, best = report["ratios"], report["best"]
    share = report["required_egress_gbps"] / report["link_gbps"]
    reasons = [
        f"at equal count it carries {ratios['equal_count']:.2f} times, at equal cost {ratios['equal_cost']:.2f} times "
        "what PD instances alone do",
        f"{best['bottleneck']} binds; the link is used to {share:.0%}",
    ]
    if report["naive_egress_gbps"] > report["link_gbps"]:
        reasons.append(
            f"to prefill everything remotely would take {report['naive_egress_gbps']:.0f} Gbps: only a part of the "
            "requests can go"
        )
    break_even = report["breaks_even"]["link_gbps"]
    if break_even is not None:
        reasons.append(f"at equal count it pays from {break_even:.1f} Gbps on")
    return {"feasible": ratios["equal_count"] > 1.0, "pays": ratios["equal_cost"] > 1.0, "reasons": reasons}


def default_price(prefill: str, pd: str) -> float:
    """Of an instance of one kind in those of the other; 1 where it is not known."""
    prices = paper()["prices"]
    return float(prices.get(prefill, 1.0)) / float(prices.get(pd, 1.0))
