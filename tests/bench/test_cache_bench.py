"""The cache's bench: one tiny real round has every key and figures that can be true; none is compared with a clock."""

from __future__ import annotations

import io

from rich.console import Console

from prfaas_net.bench.cache import CachePlan, bench_cache, show

TINY = CachePlan(blocks=2000, nodes=16, prompt_tokens=4096, rounds=2, matches=4, events=100)
TIMES = {"match_ms_p50", "match_ms_p99", "match_cpu_ms_p99", "match_with_hash_ms_p50", "match_with_hash_list_ms_p50"}
RATES = {"events_per_s", "stored_events_per_s", "removed_events_per_s", "events_per_cpu_s"}


def test_the_report_has_its_keys_and_possible_figures() -> None:
    steps: list[str] = []
    report = bench_cache(TINY, steps.append)
    assert (report["blocks"], report["nodes"], report["rounds"]) == (2000, 16, 2)
    for name in TIMES | RATES:
        low, high = report["range"][name]
        assert 0 < low <= high
        assert report[name] > 0
    assert 32 < report["bytes_per_block"] < 200
    assert set(report["dictionary"]) == {"match_ms_p50", "bytes_per_block", "load_s", "drop_node_ms"}
    assert "round 2 of 2" in steps


def test_people_get_a_table() -> None:
    out = io.StringIO()
    show(bench_cache(TINY, lambda _: None), Console(file=out, width=120))
    assert "4096 tokens against 2000 blocks on 16 nodes" in out.getvalue()
    assert "bytes_per_block" in out.getvalue()
