"""The gateway's bench: one tiny real round has every key, and every server answers what the node does."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from prfaas_net.bench.front_ends import router_version
from prfaas_net.bench.gateway import GatewayPlan, Shot, bench_gateway, show_gateway
from prfaas_net.bench.instant_node import MAX_BURST_TOKENS
from prfaas_net.bench.processes import Child
from prfaas_net.cli.models import load_tokenizer
from prfaas_net.errors import PeerError

SHOTS = (
    Shot(32, 16, streamed=False),
    Shot(32, 16, streamed=True),
    Shot(600, 4, streamed=False, as_ids=True),
    Shot(32, MAX_BURST_TOKENS + 1, streamed=True),
)
TINY = GatewayPlan(SHOTS, rounds=1, paired_calls=2, connections=2, busy_s=0.05)


def test_a_tiny_run_has_every_key_and_figures_that_can_be_true() -> None:
    """Short and long, as text and as ids, whole and streamed, in one write and a token at a time."""
    report = bench_gateway(TINY, load_tokenizer(None), router_python="python-that-is-not-there")
    assert report.keys() >= {"overhead_ms_p50", "overhead_ms_p99", "requests_per_s", "vllm_router", "cores", "rows"}
    assert report["vllm_router"] is None
    assert any("vllm-router is not installed" in note for note in report["notes"])
    assert [(row["server"], row["prompt_tokens"], row["streamed"]) for row in report["rows"]] == [
        (server, shot.prompt_tokens, shot.streamed) for shot in SHOTS for server in ("prfaas", "prfaas, vllm")
    ]
    for row in report["rows"]:
        assert row["rounds"] == 1
        assert row["overhead_ms_p50"] <= row["overhead_ms_p99"]
        assert row["direct_ms_p50"] > 0 and row["requests_per_s"] > 0 and row["cpu_ms_per_request"] >= 0
    out = StringIO()
    show_gateway(report, Console(file=out, width=200))
    assert "600 ids" in out.getvalue() and "33 streamed" in out.getvalue()


def test_an_interpreter_without_a_router_has_no_version_of_it() -> None:
    """Neither has one that is not there."""
    assert router_version("python-that-is-not-there") is None


def test_a_front_end_that_refuses_ends_the_run_with_its_answer() -> None:
    """A bench never measures how fast an error is."""
    with (
        Child("prfaas_net.bench.instant_node") as node,
        Child("prfaas_net.bench.http_load") as load,
    ):
        port = node.ask("start", token_ids=[1], texts=["x"], vocab_size=9, max_model_tokens=99)["ports"][0]
        with pytest.raises(PeerError, match="404 Not Found"):
            load.ask("in_turn", ports=[port], path="/nowhere", body="{}", n=1)
        # It still answers: what failed was the call.
        assert "xxx" in load.ask("once", port=port, path="/v1/completions", body='{"max_tokens": 3}')["answer"]
