"""Workloads: traces in their own formats, distributions by seed."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from prfaas_net.errors import ConfigError
from prfaas_net.sim.case_study import paper_workload
from prfaas_net.sim.requests import at_rate, azure_trace, mooncake_trace, poisson, read_trace, with_jitter

MOONCAKE = [
    '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}',
    '{"timestamp": 3000, "input_length": 512, "output_length": 4, "hash_ids": [1]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
]


def test_mooncake_rows_are_read() -> None:
    """Milliseconds become seconds; blocks name the prefix."""
    first, second = mooncake_trace(MOONCAKE)
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.block_ids) == (0.0, 700, 9, (1, 2))
    assert second.at_s == 3.0


def test_azure_rows_are_read() -> None:
    """Times count from the first row."""
    first, second = azure_trace(AZURE)
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.at_s == pytest.approx(0.052)


def test_files_are_told_apart_by_name(tmp_path: Path) -> None:
    """Also compressed."""
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(MOONCAKE).encode()))
    plain = tmp_path / "t.csv"
    plain.write_text("\n".join(AZURE))
    assert len(read_trace(packed)) == len(read_trace(plain)) == 2


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("t.jsonl", '{"timestamp": 1}', "line 1"),
        ("t.jsonl", "", "empty"),
        ("t.csv", "a,b\n1,2", "columns"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2", "line 2"),
        ("t.txt", "x", "jsonl or .csv"),
        ("t.jsonl.gz", "not gzip", "cannot read"),
    ],
)
def test_a_bad_trace_is_one_clear_line(tmp_path: Path, name: str, text: str, match: str) -> None:
    """It says what was expected and where it was not found."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_trace(path)


def test_the_same_seed_gives_the_same_requests() -> None:
    """And another seed others, at the same rate."""

    def draw(seed: int) -> list[float]:
        return [r.at_s for r in poisson(paper_workload().lengths, 10, rate_req_s=2.0, count=4000, seed=seed)]

    assert draw(1) == draw(1) != draw(2)
    assert draw(1)[-1] == pytest.approx(2000, rel=0.06)


def test_a_trace_is_stretched_to_a_rate() -> None:
    """Order and proportions stay."""
    requests = at_rate(list(mooncake_trace(MOONCAKE)), 4.0)
    assert [r.at_s for r in requests] == [0.0, 0.5]
    spread = with_jitter(list(mooncake_trace(MOONCAKE)), 3.0, seed=1)
    assert all(r.at_s < 6.0 for r in spread) and spread == sorted(spread, key=lambda r: r.at_s)
    with pytest.raises(ConfigError, match="span"):
        at_rate(list(mooncake_trace(MOONCAKE[:1])), 1.0)
