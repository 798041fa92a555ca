"""The throughput model of the paper (arXiv:2604.15039, section 3.4, equations 1 to 8), and its solver.

Two estimates of the time that a mix of prompts takes stand side by side. The paper replaces every offloaded
request by one of mean length, ``T(E[L])``; a node really works ``E[T(L)]`` on average, which is more where T bends
upwards. Plans for a real fleet use the second; the first is there to reproduce the paper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling.lengths import LengthDistribution
from prfaas_net.scheduling.profiles import KvSize, NodeProfile

__all__ = [
    "Estimate",
    "PdCluster",
    "PrfaasCluster",
    "Solution",
    "Throughput",
    "Workload",
    "cluster_egress_bps",
    "kv_throughput_bps",
    "solve",
    "throughput",
]

# The paper's optimum is found to the hundred: 19,400 (PAPER.md does not print a grid; 100 reproduces it).
T_STEP_TOKENS = 100
# Coarse steps that are looked at before the fine ones around the best of them.
COARSE_STEPS = 48


class Estimate(StrEnum):
    """Which time stands for a mix of lengths."""

    MEAN_LENGTH = "T(E[L])"  # the paper's
    MEAN_TIME = "E[T(L)]"  # what a simulation and a fleet show


@dataclass(frozen=True)
class Workload:
    """What is served.

    Attributes:
        lengths: of the incremental (uncached) prompt, in tokens.
        output_tokens: mean output length, L_out.
        kv: S_kv(l) of the model.
    """

    lengths: LengthDistribution
    output_tokens: float
    kv: KvSize


@dataclass(frozen=True)
class PrfaasCluster:
    """A cluster that only prefills: ``instances`` of one profile behind a link of ``egress_bps``."""

    instances: int
    profile: NodeProfile
    egress_bps: float
    name: str = "prfaas"


@dataclass(frozen=True)
class PdCluster:
    """A local cluster: N_p instances prefill, N_d decode.

    Attributes:
        fixed_prefill, fixed_decode: how many of those cannot change their role.
    """

    prefill_instances: int
    decode_instances: int
    profile: NodeProfile
    name: str = "pd"
    fixed_prefill: int = 0
    fixed_decode: int = 0

    @property
    def instances(self) -> int:
        return self.prefill_instances + self.decode_instances


@dataclass(frozen=True)
class Throughput:
    """What a fleet carries at a threshold, in requests/s.

    Attributes:
        theta_prfaas, theta_pd_p, theta_pd_d: stages of equations 3 to 5, summed over clusters.
        lambda_max: equation 6.
        offloaded_share: p = P(L > t).
        l_long_tokens, l_short_tokens: mean lengths on both sides of ``t``.
        egress_bps: over all links, when ``lambda_max`` is served.
        bottleneck: the stage that binds: ``prfaas compute``, ``prfaas egress``, ``pd prefill`` or ``pd decode``.
    """

    t_tokens: float
    theta_prfaas: float
    theta_pd_p: float
    theta_pd_d: float
    lambda_max: float
    offloaded_share: float
    l_long_tokens: float
    l_short_tokens: float
    egress_bps: float
    bottleneck: str


@dataclass(frozen=True)
class Solution:
    """The best threshold and the best prefill:decode split of every PD cluster."""

    prfaas: tuple[PrfaasCluster, ...]
    pd: tuple[PdCluster, ...]
    result: Throughput


def kv_throughput_bps(kv: KvSize, profile: NodeProfile, tokens: float) -> float:
    """Equation 1: Phi_kv(l) = S_kv(l) / T_prefill(l) of one instance, in bits/s."""
    return 8.0 * kv(tokens) / profile.prefill_s(tokens)


def cluster_egress_bps(instances: float, phi_bps: float) -> float:
    """Equation 2: what ``instances`` send when all of them prefill at this length, in bits/s."""
    return instances * phi_bps


def _mean_time_s(work: Workload, profile: NodeProfile, low: float, high: float, estimate: Estimate) -> float:
    """Seconds an instance takes for a prompt with ``low < L <= high``."""
    lengths = work.lengths
    mass = lengths.below(high) - lengths.below(low)
    if mass <= 0:
        return math.inf
    if estimate is Estimate.MEAN_LENGTH:
        return profile.prefill_s((lengths.moment_below(high) - lengths.moment_below(low)) / mass)
    return lengths.expect(profile.prefill_s, low, high) / mass


def _mean_kv_bits(work: Workload, low: float, high: float) -> float:
    """Bits that a prompt with ``low < L <= high`` sends on average."""
    lengths = work.lengths
    mass = lengths.below(high) - lengths.below(low)
    table = work.kv.table(max(2.0, lengths.support[1]))
    return 8.0 * lengths.expect(table, low, high) / mass if mass > 0 else 0.0


def throughput(
    work: Workload,
    prfaas: Sequence[PrfaasCluster],
    pd: Sequence[PdCluster],
    t_tokens: float,
    *,
    estimate: Estimate = Estimate.MEAN_TIME,
) -> Throughput:
    """Equations 3 to 6 at one threshold; with ``t`` below every length, everything is offloaded.

    Several clusters of a kind add up: the router keeps them equally loaded, and PD clusters help each other out
    over fabrics that are taken never to bind (the paper's assumption within one cluster).
    """
    lengths, inf = work.lengths, math.inf
    p = lengths.above(t_tokens)
    bits = _mean_kv_bits(work, t_tokens, inf)
    compute = egress = 0.0
    theta_prfaas = 0.0
    for cluster in prfaas:
        if cluster.instances and p > 0:
            by_compute = cluster.instances / _mean_time_s(work, cluster.profile, t_tokens, inf, estimate)
            by_egress = cluster.egress_bps / bits
            theta_prfaas += min(by_compute, by_egress)
            compute, egress = compute + by_compute, egress + by_egress
    theta_p = sum(
        c.prefill_instances / _mean_time_s(work, c.profile, -inf, t_tokens, estimate)
        for c in pd
        if c.prefill_instances and p < 1
    )
    theta_d = sum(_decode_rate(work, c) for c in pd)
    limits = {"prfaas": theta_prfaas / p if p > 0 else inf, "pd decode": theta_d}
    limits["pd prefill"] = theta_p / (1 - p) if p < 1 else inf
    stage = min(limits, key=lambda name: limits[name])
    bound = limits[stage]
    if stage == "prfaas":
        stage = "prfaas compute" if compute <= egress else "prfaas egress"
    return Throughput(
        t_tokens, theta_prfaas, theta_p, theta_d, bound, p, lengths.mean_above(t_tokens), lengths.mean_below(t_tokens),
        bound * p * bits, stage,
    )  # fmt: skip


def _decode_rate(work: Workload, cluster: PdCluster) -> float:
    """Equation 5, requests/s."""
    decode = cluster.profile.decode
    if decode is None:
        return 0.0
    return cluster.decode_instances * decode.max_batch / (decode.step_s * work.output_tokens)


def _splits(cluster: PdCluster, least_prefill: int) -> Iterable[PdCluster]:
    total = cluster.instances
    least, most = max(least_prefill, cluster.fixed_prefill), total - max(1, cluster.fixed_decode)
    if least > most:
        yield cluster  # there is nothing to choose
    for n_p in range(least, most + 1):
        yield replace(cluster, prefill_instances=n_p, decode_instances=total - n_p)


def solve(
    work: Workload,
    prfaas: Sequence[PrfaasCluster],
    pd: Sequence[PdCluster],
    *,
    estimate: Estimate = Estimate.MEAN_TIME,
    step_tokens: int = T_STEP_TOKENS,
    fixed_split: bool = False,
    least_prefill: int = 1,
) -> Solution:
    """Equations 7 and 8 by a grid over ``t`` and over every PD cluster's N_p : N_d.

    Along ``t`` the limits of PrfaaS rise and those of PD-P fall (paper, section 3.4), so that the best is found
    coarsely first and then step by step around it. Of equal answers the smallest egress wins.

    Args:
        fixed_split: keep the splits that are given and choose only ``t``.
        least_prefill: instances that prefill in every PD cluster, whatever else: it serves end to end when the
            PrfaaS cluster is away.

    Raises:
        ConfigError: no PD cluster, or none with two instances.
    """
    if not pd or not any(c.instances >= 2 or fixed_split for c in pd):
        raise ConfigError("a fleet needs a PD cluster with two or more instances", found=f"{len(pd)} PD clusters")
    choices = [[c] if fixed_split else list(_splits(c, least_prefill)) for c in pd]
    best: Solution | None = None
    for split in itertools.product(*choices):
        result = _best_threshold(work, prfaas, split, estimate, step_tokens)
        if best is None or _rank(result) > _rank(best.result):
            best = Solution(tuple(prfaas), tuple(split), result)
    assert best is not None
    return best


def _rank(result: Throughput) -> tuple[float, float]:
    return (round(result.lambda_max, 9), -result.egress_bps)


def _best_threshold(
    work: Workload, prfaas: Sequence[PrfaasCluster], pd: Sequence[PdCluster], estimate: Estimate, step: int
) -> Throughput:
    low, high = work.lengths.support
    if not any(c.instances for c in prfaas):
        return throughput(work, prfaas, pd, math.inf, estimate=estimate)
    everything = math.floor((low - 1) / step) * step
    steps = math.ceil((high - everything) / step)
    if not any(c.prefill_instances for c in pd):
        return throughput(work, prfaas, pd, everything, estimate=estimate)
    stride = max(1, steps // COARSE_STEPS)

    def at(i: int) -> Throughput:
        return throughput(work, prfaas, pd, everything + i * step, estimate=estimate)

    coarse = max(range(0, steps + 1, stride), key=lambda i: _rank(at(i)))
    fine = range(max(0, coarse - stride), min(steps, coarse + stride) + 1)
    return max((at(i) for i in fine), key=_rank)
