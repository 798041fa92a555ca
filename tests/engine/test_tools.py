"""Profile, benchmark and GPU check: what they measure is another matter; here, that they do and what they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.__main__ import main
from engine.bench import run as bench_run
from engine.bench.models import BENCH_MODELS, write_model
from engine.bench.run import BenchPlan, fit_exponent, run_bench
from engine.bench.theirs import start_transformers
from engine.checkpoint import load_checkpoint
from engine.engine import Engine
from engine.profiling import profile_lengths
from prfaas_net.errors import ConfigError
from prfaas_net.kv import KvKind
from tools import gpu_check


def test_a_profile_is_written_and_printed(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefill by length, decode by batch, KVCache bytes by kind: as the layout has them."""
    directory, output = checkpoints["gpt_oss"], tmp_path / "profile.json"
    command = ["profile", str(directory), "--output", str(output), "--max-tokens", "300", "--batches", "1,3"]
    assert main([*command, "--rounds", "1", "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert json.loads(output.read_text()) == profile
    engine = Engine.load(directory)
    assert profile["layout"] == engine.layout.fingerprint
    assert [point["tokens"] for point in profile["prefill"]] == [128, 256, 300]
    assert [point["batch"] for point in profile["decode"]] == [1, 3]
    assert all(point["seconds"] > 0 for point in profile["prefill"])
    sizes = profile["kv_bytes"][-1]
    assert {kind: sizes[kind.value] for kind in KvKind} == engine.layout.kv_bytes(300)
    assert main([*command, "--rounds", "1"]) == 0
    assert "written to" in capsys.readouterr().out


def test_a_profile_that_cannot_be_written_is_one_clear_line(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2."""
    where = str(tmp_path / "nowhere" / "profile.json")
    command = ["profile", str(checkpoints["llama"]), "--output", where, "--max-tokens", "20", "--batches", "1"]
    assert main([*command, "--rounds", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: the profile cannot be written")


def test_lengths_double_up_to_the_longest() -> None:
    """The longest is always among them."""
    assert profile_lengths(1000) == [128, 256, 512, 1000]
    assert profile_lengths(128) == [128]
    assert profile_lengths(5) == [5]


def test_the_exponent_of_a_power_law() -> None:
    """Found whatever the factor."""
    assert fit_exponent([(n, 3e-6 * n**1.25) for n in (1024, 4096, 16384)]) == pytest.approx(1.25)


@pytest.mark.parametrize("kind", sorted(BENCH_MODELS))
def test_the_models_of_the_benchmark_load(kind: str, tmp_path: Path) -> None:
    """Eight layers of hidden size 512, of the kind that the name says."""
    spec = load_checkpoint(write_model(tmp_path, kind)).spec
    assert (spec.hidden_size, len(spec.layers)) == (512, 8)
    kinds = {layer.mixer.kind for layer in spec.layers}
    assert (KvKind.LINEAR in kinds) == (kind.split("-")[0] in ("kda", "gdn", "lightning"))
    assert (KvKind.WINDOW in kinds) == kind.startswith("swa")


def test_a_bench_reports_rows_and_exponents(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the keys that scripts read; without transformers there is no ratio."""
    monkeypatch.setattr(bench_run, "start_transformers", lambda python, threads: None)
    plan = BenchPlan(("gdn-gqa",), prefill_tokens=(64, 512), decode_batches=(2,), decode_steps=2, rounds=1)
    told: list[bench_run.Row] = []
    report = run_bench(plan, told.append)
    assert [(row["phase"], row["tokens"], row["batch"]) for row in report["rows"]] == [
        ("prefill", 64, None), ("prefill", 512, None), ("decode", None, 2),
    ]  # fmt: skip
    assert len(told) == 3
    for row in report["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["transformers_tokens_per_s"] is None and row["over_transformers"] is None
    assert set(report["prefill_exponent"]) == {"gdn-gqa"}
    assert set(report["mixer_exponent"]) == {"gdn-gqa linear"}


def test_a_bench_needs_models_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Named, with those there are."""
    assert main(["bench", "gpt-9"]) == 2
    assert "expected kda-mla, " in capsys.readouterr().err


def test_a_reference_that_was_asked_for_must_run(tmp_path: Path) -> None:
    """A Python without transformers, or none at all, is an error then."""
    with pytest.raises(ConfigError, match="this Python cannot run transformers"):
        start_transformers(str(tmp_path / "python"), 1)


def test_the_gpu_check_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On NumPy, to show that the script itself is right: every family agrees, everything is measured."""
    output = tmp_path / "gpu.json"
    assert gpu_check.main(["--backend", "numpy", "--quick", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == report
    assert report["ok"] and len(report["families"]) == 13
    assert [point["tokens"] for point in report["prefill"]] == [64, 128]
    assert [point["batch"] for point in report["decode"]] == [1, 2]
    assert report["copies"]["beside_seconds"] > 0


def test_the_gpu_check_says_that_cupy_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With status 2; nothing is written."""
    try:
        import cupy  # noqa: F401
    except ImportError:
        output = tmp_path / "gpu.json"
        assert gpu_check.main(["--output", str(output)]) == 2
        assert "prfaas-net[cuda]" in capsys.readouterr().err
        assert not output.exists()
