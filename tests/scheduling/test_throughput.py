"""The throughput model: the paper's equations give the paper's numbers."""

from __future__ import annotations

import math
import random

import pytest

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import (
    EmpiricalLengths,
    Estimate,
    KvSize,
    NodeProfile,
    PdCluster,
    PiecewiseLinear,
    TruncatedLogNormal,
    Workload,
    kv_throughput_bps,
    solve,
    throughput,
)
from prfaas_net.sim.case_study import GBPS, paper, paper_pd, paper_prfaas, paper_workload, profile

PAPERS = Estimate.MEAN_LENGTH


def test_the_papers_optimum_is_found() -> None:
    """t = 19,400 tokens, 3 instances prefill and 5 decode, 3.24 requests/s, bound by PrfaaS compute."""
    best = solve(paper_workload(), [paper_prfaas()], [paper_pd()], estimate=PAPERS)
    assert (best.result.t_tokens, best.pd[0].prefill_instances, best.pd[0].decode_instances) == (19_400, 3, 5)
    assert best.result.lambda_max == pytest.approx(3.24, rel=0.01)
    assert best.result.bottleneck == "prfaas compute"
    found = (best.result.theta_prfaas, best.result.theta_pd_p, best.result.theta_pd_d)
    assert found == pytest.approx((1.61, 1.64, 3.91), rel=0.005)


def test_homogeneous_and_naive_fleets_carry_what_the_paper_says() -> None:
    """96 H20 split 9 : 3; 32 H200 that prefill everything."""
    alone = solve(paper_workload(), [], [PdCluster(6, 6, profile("H20"))], estimate=PAPERS)
    assert (alone.pd[0].prefill_instances, alone.pd[0].decode_instances) == (9, 3)
    assert alone.result.lambda_max == pytest.approx(2.11, rel=0.01)
    naive = throughput(paper_workload(), [paper_prfaas()], [paper_pd(0, 8)], 0, estimate=PAPERS)
    assert naive.lambda_max == pytest.approx(2.45, rel=0.01)
    assert naive.offloaded_share == 1.0


def test_mean_time_is_longer_than_the_time_of_the_mean() -> None:
    """Prefill bends upwards, so a fleet carries less than the paper's formula says: 3.161 at its own settings."""
    settings = (paper_workload(), [paper_prfaas()], [paper_pd()], 19_400)
    assert throughput(*settings).lambda_max == pytest.approx(3.161, rel=0.001)
    assert throughput(*settings, estimate=PAPERS).lambda_max == pytest.approx(3.240, rel=0.001)


def test_lengths_are_those_of_the_paper() -> None:
    """Mean, quantiles, share above t, and the mean above it."""
    lengths = paper_workload().lengths
    assert lengths.mean == pytest.approx(27_486, rel=1e-3)
    assert [lengths.quantile(u) for u in (0.5, 0.9, 0.99)] == pytest.approx([19_199, 62_410, 115_417], rel=1e-3)
    assert lengths.above(19_400) == pytest.approx(0.496, abs=0.0005)
    assert lengths.mean_above(19_400) / 1024 == pytest.approx(44, abs=0.1)


def test_kv_size_is_that_of_table_5() -> None:
    """Constant states plus rows, at the lengths that were profiled."""
    kv = paper_workload().kv
    sizes = [kv(n) / 2**20 for n in (1024, 8192, 32_000, 130_000)]
    assert sizes == pytest.approx([190.8, 308.9, 701.3, 2316.3], abs=0.06)
    assert kv_throughput_bps(kv, profile("H200"), 32_768) / GBPS == pytest.approx(3.19, rel=0.02)


def test_a_sample_answers_as_its_distribution_does() -> None:
    """Partial means of 20,000 drawn lengths agree with the formula's."""
    law = paper_workload().lengths
    rng = random.Random(5)
    sample = EmpiricalLengths([law.quantile(rng.random()) for _ in range(20_000)])
    for t in (2_000, 19_400, 60_000):
        assert sample.above(t) == pytest.approx(law.above(t), abs=0.012)
        assert sample.mean_above(t) == pytest.approx(law.mean_above(t), rel=0.02)
        assert sample.mean_below(t) == pytest.approx(law.mean_below(t), rel=0.02)
    curve = profile("H20").prefill_s
    assert sample.expect(curve) == pytest.approx(law.expect(curve), rel=0.02)
    assert len(sample) == 20_000


def test_expectation_of_a_table_is_exact() -> None:
    """The closed form agrees with a sum over many quantiles."""
    lengths, curve = paper_workload().lengths, profile("H200").prefill_s
    points = [lengths.quantile((i + 0.5) / 20_000) for i in range(20_000)]
    assert lengths.expect(curve) == pytest.approx(sum(map(curve, points)) / 20_000, rel=1e-3)
    inside = [curve(x) for x in points if 10_000 < x <= 50_000]
    assert lengths.expect(curve, 10_000, 50_000) == pytest.approx(sum(inside) / 20_000, rel=2e-3)


@pytest.mark.parametrize("row", paper()["expected"]["sweeps"]["bandwidth"], ids=lambda row: f"{row[0]}Gbps")
def test_bandwidth_sweep(row: list[float]) -> None:
    """At every egress bandwidth the best threshold and split carry what they should."""
    gbps, expected, _, n_p = row
    best = solve(paper_workload(), [paper_prfaas(egress_bps=gbps * GBPS)], [paper_pd()], estimate=PAPERS)
    assert best.result.lambda_max == pytest.approx(expected, rel=0.03)
    assert best.pd[0].prefill_instances == n_p
    assert best.result.egress_bps <= gbps * GBPS * 1.0001


@pytest.mark.parametrize("row", paper()["expected"]["sweeps"]["output_tokens"], ids=lambda row: f"{row[0]}tokens")
def test_output_length_sweep(row: list[float]) -> None:
    """Long answers make decode the bottleneck, until PrfaaS loses to as many decode-capable instances."""
    output_tokens, expected = row
    work = paper_workload(output_tokens=output_tokens)
    ours = solve(work, [paper_prfaas()], [paper_pd()], estimate=PAPERS)
    alone = solve(work, [], [PdCluster(6, 6, profile("H20"))], estimate=PAPERS)
    assert ours.result.lambda_max / alone.result.lambda_max == pytest.approx(expected, rel=0.03)


def test_two_clusters_of_each_kind_carry_twice_as_much() -> None:
    """Or a little more: two clusters can split their instances in between."""
    one = solve(paper_workload(), [paper_prfaas()], [paper_pd()])
    two = solve(paper_workload(), [paper_prfaas()] * 2, [paper_pd(), paper_pd()])
    assert 2.0 <= two.result.lambda_max / one.result.lambda_max <= 2.1
    assert sum(cluster.prefill_instances for cluster in two.pd) == 7


def test_a_fixed_split_is_kept() -> None:
    """When roles cannot change, only the threshold moves with the link."""
    slow = paper_prfaas(egress_bps=8 * GBPS)
    best = solve(paper_workload(), [slow], [paper_pd()], estimate=PAPERS, fixed_split=True)
    assert best.pd[0].prefill_instances == 3
    assert best.result.t_tokens > 19_400
    assert best.result.lambda_max > 2.1


def test_windows_stop_growing() -> None:
    """Sliding-window layers keep the last tokens only."""
    kv = KvSize(100, 2, window_bytes_per_token=10, window_tokens=50)
    assert [kv(10), kv(50), kv(1000)] == [220, 700, 2600]
    assert kv.increment(900, 1000) == 100 + 200 + 500
    assert kv.table(1000)(500) == pytest.approx(kv(500))


def test_bad_inputs_are_refused() -> None:
    """Each says what was expected."""
    with pytest.raises(ConfigError, match="two or more knots"):
        PiecewiseLinear.of([1], [2])
    with pytest.raises(ConfigError, match="rise"):
        PiecewiseLinear.of([2, 1], [2, 3])
    with pytest.raises(ConfigError, match="sigma"):
        TruncatedLogNormal(1, 0, 1, 2)
    with pytest.raises(ConfigError, match="sample"):
        EmpiricalLengths([])
    line = NodeProfile("line", PiecewiseLinear.straight(0.1, 1e-5))
    with pytest.raises(ConfigError, match="PD cluster"):
        solve(Workload(EmpiricalLengths([5]), 10, KvSize(0, 1)), [], [PdCluster(1, 0, line)])
    assert math.isclose(line.prefill_s.scaled(2)(10_000), 0.4)
