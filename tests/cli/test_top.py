"""``prfaas top`` shows what ``GET /v1/fleet`` says, and what is wrong in one line."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prfaas_net.cli.top import _look, frame
from prfaas_net.errors import LinkError
from tests.cli.test_cli import users_environ
from tests.gateway.conftest import open_bench
from tests.transport.certificates import Authority

FLEET: dict[str, Any] = {
    "model": "m", "policy": "threshold", "threshold_tokens": 19_400, "offload_share": 0.496, "requests_in_flight": 7,
    "links": [
        {
            "from": "prfaas-0", "to": "pd-0", "state": "building", "goodput_bps": 61.7e6, "available_bps": 9.4e9,
            "rtt_s": 0.0241, "retransmitted_share": 0.0031, "backlog_bytes": 3 << 20,
        }
    ],
    "nodes": [
        {
            "node": "prfaas-0", "cluster": "far", "role": "prefill", "up": True, "problem": None,
            "queue_tokens": 12_400, "running_requests": 3, "cached_blocks": 1_234,
        },
        {
            "node": "pd-0", "cluster": "near", "role": "decode", "up": False, "problem": "gone", "queue_tokens": 0,
            "running_requests": 0, "cached_blocks": None,
        },
    ],
    "requests": [{"ttft_s": 0.5}, {"ttft_s": None}, {"ttft_s": 2.0}, {"ttft_s": 0.1}],
}  # fmt: skip


def drawn(fleet: dict[str, Any], problem: str | None = None, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(fleet, problem))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_has_what_an_operator_asks() -> None:
    """Links, queues, TTFT, offload share and threshold, with their units."""
    text = drawn(FLEET)
    for words in (
        "t 19,400 tokens", "offloaded 50%", "TTFT p50 500 ms", "TTFT p90 2.00 s", "in flight 7",
        "prfaas-0 → pd-0", "building", "61.7 Mbps", "9.40 Gbps", "24.1 ms", "0.31%", "3.00 MiB",
        "12,400", "1,234", "down: gone",
    ):  # fmt: skip
        assert words in text, words


def test_a_frame_of_nothing_yet() -> None:
    """No request, no link, no threshold: dashes, not zeros."""
    empty = FLEET | {"links": [], "requests": [], "offload_share": None, "threshold_tokens": None}
    text = drawn(empty)
    assert "none is up" in text and "t none" in text and "offloaded -" in text and "TTFT p50 -" in text


def test_a_frame_tells_what_the_planner_wants_and_what_is_changing() -> None:
    """Who acts, why, which node drains and what it has still to end; nothing where no planner runs."""
    change = {"node": "pd-0", "before": "decode", "after": "prefill", "for_s": 3.2, "held": 2}
    planner: dict[str, Any] = {"mode": "act", "acting": True, "why": "pd decode binds", "changing": [change]}
    draining = [FLEET["nodes"][0], FLEET["nodes"][1] | {"next_role": "prefill"}]
    text = drawn(FLEET | {"planner": planner, "nodes": draining})
    for words in (
        "planner acts: pd decode binds",
        "pd-0: decode → prefill, 2 calls to end",
        "3.20 s",
        "decode → prefill",
    ):
        assert words in text, words
    assert "planner stands by" in drawn(FLEET | {"planner": planner | {"acting": False}})
    assert "planner advises" in drawn(FLEET | {"planner": planner | {"mode": "advise", "acting": False}})
    assert "planner" not in drawn(FLEET | {"planner": planner | {"mode": "off"}}) + drawn(FLEET)


def test_an_answer_that_stays_away_is_told_below_the_last_frame() -> None:
    text = drawn(FLEET, "no gateway answers")
    assert "61.7 Mbps" in text and text.rstrip().endswith("no gateway answers")


def test_a_narrow_terminal_loses_no_figure() -> None:
    text = drawn(FLEET, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(words in text for words in ("61.7 Mbps", "24.1 ms", "0.31%", "building", "12,400"))


async def run_top(*args: str, key: str | None = None) -> tuple[int | None, str, str]:
    environ = users_environ() | ({"PRFAAS_API_KEY": key} if key else {})
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prfaas_net.cli", "top", *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    async with asyncio.timeout(30):
        stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.mark.e2e
async def test_once_prints_the_frame_of_a_real_gateway() -> None:
    """With the key from the environment; without it, one line says so."""
    async with open_bench(api_keys=["long-enough"]) as bench:
        code, text, errors = await run_top("--once", "--url", bench.gateway.url, key="long-enough")
        assert (code, errors) == (0, "")
        assert all(name in text for name in ("fake", "prfaas-0", "pd-decode-0", "t 100 tokens"))
        code, text, errors = await run_top("--once", "--url", bench.gateway.url)
        assert (code, text) == (2, "")
        assert "PRFAAS_API_KEY" in errors and len(errors.strip().splitlines()) == 1


@pytest.mark.e2e
async def test_no_gateway_is_one_line() -> None:
    code, text, errors = await run_top("--once", "--url", "http://127.0.0.1:1")
    assert (code, text) == (2, "")
    assert "--url" in errors and "Traceback" not in errors and len(errors.strip().splitlines()) == 1


async def test_a_gateway_whose_certificate_is_signed_by_ones_own_authority(tmp_path: Path) -> None:
    """Is looked at with that; without it one line says what is wrong with it."""
    authority = Authority(tmp_path)
    files = authority.issue("gateway")
    tls = {"certificate": str(files.certificate), "key": str(files.key)}
    async with open_bench(http={"port": 0, "tls": tls}) as bench:
        console = Console(file=io.StringIO(), width=120)
        await _look(bench.gateway.url, None, 1.0, console, once=True, ca=authority.path)
        with pytest.raises(LinkError, match="certificate verify failed"):
            await _look(bench.gateway.url, None, 1.0, console, once=True)
