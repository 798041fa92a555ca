"""The page at ``/`` shows the fleet, in a real browser: all of it, readable, nothing over anything else.

Screenshots are left under ``build/dashboard/``.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest

from tests.gateway.browser import CHROMIUM, Tab, open_tab
from tests.gateway.conftest import Bench, open_bench
from tests.gateway.fakes import Gate, Script
from tests.gateway.feeds import FeedScript
from tests.gateway.test_state_watch import link
from tests.waiting import until

Test = TypeVar("Test", bound=Callable[..., Any])
SCREENSHOTS = Path(__file__).parents[2] / "build" / "dashboard"
KEY = "a-key-of-the-test"
NO_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def in_chromium(test: Test) -> Test:
    """Run with ``make test-ui``, which installs what is missing."""
    marked: Test = pytest.mark.ui(pytest.mark.timeout(100)(NO_CHROMIUM(test)))
    return marked


# Every piece of text with the box that it takes; of SVG and HTML alike.
TEXTS = """
(() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, range = document.createRange();
    if (!node.textContent.trim() || ["SCRIPT", "STYLE", "title"].includes(node.parentElement.tagName)) continue;
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    const svg = node.parentElement.ownerSVGElement, frame = (svg || node.parentElement).getBoundingClientRect();
    const cut = svg ? box.left < frame.left - 1 || box.right > frame.right + 1
      : node.parentElement.scrollWidth > node.parentElement.clientWidth + 1 && node.parentElement.clientWidth > 0;
    // What is cut is not seen beyond its element.
    const right = svg ? box.right : Math.min(box.right, frame.right);
    if (box.width > 0) found.push({text: node.textContent, left: box.left, right, top: box.top, bottom: box.bottom,
      cut, size: parseFloat(getComputedStyle(node.parentElement).fontSize)});
  }
  return found;
})()
"""


@dataclass
class Shown:
    """A browser, and the gateway it looks at."""

    bench: Bench
    tab: Tab
    links: FeedScript


def clashes(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of texts that lie over each other by more than a pixel."""
    found = []
    for i, a in enumerate(texts):
        for b in texts[i + 1 :]:
            wide = min(a["right"], b["right"]) - max(a["left"], b["left"])
            high = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
            # Boxes of lines are higher than their letters.
            if wide > 1 and high > 4:
                found.append((a["text"], b["text"]))
    return found


async def beats(feeds: list[FeedScript]) -> None:
    """Nodes say something every other second, or their gateway takes what it knew of them for lost."""
    while True:
        await asyncio.sleep(1)
        for feed in feeds:
            feed.say({"event": "beat"})


@asynccontextmanager
async def shown(tmp_path: Path) -> AsyncIterator[Shown]:
    """A gateway with a key that has answered requests, whose links have had their ups and downs."""
    feeds: list[FeedScript] = []

    def prepare(fleet: Any) -> None:
        feeds.extend(FeedScript(node, "/v1/state/events") for node in (fleet.far, fleet.near))

    async with open_bench(prepare=prepare, api_keys=[KEY], policy="threshold", request_deadline=300) as bench:
        bench.http.headers["Authorization"] = f"Bearer {KEY}"
        rng = random.Random(1)
        for _ in range(24):
            await bench.complete(prompt="x" * round(10 ** rng.uniform(1, 3.4)), max_tokens=2)
        told: dict[str, Any] = {"available_bps": 94.2e6, "budget_bps": 1e8, "goodput_bps": 61.7e6, "base_rtt_s": 0.02}
        told |= {"queueing_delay_s": 0.0041, "retransmitted_share": 0.0031, "cause": "ours"}
        for queue_tokens, state in enumerate(("clear", "building", "congested", "clear"), start=12_400):
            feeds[0].say({"event": "state", "queue_tokens": queue_tokens, "links": [link(state, **told)]})
        far = bench.gateway.router.state.nodes["prfaas-0"]
        await until(lambda: far.foreign_tokens == 12_403)
        inner = link("app-limited", goodput_bps=3.2e9, available_bps=9.4e9, base_rtt_s=0.0002)
        feeds[1].say({"event": "state", "queue_tokens": 800, "links": [inner]})
        await until(lambda: bench.gateway.router.state.nodes["pd-prefill-0"].foreign_tokens == 800)
        # Some are being answered all the while.
        gate = Gate()
        bench.fleet.decode.script = Script(hold_at=2, gate=gate)
        beating = asyncio.create_task(beats(feeds))
        asking = [asyncio.create_task(bench.complete(prompt="x" * 20 * n, max_tokens=4)) for n in (1, 4, 60)]
        try:
            await until(lambda: bench.fleet.decode.open_calls == len(asking))
            async with open_tab(tmp_path / "profile") as tab:
                yield Shown(bench, tab, feeds[0])
        finally:
            gate.go_on.set()
            beating.cancel()
            await asyncio.gather(beating, *asking, return_exceptions=True)
        for feed in feeds:
            feed.end()


def keep(name: str, picture: bytes) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    (SCREENSHOTS / name).write_bytes(picture)


async def give_key(tab: Tab, key: str) -> None:
    await tab.until("document.body.dataset.ready === 'key'")
    await tab.evaluate(
        f"document.getElementById('key').value = '{key}'; document.querySelector('form').requestSubmit()"
    )


@in_chromium
async def test_it_shows_the_fleet_at_every_size(tmp_path: Path) -> None:
    """Nodes, links, requests, verdicts and figures; on a desk and on a phone, by day and by night."""
    async with shown(tmp_path) as page:
        tab = page.tab
        for width, height, dark in ((1280, 800, False), (1280, 800, True), (390, 844, False), (390, 844, True)):
            await tab.look(page.bench.gateway.url, width, height, dark=dark)
            await give_key(tab, KEY)
            await tab.until("document.body.dataset.ready === 'true'")
            keep(f"{width}x{height}-{'dark' if dark else 'light'}.png", await tab.screenshot())
            nodes = await tab.evaluate("[...document.querySelectorAll('[data-node]')].map(n => n.dataset.node)")
            assert sorted(nodes) == ["pd-decode-0", "pd-prefill-0", "prfaas-0"]
            assert await tab.evaluate("document.querySelectorAll('#topology path').length") == 2
            assert await tab.evaluate("document.querySelectorAll('#scatter circle').length") == 24
            assert await tab.evaluate("document.querySelectorAll('.strip rect').length") == 5
            text = await tab.evaluate("document.body.innerText")
            for words in ("61.7 Mbps", "94.2 Mbps", "24.1 ms", "0.31 %", "clear", "app-limited", "12.4K", "fake"):
                assert words in text, words
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            texts = await tab.evaluate(TEXTS)
            assert not clashes(texts)
            assert not [item["text"] for item in texts if item["cut"] or "…" in item["text"]]
            assert min(item["size"] for item in texts) >= 11
            assert min(item["left"] for item in texts) >= 0 and max(item["right"] for item in texts) <= width
        assert not tab.problems


@in_chromium
async def test_it_is_live(tmp_path: Path) -> None:
    """A link that goes down, a node that dies and a new request are seen without a click."""
    async with shown(tmp_path) as page:
        tab, bench = page.tab, page.bench
        await tab.look(bench.gateway.url, 1280, 800)
        await give_key(tab, KEY)
        await tab.until("document.body.dataset.ready === 'true'")
        page.links.say({"event": "state", "queue_tokens": 0, "links": [link("down")]})
        await bench.complete(prompt="one more", max_tokens=1)
        await bench.fleet.near.stop()
        await tab.until("document.querySelector('#links .row:nth-child(2) .state').textContent === 'down'")
        await tab.until("document.querySelectorAll('#scatter circle').length === 25")
        await tab.until("document.querySelector('[data-node=\"pd-prefill-0\"]').dataset.up === 'false'")
        await tab.until("document.getElementById('status').textContent === '1 of 3 nodes down'")
        assert not clashes(await tab.evaluate(TEXTS))
        keep("1280x800-trouble.png", await tab.screenshot())


def large_fleet() -> dict[str, Any]:
    """Four clusters, 18 nodes with long names, 24 links, every state; as ``GET /v1/fleet`` would tell."""
    states = ["clear", "app-limited", "idle", "host-limited", "building", "congested", "down"]
    kinds = {"prfaas-frankfurt": "prfaas", "prfaas-stockholm": "prfaas", "pd-amsterdam": "pd", "pd-warszawa": "pd"}
    nodes = []
    for cluster, kind in kinds.items():
        roles = ["prefill"] * 4 if kind == "prfaas" else ["decode", "decode", "prefill", "prefill", "prefill"]
        for number, role in enumerate(roles):
            up = (cluster, number) != ("pd-warszawa", 4)
            node = {"node": f"{cluster}-{role}-{number}", "cluster": cluster, "role": role, "up": up}
            node |= {"problem": None if up else "a node cannot be reached", "restarts": 0, "max_batch_requests": 64}
            nodes.append(node | {"queue_tokens": 123_456 * number, "running_requests": 48, "cached_blocks": 1_234_567})
    senders = [node for node in nodes if node["role"] == "prefill"]
    receivers = [node for node in nodes if node["role"] == "decode"]
    links = [
        {"from": sender["node"], "to": receiver["node"], "state": states[i % 7], "cause": None,
         "available_bps": 9.87e10, "budget_bps": 1e11, "goodput_bps": 1.234e10 * (i % 7), "rtt_s": 0.0123,
         "queueing_delay_s": 0.001, "retransmitted_share": 0.0123, "backlog_bytes": 1 << 30, "confidence": 1.0}
        for i, (sender, receiver) in enumerate((s, r) for s in senders for r in receivers[:2])
    ]  # fmt: skip
    changes = [{"at_s": 1000.0 + 3 * i, "state": states[i % 7]} for i in range(100)]
    verdicts = [{"from_cluster": a, "to_cluster": b, "changes": changes} for a in kinds for b in kinds if "pd" in b[:2]]
    requests = [
        {"at_s": 1.0 + i, "prompt_tokens": 37 * i * i + 1, "cached_tokens": i, "ttft_s": 0.001 * (i + 1) ** 1.5,
         "prefilled_in": "x", "offloaded": i > 120, "failed": i % 50 == 0}
        for i in range(500)
    ]  # fmt: skip
    return {
        "now_s": 1300.0, "version": "0.1.0", "model": "a-model-with-a-long-name-1t-a32b-instruct",
        "policy": "threshold", "threshold_tokens": 19_400, "offload_share": 0.7576, "requests_in_flight": 12_345,
        "clusters": [{"cluster": name, "kind": kind} for name, kind in kinds.items()],
        "nodes": nodes, "links": links, "verdicts": verdicts, "requests": requests,
    }  # fmt: skip


@in_chromium
async def test_a_large_fleet_stays_readable(tmp_path: Path) -> None:
    """Labels of links leave rather than lie over each other; the list has whole names."""
    async with open_bench() as bench, open_tab(tmp_path / "profile") as tab:
        for width, height in ((1280, 800), (390, 844)):
            await tab.look(bench.gateway.url, width, height)
            await tab.until("document.body.dataset.ready === 'true'")
            answer = f"({{status: 200, ok: true, json: async () => ({orjson.dumps(large_fleet()).decode()})}})"
            await tab.evaluate(f"fetch = async () => {answer}")
            await tab.until("document.querySelectorAll('[data-node]').length === 18")
            keep(f"{width}x{height}-large.png", await tab.screenshot())
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            texts = await tab.evaluate(TEXTS)
            assert not clashes(texts)
            assert min(item["left"] for item in texts) >= 0
            assert not await tab.evaluate("document.querySelectorAll('#topology [data-state]').length")
            names = {node["node"] for node in large_fleet()["nodes"]}
            assert not [item["text"] for item in texts if item["cut"] and item["text"].removesuffix(" →") in names]
        assert not tab.problems


@in_chromium
async def test_a_key_is_asked_for_and_kept_nowhere(tmp_path: Path) -> None:
    """A wrong one shows nothing; a right one is in no storage, and gone when the page is loaded again."""
    async with shown(tmp_path) as page:
        tab = page.tab
        await tab.look(page.bench.gateway.url, 1280, 800)
        await give_key(tab, "a-wrong-key")
        await tab.until("document.getElementById('status').textContent.includes('not known')")
        assert "prfaas-0" not in await tab.evaluate("document.documentElement.outerHTML")
        await give_key(tab, KEY)
        await tab.until("document.body.dataset.ready === 'true'")
        assert KEY not in await tab.evaluate("document.documentElement.outerHTML + document.cookie + location.href")
        assert await tab.evaluate("localStorage.length + sessionStorage.length") == 0
        assert await tab.evaluate("document.getElementById('key').value") == ""
        await tab.call("Page.reload")
        await tab.until("document.body.dataset.ready === 'key'")


async def test_the_page_needs_nobody_else() -> None:
    """Nothing is loaded from anywhere; only its own script may run, and it may ask only its own gateway."""
    async with open_bench() as bench, bench.http.get(bench.gateway.url) as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert answer.content_type == "text/html"
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert "@import" not in page and "url(" not in page
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]{44}'", policy)
