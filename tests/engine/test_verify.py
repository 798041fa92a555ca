"""The command line: ``python -m engine verify``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.__main__ import main
from tests.engine.test_references import FIXTURES

ORACLE = FIXTURES / "kimi_linear" / "oracle.json"


@pytest.fixture
def model(checkpoints: dict[str, Path]) -> str:
    """A checkpoint's directory."""
    return str(checkpoints["kimi_linear"])


def edited(tmp_path: Path, **changes: Any) -> str:
    """An oracle with its first prompt changed."""
    oracle = json.loads(ORACLE.read_text())
    oracle["prompts"]["p5"] |= changes
    path = tmp_path / "oracle.json"
    path.write_text(json.dumps(oracle))
    return str(path)


def test_agreement_exits_with_zero(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints a line for each prompt."""
    assert main(["verify", model, "--oracle", str(ORACLE)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["prompt", "p5", "p70", "p193", "ok:"]
    assert out.count("16/16") == 3


def test_json_output(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole result as one object."""
    assert main(["verify", model, "--oracle", str(ORACLE), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    first = report["prompts"][0]
    assert (first["name"], first["tokens_equal"], first["tokens"]) == ("p5", 16, 16)
    assert 0 <= first["max_abs_logit_diff"] < 1e-4
    assert 0 <= first["max_abs_cache_diff"] < 1e-4


def test_a_miss_exits_with_one(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Be it in a token, a logit or the cache; the prompt is marked."""
    prompt = json.loads(ORACLE.read_text())["prompts"]["p5"]
    logits, tokens = prompt["last_logits"], prompt["greedy"]
    assert main(["verify", model, "--oracle", edited(tmp_path, last_logits=[logits[0] + 0.01, *logits[1:]])]) == 1
    assert "1.0e-02         -  16/16  MISS" in capsys.readouterr().out
    assert main(["verify", model, "--oracle", edited(tmp_path, greedy=[*tokens[:-1], 5])]) == 1
    assert "15/16  MISS" in capsys.readouterr().out
    shutil.copytree(ORACLE.parent / "oracle", tmp_path / "oracle")
    path = edited(tmp_path, input_ids=[6, *prompt["input_ids"][1:]])
    assert main(["verify", model, "--oracle", path, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["prompts"][0]["max_abs_cache_diff"] > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": []}, "key prompts.p5.input_ids"),
        ({"input_ids": [1, 9999]}, "key prompts.p5.input_ids"),
        ({"greedy": None}, "key prompts.p5.greedy"),
        ({"last_logits": [1.0]}, "expected 264 numbers; found shape [1]"),
        ({"last_logits": ["a"]}, "key prompts.p5.last_logits"),
    ],
)
def test_a_bad_oracle_is_one_clear_line(
    changes: dict[str, Any], message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error, with status 2."""
    assert main(["verify", model, "--oracle", edited(tmp_path, **changes)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and message in captured.err
    assert captured.err.count("\n") == 1


def test_another_models_cache_is_one_clear_line(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no miss: nothing was compared."""
    shutil.copytree(FIXTURES / "qwen3", tmp_path / "q", dirs_exist_ok=True)
    shutil.copy(FIXTURES / "kimi_linear/oracle/prefill_cache_p5.safetensors", tmp_path / "q/oracle")
    assert main(["verify", str(checkpoints["qwen3"]), "--oracle", str(tmp_path / "q/oracle.json")]) == 2
    assert "the oracle's cache is another model's" in capsys.readouterr().err


def test_the_module_runs(tmp_path: Path) -> None:
    """As a process: no traceback for a directory that is not there."""
    command = [sys.executable, "-m", "engine", "verify", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no such directory")
    assert "Traceback" not in done.stderr
