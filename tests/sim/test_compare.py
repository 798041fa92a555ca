"""Comparisons of policies: rows have their keys, and the default is the better one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import DEFAULT_POLICY
from prfaas_net.sim.compare import ORACLE, Cell, cells, compare, run_cell
from prfaas_net.sim.requests import mooncake_conversation, uncached_tokens

ROW_KEYS = {
    "workload", "link", "load", "policy", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "goodput_req_s",
    "offloaded_share",
}  # fmt: skip


def test_the_shipped_trace_is_the_published_one() -> None:
    """12,031 requests, as many blocks as tokens need, and the reuse that its authors report."""
    requests = mooncake_conversation()
    assert len(requests) == 12_031
    assert all(len(r.block_ids) == -(-r.prompt_tokens // 512) for r in requests)
    computed, total = sum(uncached_tokens(requests)), sum(r.prompt_tokens for r in requests)
    assert 1 - computed / total == pytest.approx(0.374, abs=0.003)


@pytest.mark.parametrize("link", ["steady", "drop", "bursty"])
def test_the_default_policy_beats_the_threshold_on_the_same_arrivals(link: str) -> None:
    """At 0.8 load its mean is a tenth lower at least, and its P90 and P99 are no worse."""
    report = compare(cells(["paper"], [link], [0.8], ["threshold", DEFAULT_POLICY], requests=3000))
    assert all(row.keys() >= ROW_KEYS for row in report["rows"])
    (against,) = report["against_threshold"]
    assert against["mean_ratio"] < 0.9
    assert against["p90_ratio"] < 1.02 and against["p99_ratio"] < 1.02


def test_a_conversation_trace_runs_with_its_reuse() -> None:
    """Prompts share prefixes, so that fewer tokens are computed than there are."""
    row, result = run_cell(Cell("mooncake-conversation", "steady", 0.7, DEFAULT_POLICY, requests=1500))
    assert result.finished == 1500 and row["lost"] == 0
    assert 0 < row["offloaded_share"] < 1


def test_through_a_drop_of_the_link_throughput_is_kept() -> None:
    """At least 0.95 of what the best threshold for the thin link carries with the same roles."""
    row, _ = run_cell(Cell("paper", "drop", 0.9, DEFAULT_POLICY, requests=3000))
    assert row["drop_throughput_req_s"] > 0.95 * row["drop_oracle_req_s"]


def test_an_oracle_that_foresees_the_drops_is_no_better() -> None:
    """A threshold re-optimised in the very moment of every change lands no more, and has a longer mean."""
    report = compare(cells(["paper"], ["drop"], [0.8], [ORACLE, DEFAULT_POLICY], requests=2500))
    oracle, ours = report["rows"]
    assert ours["drop_throughput_req_s"] > 0.95 * oracle["drop_throughput_req_s"]
    assert ours["ttft_mean_s"] < oracle["ttft_mean_s"]


def test_a_trace_of_ones_own_is_compared_too(tmp_path: Path) -> None:
    """Azure's format, by its path."""
    path = tmp_path / "mine.csv"
    rows = [f"2024-01-01 00:{i // 60:02d}:{i % 60:02d}.0,{1000 + 300 * (i % 50)},20" for i in range(600)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    row, result = run_cell(Cell("mine.csv", "steady", 0.5, "threshold", trace=str(path)))
    assert result.finished == 600 and row["ttft_mean_s"] > 0


def test_what_is_unknown_is_named() -> None:
    """Workloads and links."""
    with pytest.raises(ConfigError, match="mooncake-conversation"):
        run_cell(Cell("nothing", "steady", 0.5, "local"))
    with pytest.raises(ConfigError, match="bursty"):
        run_cell(replace(Cell("paper", "wobbly", 0.5, "local"), requests=10))


def test_field_64_a_cost_that_is_weighed_beats_a_filter_that_is_not() -> None:
    """Only here, or only there, whatever waits: both narrow the choice, and both have the longer mean."""
    report = compare(cells(["paper"], ["steady"], [0.8], ["local", "remote", DEFAULT_POLICY], requests=400))
    here, there, weighed = (row["ttft_mean_s"] for row in report["rows"])
    assert weighed < 0.8 * min(here, there)
