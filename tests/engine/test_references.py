"""The engine computes what transformers computes with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine
from engine.oracle import load_oracle
from engine.verify import verify
from tests.engine.checkpoints import RECIPES

FIXTURES = Path(__file__).parent / "fixtures"


def test_the_demo_model_agrees_with_its_oracle(demo: Engine, demo_directory: Path) -> None:
    """Logits of every prompt to 2e-3, and every greedy token."""
    report = verify(demo, load_oracle(demo_directory / "oracle.json", demo.vocab_size))
    assert len(report.prompts) == 3
    assert report.ok, report.to_text()


@pytest.mark.parametrize("family", sorted(RECIPES))
@pytest.mark.parametrize("chunk", [16, 512])
def test_every_family_agrees_with_transformers(family: str, chunk: int, checkpoints: dict[str, Path]) -> None:
    """Logits, tokens and every cache tensor, in one chunk and in many; far inside the tolerance."""
    engine = Engine.load(checkpoints[family], prefill_chunk_tokens=chunk)
    report = verify(engine, load_oracle(FIXTURES / family / "oracle.json", engine.vocab_size))
    assert len(report.prompts) == 3
    assert report.ok, report.to_text()
    assert max(prompt.max_abs_logit_diff for prompt in report.prompts) < 1e-4
    assert any(prompt.max_abs_cache_diff is not None for prompt in report.prompts)
