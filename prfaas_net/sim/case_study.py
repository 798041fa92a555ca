"""The paper's case study (section 4): its workload, its hardware, and the numbers that it prints."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import orjson

from prfaas_net.scheduling import (
    DecodeProfile,
    KvSize,
    NodeProfile,
    PdCluster,
    PiecewiseLinear,
    PrfaasCluster,
    TruncatedLogNormal,
    Workload,
)
from prfaas_net.units import MiB

__all__ = ["GBPS", "paper", "paper_pd", "paper_prfaas", "paper_workload", "profile"]

GBPS = 1e9


@cache
def paper() -> dict[str, Any]:
    """What the package knows of the paper: inputs, and results to compare with."""
    body: dict[str, Any] = orjson.loads(resources.files("prfaas_net.sim").joinpath("data/paper.json").read_bytes())
    return body


@cache
def profile(hardware: str) -> NodeProfile:
    """The profile of eight ``H200`` or ``H20`` running the paper's 1T model."""
    tables, decode = paper()["profiles"], paper()["decode"]
    return NodeProfile(
        hardware,
        PiecewiseLinear.of(tables["knots_tokens"], tables[hardware]),
        DecodeProfile(decode["step_s"], decode["max_batch"]),
    )


def paper_workload(output_tokens: float | None = None, kv_factor: float = 1.0) -> Workload:
    """The case study's prompts; with another output length, or a KVCache this many times larger."""
    work, kv = paper()["workload"], paper()["kv"]
    return Workload(
        TruncatedLogNormal(work["lognormal_mu"], work["lognormal_sigma"], work["min_tokens"], work["max_tokens"]),
        output_tokens or work["output_tokens"],
        KvSize(kv["constant_mib"] * MiB * kv_factor, kv["bytes_per_token"] * kv_factor),
    )


def paper_prfaas(instances: int | None = None, egress_bps: float | None = None) -> PrfaasCluster:
    """32 H200 behind a link of 100 Gbps, or others."""
    count = paper()["fleet"]["n_prfaas"] if instances is None else instances
    return PrfaasCluster(count, profile("H200"), egress_bps or paper()["workload"]["link_gbps"] * GBPS)


def paper_pd(n_p: int | None = None, n_d: int | None = None) -> PdCluster:
    """64 H20, three instances of which prefill, or others."""
    fleet = paper()["fleet"]
    return PdCluster(fleet["n_p"] if n_p is None else n_p, fleet["n_d"] if n_d is None else n_d, profile("H20"))
