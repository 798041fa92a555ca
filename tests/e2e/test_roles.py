"""The planner in a fleet of real processes: roles follow what is asked for, and no request notices."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from engine.engine import Engine
from engine.sampling import Greedy
from prfaas_net.kv import RegionMap
from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.localfleet.fleet import ClusterPlace, FleetPlan, LocalFleet
from prfaas_net.nodes.engine_api import Sampling
from tests.e2e.conftest import Bench
from tests.e2e.test_fleet import settle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CLIENTS = 6
PROMPT_TOKENS = 300
# Answers so short that prefill is all the work, and so long that decoding is.
SHORT, LONG = 2, 160
PLANNER = {
    "PERIOD": "500ms", "WINDOW": "4s", "LEAST_REQUESTS": "4", "CONFIRMATIONS": "2", "DWELL": "2s",
    "DRAIN_LIMIT": "60s", "LEASE": "5s",
}  # fmt: skip


def write_profile(engine: Engine, path: Path) -> None:
    """The engine's speed here, and a decode profile for which the two kinds of answers want different splits.

    With T the time of a prompt, an instance prefills 1/T prompts a second. One that decodes 20/T tokens a second keeps
    up with ten such at two tokens an answer, and with an eighth of one at 160: far from both, so that it does not
    matter that processes which share two cores are several times slower than the profile says.
    """
    regions = RegionMap(engine.layout, PROMPT_TOKENS)
    prompt, buffer = [7 * i % engine.vocab_size for i in range(PROMPT_TOKENS)], bytearray(regions.total_bytes)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        engine.prefill(prompt, Greedy(1, ignore_eos=True), regions, buffer)
        times.append(time.perf_counter() - started)
    seconds = 2 * min(times)
    body = {
        "layout": engine.layout.fingerprint,
        "prefill": [{"tokens": 1, "seconds": seconds / PROMPT_TOKENS}, {"tokens": PROMPT_TOKENS, "seconds": seconds}],
        "decode": [{"batch": 4, "step_seconds": 4 * seconds / 20}],
    }
    path.write_bytes(orjson.dumps(body))


@pytest.fixture
async def bench(engine: Engine, tmp_path: Path) -> AsyncIterator[Bench]:
    """One PrfaaS node and three PD nodes, of which one prefills at first; the planner acts, and quickly."""
    write_profile(engine, tmp_path / "profile.json")
    plan = FleetPlan(
        port=0, threshold_tokens=PROMPT_TOKENS // 2, link_rate="200Mbps", arena="64MiB", pd_nodes=3, planner="act",
        profile=tmp_path / "profile.json",
        pd=ClusterPlace(environ={f"PRFAAS_GATEWAY__PLANNER__{name}": value for name, value in PLANNER.items()}),
    )  # fmt: skip
    async with LocalFleet(plan) as fleet:
        async with GatewayClient(fleet.url) as client:
            await client.wait_healthy(within_s=20)
        yield Bench(fleet, engine)


class SteadyLoad:
    """Clients that ask again the moment they are answered; the length of the answers may be changed at any time."""

    def __init__(self, bench: Bench) -> None:
        ids = bench.tokenizer.encode(bench.long_text)
        # Different lengths, so that a threshold has something to part.
        self.prompts = [ids[40 * i : 40 * i + PROMPT_TOKENS - 30 * i] for i in range(CLIENTS)]
        self.references = [bench.reference(p, Sampling(max_tokens=LONG, ignore_eos=True)) for p in self.prompts]
        self.output_tokens = SHORT
        self.answered: Counter[str] = Counter()
        self._bench = bench
        self._asked = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """On the way out every client has had its last answer, and none has failed."""
        stop = asyncio.Event()
        async with GatewayClient(self._bench.fleet.url, timeout_s=60) as client:
            name, _ = await client.model()
            clients = [asyncio.create_task(self._ask(client, name, i, stop)) for i in range(CLIENTS)]
            try:
                yield
                stop.set()
                await asyncio.gather(*clients)
            finally:
                for task in clients:
                    task.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

    async def _ask(self, client: GatewayClient, model: str, i: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._asked += 1
            n = self.output_tokens
            body = {
                "model": model, "prompt": self.prompts[i], "max_tokens": n, "temperature": 0, "ignore_eos": True,
                # Nothing is shared: every prompt is computed.
                "cache_salt": str(self._asked),
            }  # fmt: skip
            answer = await client.complete(body)
            assert answer.token_ids == self.references[i][:n]
            self.answered[answer.record["prefill_node"]] += 1
            self.answered[answer.record["decode_node"]] += 1


async def get(bench: Bench, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{bench.fleet.url}{path}") as response:
        return await response.json()


async def becomes(bench: Bench, prefillers: int) -> None:
    """Wait until so many PD nodes prefill, and none is changing."""

    async def so_it_is() -> bool:
        nodes = [n for n in (await get(bench, "/v1/fleet"))["nodes"] if n["cluster"] == "pd"]
        settled = all(n["up"] and n["next_role"] is None for n in nodes)
        return settled and sum(n["role"] == "prefill" for n in nodes) == prefillers

    await settle(so_it_is, within_s=60.0)


async def test_roles_follow_the_length_of_answers_and_no_request_notices(bench: Bench) -> None:
    """Short answers move a decode node to prefill, long ones move it back, and short ones again; under load, every
    answer is that of a single process, and between the steps nothing moves."""
    load = SteadyLoad(bench)
    async with load.running():
        for output_tokens, prefillers in ((SHORT, 2), (LONG, 1), (SHORT, 2)):
            load.output_tokens = output_tokens
            await becomes(bench, prefillers)
        looks = await bench.metric("gateway", 'prfaas_planner_plans_total{outcome="as_it_is"}')

        async def looked_on() -> bool:
            return await bench.metric("gateway", 'prfaas_planner_plans_total{outcome="as_it_is"}') >= looks + 6

        await settle(looked_on, within_s=30.0)
        await becomes(bench, 2)
    plan = await get(bench, "/v1/plan")
    ended = [event for event in plan["events"] if event["event"] == "ChangeEnded"]
    assert [(event["after"], event["outcome"]) for event in ended] == [
        ("prefill", "converted"), ("decode", "converted"), ("prefill", "converted"),
    ]  # fmt: skip
    assert all("would carry" in e["reason"] for e in plan["events"] if e["event"] == "ChangeBegan")
    assert plan["acting"] and plan["acts"] == plan["gateway"]
    assert set(load.answered) >= {"pd-0", "pd-1", "pd-2"}, "some node was given nothing"
    assert await bench.metric("gateway", 'prfaas_fallbacks_total{rung="error"}') == 0
