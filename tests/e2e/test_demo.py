"""The main job: five real processes, real documents, output equal to a single-process run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KEYS = {
    "name", "prompt_tokens", "cached_tokens", "incremental_tokens", "threshold_tokens", "prefilled_in", "kv_bytes",
    "connections", "prefill_s", "transfer_s", "exposed_s", "ttft_s", "output_tokens", "identical",
}  # fmt: skip


@pytest.mark.e2e
@pytest.mark.timeout(170)
def test_the_demonstration_holds(tmp_path: Path) -> None:
    """``prfaas up --demo`` exits 0; the short document stays local, the long one crosses; both are identical."""
    output = tmp_path / "demo.json"
    command = [sys.executable, "-m", "prfaas_net.cli", "up", "--demo", "--output", str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=160, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(output.read_text())
    assert report["processes"] == 5
    short, long = report["requests"]
    assert set(short) == set(long) == KEYS
    assert (short["name"], short["prefilled_in"]) == ("short", "pd")
    assert (long["name"], long["prefilled_in"]) == ("long", "prfaas")
    assert short["incremental_tokens"] <= short["threshold_tokens"] < long["incremental_tokens"]
    assert long["prompt_tokens"] >= 8000
    assert all(row["identical"] for row in report["requests"])
    assert all(row["output_tokens"] == 48 for row in report["requests"])
    # Two MLA layers of 64+16 float32 a token; six KDA layers of fixed size.
    assert long["kv_bytes"]["full"] == long["prompt_tokens"] * 2 * 80 * 4
    assert long["kv_bytes"]["linear"] == short["kv_bytes"]["linear"] > 0
    assert long["kv_bytes"]["window"] == 0
    assert 1 <= long["connections"] <= 4
    # Layer-wise: what is left of the transfer after prefill is a small part of it.
    assert long["exposed_s"] < long["transfer_s"] / 2
    assert "curl" not in result.stdout
