"""``prfaas sim paper``, the analytic part: the case study's numbers from the throughput model, beside those printed."""

from __future__ import annotations

from typing import Any

from prfaas_net.scheduling import (
    Estimate,
    PdCluster,
    Workload,
    cluster_egress_bps,
    kv_throughput_bps,
    solve,
    throughput,
    zero_load_ttft_s,
)
from prfaas_net.sim.case_study import GBPS, paper, paper_pd, paper_prfaas, paper_workload, profile

__all__ = ["SYSTEMS", "analytic", "relative_errors", "sweeps"]

SYSTEMS = ("prfaas_pd", "homogeneous", "naive")
PAPERS = Estimate.MEAN_LENGTH


def analytic() -> dict[str, Any]:
    """Table 6 and what follows from it, by equations 1 to 8 with T(E[L])."""
    work, numbers = paper_workload(), paper()
    ours = solve(work, [paper_prfaas()], [paper_pd()], estimate=PAPERS)
    alone = solve(work, [], [PdCluster(6, 6, profile("H20"))], estimate=PAPERS)
    naive = throughput(work, [paper_prfaas()], [paper_pd(0, 8)], 0, estimate=PAPERS)
    pd, best = ours.pd[0], ours.result
    remote_bps, local_bps = (numbers["workload"][key] * GBPS for key in ("link_gbps", "intra_cluster_gbps"))

    def ttft_s(t_tokens: float) -> list[float]:
        long, short = profile("H200"), profile("H20")
        found = zero_load_ttft_s(work, t_tokens, long=long, short=short, remote_bps=remote_bps, local_bps=local_bps)
        return list(found)

    thresholds = {"prfaas_pd": best.t_tokens, "homogeneous": float("inf"), "naive": 0.0}
    lambdas = dict(zip(SYSTEMS, (best.lambda_max, alone.result.lambda_max, naive.lambda_max), strict=True))
    return {
        "t_tokens": int(best.t_tokens),
        "n_prfaas": ours.prfaas[0].instances,
        "n_p": pd.prefill_instances,
        "n_d": pd.decode_instances,
        "homogeneous_split": [alone.pd[0].prefill_instances, alone.pd[0].decode_instances],
        "theta": {"prfaas": best.theta_prfaas, "pd_p": best.theta_pd_p, "pd_d": best.theta_pd_d},
        "lambda_max": lambdas,
        "ratios": {
            "prfaas_pd": lambdas["prfaas_pd"] / lambdas["homogeneous"],
            "naive": lambdas["naive"] / lambdas["homogeneous"],
            "over_naive": lambdas["prfaas_pd"] / lambdas["naive"],
        },
        "offloaded_share": best.offloaded_share,
        "l_long_tokens": best.l_long_tokens,
        "egress_gbps": best.egress_bps / GBPS,
        "bottleneck": best.bottleneck,
        "ttft_s": {name: ttft_s(t) for name, t in thresholds.items()},
        "lambda_max_of_mean_time": _mean_time(work),
        "phi_gbps_1t": _phi_1t(work),
        "cluster_egress_gbps": _cluster_egress(),
    }


def _mean_time(work: Workload) -> dict[str, float]:
    """The same fleets by E[T(L)]: what a simulation and a fleet can show."""
    return {
        "prfaas_pd": throughput(work, [paper_prfaas()], [paper_pd()], 19_400).lambda_max,
        "homogeneous": throughput(work, [], [PdCluster(9, 3, profile("H20"))], float("inf")).lambda_max,
        "naive": throughput(work, [paper_prfaas()], [paper_pd(0, 8)], 0).lambda_max,
        "prfaas_pd_reoptimised": solve(work, [paper_prfaas()], [paper_pd()]).result.lambda_max,
    }


def _phi_1t(work: Workload) -> list[list[float]]:
    """Table 5: [tokens, Gbps] of the paper's 1T model on H200."""
    return [
        [tokens, kv_throughput_bps(work.kv, profile("H200"), tokens) / GBPS] for tokens in (1024, 8192, 32_768, 131_072)
    ]


def _cluster_egress() -> list[dict[str, Any]]:
    """Section 2.3: equation 2 over table 3."""
    table = paper()["phi_gbps"]
    lengths = table["lengths_tokens"]
    rows = []
    for model, tokens, instances, printed in paper()["cluster_egress"]["rows"]:
        phi_gbps = table[model][lengths.index(tokens)]
        gbps = cluster_egress_bps(instances, phi_gbps * GBPS) / GBPS
        rows.append({"model": model, "tokens": tokens, "instances": instances, "gbps": gbps, "printed_gbps": printed})
    return rows


def sweeps() -> dict[str, list[dict[str, float]]]:
    """Bandwidth, PrfaaS instances, output length and a dense model, each re-optimised."""
    expected = paper()["expected"]["sweeps"]
    work = paper_workload()
    found: dict[str, list[dict[str, float]]] = {}
    found["bandwidth"] = [
        _row(work, gbps, lam, key="gbps", egress_bps=gbps * GBPS) for gbps, lam, _, _ in expected["bandwidth"]
    ]
    found["n_prfaas"] = [_row(work, n, lam, key="n_prfaas", instances=n) for n, lam in expected["n_prfaas"]]
    found["output_tokens"] = []
    for tokens, ratio in expected["output_tokens"]:
        longer = paper_workload(output_tokens=tokens)
        row = _row(longer, tokens, ratio, key="output_tokens")
        alone = solve(longer, [], [PdCluster(6, 6, profile("H20"))], estimate=PAPERS).result.lambda_max
        found["output_tokens"].append({**row, "ratio": row["lambda_max"] / alone})
    dense = paper_workload(kv_factor=18.8)
    found["dense"] = [_row(dense, gbps, lam, key="gbps", egress_bps=gbps * GBPS) for gbps, lam in expected["dense"]]
    found["fixed"] = []
    for gbps in (8, 10):
        link = paper_prfaas(egress_bps=gbps * GBPS)
        fixed = throughput(work, [link], [paper_pd()], 19_400, estimate=PAPERS).lambda_max
        found["fixed"].append({"gbps": gbps, "lambda_max": fixed, "expected": expected[f"fixed_at_{gbps}_gbps"]})
    return found


def _row(
    work: Workload, value: float, expected: float, *, key: str, instances: int | None = None,
    egress_bps: float | None = None,
) -> dict[str, float]:  # fmt: skip
    best = solve(work, [paper_prfaas(instances, egress_bps)], [paper_pd()], estimate=PAPERS)
    return {
        key: value,
        "lambda_max": best.result.lambda_max,
        "t_tokens": best.result.t_tokens,
        "n_p": best.pd[0].prefill_instances,
        "egress_gbps": best.result.egress_bps / GBPS,
        "expected": expected,
    }


def relative_errors(report: dict[str, Any]) -> dict[str, float]:
    """The largest relative error of every part against what is expected of it."""
    table, event = paper()["expected"]["table_6"], paper()["expected"]["event"]
    found, errors = report["analytic"], {}
    pairs = [(found[k], table[k]) for k in ("t_tokens", "n_p", "n_d", "offloaded_share")]
    pairs += [(found["l_long_tokens"] / 1024, table["l_long_ki"])]
    pairs += [(x, y) for x, y in zip(found["homogeneous_split"], table["homogeneous_split"], strict=True)]
    for key in ("theta", "lambda_max", "ratios"):
        pairs += [(found[key][name], printed) for name, printed in table[key].items()]
    for name in SYSTEMS:
        pairs += list(zip(found["ttft_s"][name], table["ttft_s"][name], strict=True))
    low, high = table["egress_gbps_range"]
    pairs += [(found["egress_gbps"], min(high, max(low, found["egress_gbps"])))]
    errors["analytic"] = _largest(pairs)
    rows = [row for name in report["sweeps"] for row in report["sweeps"][name]]
    errors["sweeps"] = _largest([(row.get("ratio", row["lambda_max"]), row["expected"]) for row in rows])
    if "event" in report:
        measured = report["event"]
        rates = measured["saturation_req_s"]
        errors["event_saturation"] = _largest([(rates[n], event["saturation_req_s"][n]) for n in SYSTEMS])
        for load, row in measured["ttft_s"].items():
            wanted = event["ttft_s"][load]
            pairs = [pair for n in row for pair in zip(row[n], wanted[n], strict=True)]
            errors[f"event_ttft_at_{load}"] = _largest(pairs)
    return errors


def _largest(pairs: list[tuple[float, float]]) -> float:
    return max(abs(found / wanted - 1.0) for found, wanted in pairs)
