"""``prfaas plan``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from prfaas_net.scheduling import Estimate
from prfaas_net.sim.case_study import GBPS, paper
from prfaas_net.sim.catalogue import load_model, load_profile
from prfaas_net.sim.report import show_plan
from prfaas_net.sim.sizing import Sizing, default_price, parse_lengths, size
from prfaas_net.units import parse_rate

__all__ = ["plan"]

# The paper's workload.
LENGTHS = "lognormal:9.9,1.0,128,131072"


def plan(
    model: Annotated[
        str, typer.Option("--model", help="config.json, its directory, or a shipped name such as Kimi-K3 or paper-1T.")
    ],
    prefill_profile: Annotated[
        str, typer.Option("--prefill-profile", help="H200, H20 or a JSON file: one PrfaaS instance.")
    ] = "H200",
    decode_profile: Annotated[
        str, typer.Option("--decode-profile", help="H200, H20 or a JSON file: one PD instance.")
    ] = "H20",
    prefill_nodes: Annotated[int, typer.Option("--prefill-nodes", help="Instances of the PrfaaS cluster.")] = 4,
    pd_nodes: Annotated[int, typer.Option("--pd-nodes", help="Instances of the PD cluster.")] = 8,
    link: Annotated[str, typer.Option("--link", help="What the link between them carries.")] = "100Gbps",
    lengths: Annotated[
        str, typer.Option("--lengths", help="lognormal:MU,SIGMA,LOW,HIGH, fixed:TOKENS, or a trace file.")
    ] = LENGTHS,
    output_tokens: Annotated[float, typer.Option("--output-tokens", help="Mean length of an answer.")] = 1024,
    price: Annotated[
        float | None, typer.Option("--price", help="Of a PrfaaS instance, in PD instances; default: 2.02 for H200.")
    ] = None,
    kv_bytes: Annotated[int, typer.Option("--kv-bytes", help="Of one number in the KVCache: 2 or 1.")] = 2,
    papers: Annotated[
        bool, typer.Option("--paper-estimate", help="T(E[L]) as the paper has it, rather than E[T(L)].")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Can this model be prefilled in another datacenter, and does it pay?"""
    name, kv = load_model(model, kv_bytes=kv_bytes)
    long, long_source = load_profile(prefill_profile, name, kv)
    short, short_source = load_profile(decode_profile, name, kv)
    sizing = Sizing(
        name, kv, long, short, prefill_nodes, pd_nodes, parse_rate(link), parse_lengths(lengths), output_tokens,
        default_price(prefill_profile, decode_profile) if price is None else price,
        paper()["workload"]["intra_cluster_gbps"] * GBPS,
        Estimate.MEAN_LENGTH if papers else Estimate.MEAN_TIME,
    )  # fmt: skip
    report: dict[str, Any] = size(sizing)
    report["profiles"] = {"prefill": long_source, "pd": short_source}
    if as_json:
        sys.stdout.write(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        show_plan(report, Console())
