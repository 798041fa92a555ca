"""Smaller pieces of a connector."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from prfaas_net import connectors
from prfaas_net.connectors.agreement import Form
from prfaas_net.connectors.layout import EngineLayout, digest_of
from prfaas_net.connectors.plan import PagePlan, Section, needed_runs, state_block
from prfaas_net.connectors.stats import ConnectorStats, is_empty, merged, summary
from prfaas_net.connectors.weights import weights_digest
from prfaas_net.errors import ProtocolError
from prfaas_net.metrics import Metrics
from tests.connectors.engines import hybrid_layout


def test_null_blocks_are_left_out_and_cut_a_run_in_two() -> None:
    """A window has moved past them, on both sides; block 0 is nobody's."""
    assert needed_runs([0, 0, 5, 6], 16, 0, 60) == ((32, 60),)
    assert needed_runs([4, 0, 5, 6], 16, 0, 60) == ((0, 16), (32, 60))
    assert needed_runs([4, 3, 5, 6], 16, 32, 60) == ((32, 60),)
    assert needed_runs([0, 0], 16, 0, 60) == ()
    assert needed_runs([], 16, 0, 60) == ()


def test_the_running_state_is_in_the_last_block_before_the_spare_ones() -> None:
    """Speculative decoding keeps scratch blocks behind it; earlier ones are null or superseded."""
    assert state_block([7], 0) == 7
    assert state_block([0, 3, 7, 8, 9], 2) == 7
    assert state_block([7], 2) == 7
    assert state_block([], 0) == 0


def test_chunks_follow_from_the_plan_and_the_plan_survives_the_wire() -> None:
    """Both sides number the same pieces: of so many tokens and bytes at most, layer after layer."""
    sections = (
        Section(("a", "b"), Form.PAGES, 16, 4096, ((0, 40), (64, 70))),
        Section(("c",), Form.ROWS, 1, 100, ((0, 70),), (0, 1)),
        Section(("s",), Form.STATE, 0, 10_000),
    )
    plan = PagePlan(70, sections, 32, 8192)
    again = PagePlan.from_json(plan.to_json())
    assert again.table.fingerprint == plan.table.fingerprint
    assert [(c.layer, c.start, c.stop, c.n_bytes) for c in again.chunks] == [
        ("a", 0, 32, 8192), ("b", 0, 32, 8192), ("a", 32, 40, 4096), ("b", 32, 40, 4096), ("a", 64, 70, 4096),
        ("b", 64, 70, 4096), ("c", 0, 32, 3200), ("c", 32, 64, 3200), ("c", 64, 70, 600), ("s", 0, 70, 8192),
        ("s", 8192, 70, 1808),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"stop_token": 0}, {"stop_token": "x"}, {"sections": []}, {"sections": [{}]}, {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40}, {"chunk_tokens": 0}, {"chunk_tokens": None},
    ],
)  # fmt: skip
def test_field_65_a_plan_from_a_stranger_is_bounded_before_it_is_believed(change: dict[str, object]) -> None:
    """Numbers out of bounds and missing fields are a protocol error, not memory or a crash."""
    body = PagePlan(70, (Section(("a",), Form.ROWS, 1, 4, ((0, 70),)),), 32, 8192).to_json()
    with pytest.raises(ProtocolError):
        PagePlan.from_json({**body, **change})
    inner = {**body["sections"][0], "runs": [[5, 1 << 40]]}
    with pytest.raises(ProtocolError):
        PagePlan.from_json({**body, "sections": [inner]})


def test_a_layout_survives_the_wire_and_nonsense_does_not_become_one() -> None:
    """Its fingerprint covers all but names and ranks."""
    layout = hybrid_layout()
    assert EngineLayout.from_json(layout.to_json()) == layout
    assert hybrid_layout(tp_size=2, tp_rank=1).fingerprint == hybrid_layout(tp_size=2).fingerprint
    assert hybrid_layout(32).fingerprint != layout.fingerprint
    changes: list[dict[str, object]] = [{"pages": 3}, {"groups": [{}]}, {"tp_rank": 5}, {"protocol": "x"}, {"more": 1}]
    for change in changes:
        with pytest.raises(ProtocolError):
            EngineLayout.from_json({**layout.to_json(), **change})


def test_a_prompts_digest_is_of_its_tokens_and_its_adapter() -> None:
    """Of the first N-1, whatever follows."""
    assert digest_of([1, 2, 3], 2) == digest_of([1, 2, 9], 2)
    assert digest_of([1, 2, 3], 3) != digest_of([1, 2, 9], 3)
    assert digest_of([1, 2], 2) != digest_of([1, 2], 2, "lora")


def test_another_fine_tune_of_the_same_shapes_has_another_digest(tmp_path: Path) -> None:
    """A byte in the middle of a large file is enough, where a sample lies; a moved directory is the same model."""
    first, second = tmp_path / "a", tmp_path / "b"
    for directory in (first, second):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes(1 << 20))
        (directory / "config.json").write_text(str(directory))
    assert weights_digest(str(first)) == weights_digest(str(second))
    with (second / "model.safetensors").open("r+b") as file:
        file.seek(1 << 19)
        file.write(b"x")
    assert weights_digest(str(first)) != weights_digest(str(second))
    assert weights_digest("org/name", "main") != weights_digest("org/name", "v2")


def test_numbers_are_taken_once_and_added_up_for_a_log_line() -> None:
    """Series and counts, from several ranks."""
    stats = ConnectorStats(Metrics())
    for name, value in (("sent_bytes", 2e6), ("sent_s", 0.1), ("sent_exposed_s", 0.05), ("failed_loads", 1)):
        stats.add(name, value)
    data = stats.take()
    assert is_empty(stats.take())
    both = merged(data, {"sent_bytes": [4e6], "expired_holds": [1.0]})
    line = summary(both)
    assert (line["transfers sent"], line["MB sent"], line["mean ms sent"]) == (2, 6.0, 100.0)
    assert (line["failed loads"], line["expired holds"]) == (1, 1)


def test_engines_are_imported_by_their_own_files_alone() -> None:
    """Everything else of a connector runs, and is tested, without vLLM and torch."""
    allowed = {"vllm.py", "vllm_pages.py", "vllm_stats.py", "device_pages.py"}
    found = set()
    for path in Path(connectors.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] in ("vllm", "torch") for name in names):
                found.add(path.name)
    assert found == allowed
