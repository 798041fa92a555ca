"""Kill -9 of any part of a fleet under eight clients: every request is answered, and answered right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from engine.engine import Engine
from prfaas_net.localfleet.client import Answer, GatewayClient
from prfaas_net.localfleet.fleet import FleetPlan, LocalFleet
from prfaas_net.nodes.engine_api import Sampling
from tests.e2e.conftest import Bench
from tests.e2e.test_fleet import settle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CLIENTS = 8
PLAN = FleetPlan(port=0, threshold_tokens=300, link_rate="20Mbps", arena="64MiB", decode_nodes=2)
# Where each request holds something while it runs, and nothing afterwards.
GAUGES = {
    "decode": ("prfaas_kv_arena_used_bytes", "prfaas_decode_running_requests"),
    "prefill": ("prfaas_kv_arena_used_bytes", "prfaas_prefill_queue_requests"),
}


@pytest.fixture
async def bench(engine: Engine, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    """A fleet with two decode nodes; its threshold may be a parameter."""
    plan = replace(PLAN, threshold_tokens=getattr(request, "param", PLAN.threshold_tokens))
    async with LocalFleet(plan) as fleet:
        async with GatewayClient(fleet.url) as client:
            await client.wait_healthy(within_s=20)
        yield Bench(fleet, engine)


class Load:
    """Eight clients, each with a request of its own: long and short prompts, greedy and sampled, some counted."""

    def __init__(self, bench: Bench, max_tokens: int) -> None:
        ids = bench.tokenizer.encode(bench.long_text)
        self.bench = bench
        self.asks: list[tuple[list[int], Sampling]] = []
        for i in range(CLIENTS):
            prompt = ids[60 * i : 60 * i + (90 if i % 4 == 3 else 900)]
            penalty = 0.4 if i == 5 else 0.0
            sampling = Sampling(
                temperature=0.8 * (i % 3), seed=i, max_tokens=max_tokens, ignore_eos=True, presence_penalty=penalty
            )
            self.asks.append((prompt, sampling))

    async def run(self, strike: Callable[[], Any]) -> list[Answer]:
        """The answers of all clients, ``strike`` having been called while they were under way."""
        async with GatewayClient(self.bench.fleet.url, timeout_s=120) as client:
            name, _ = await client.model()
            asking = [
                asyncio.create_task(
                    client.complete(
                        {
                            "model": name, "prompt": prompt, "max_tokens": s.max_tokens, "temperature": s.temperature,
                            "seed": s.seed, "ignore_eos": True, "presence_penalty": s.presence_penalty,
                        }
                    )
                )
                for prompt, s in self.asks
            ]  # fmt: skip
            try:
                await strike()
                return await asyncio.gather(*asking)
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    def check(self, answers: list[Answer]) -> None:
        """Every answer is that of a single process: no token twice, none missing, none different."""
        for (prompt, sampling), answer in zip(self.asks, answers, strict=True):
            assert answer.token_ids == self.bench.reference(prompt, sampling)


async def fallbacks(bench: Bench, rung: str) -> float:
    return await bench.metric("gateway", f'prfaas_fallbacks_total{{rung="{rung}"}}')


async def nothing_is_held(bench: Bench) -> None:
    """All that is left of the fleet goes back to where it was."""

    async def idle() -> bool:
        for name, process in bench.fleet.processes.items():
            role = next((role for role in GAUGES if f"{role} node" in name), None)
            if role is not None and process.returncode is None:
                for gauge in GAUGES[role]:
                    if await bench.metric(name, gauge) != 0:
                        return False
        return await bench.metric("gateway", "prfaas_requests_in_flight") == 0

    await settle(idle, within_s=10.0)


async def in_the_middle(bench: Bench, victim: str, gauge: str) -> None:
    """Wait until a node is at work, and a little longer: a transfer is under way."""

    async def at_work() -> bool:
        return await bench.metric(victim, gauge) > 0

    await settle(at_work, within_s=20.0)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("bench", "victim", "rung"),
    [(300, "PrfaaS prefill node", "local_prefill"), (5000, "PD prefill node", "prefill_node")],
    indirect=["bench"],
    ids=["prfaas", "pd"],
)
async def test_kill_9_of_a_prefill_node(bench: Bench, victim: str, rung: str) -> None:
    """Prompts that it had are computed by the other one."""

    async def strike() -> None:
        await in_the_middle(bench, victim, "prfaas_kv_arena_used_bytes")
        bench.fleet.processes[victim].kill()

    load = Load(bench, 12)
    load.check(await load.run(strike))
    assert await fallbacks(bench, rung) > 0
    assert await fallbacks(bench, "error") == 0
    await nothing_is_held(bench)


async def test_kill_9_of_the_link(bench: Bench) -> None:
    """What was to cross it is computed at home once the senders have given it up."""

    async def strike() -> None:
        await in_the_middle(bench, "PrfaaS prefill node", "prfaas_kv_arena_used_bytes")
        for name, process in bench.fleet.processes.items():
            if name.startswith("link shaper"):
                process.kill()

    load = Load(bench, 12)
    answers = await load.run(strike)
    load.check(answers)
    assert await fallbacks(bench, "local_prefill") > 0
    assert await fallbacks(bench, "error") == 0
    steps = [step for answer in answers for step in answer.record["fallbacks"]]
    assert any(step["failed"] == "link from prfaas-prefill-0" for step in steps)
    await nothing_is_held(bench)


async def test_kill_9_of_a_decode_node_while_it_lands_and_decodes(bench: Bench) -> None:
    """Its streams go on from the other one, token for token; what was landing lands there."""

    async def strike() -> None:
        async def decoding() -> bool:
            return await bench.metric("PD decode node", "prfaas_decode_tokens_total") > 5

        await settle(decoding, within_s=30.0)
        bench.fleet.processes["PD decode node"].kill()

    load = Load(bench, 200)
    answers = await load.run(strike)
    load.check(answers)
    assert await fallbacks(bench, "decode_node") > 0
    assert await fallbacks(bench, "error") == 0
    steps = [step for answer in answers for step in answer.record["fallbacks"]]
    assert any(step["answered_tokens"] > 0 for step in steps), "no stream had begun"
    await nothing_is_held(bench)


async def test_kill_9_of_a_decode_node_while_everything_is_on_its_way_to_it(bench: Bench) -> None:
    """Nothing has landed: prompts are computed again for the other one, from what their prefill node has cached."""

    async def strike() -> None:
        await in_the_middle(bench, "PD decode node", "prfaas_kv_arena_used_bytes")
        bench.fleet.processes["PD decode node"].kill()

    load = Load(bench, 12)
    load.check(await load.run(strike))
    assert await fallbacks(bench, "decode_node") > 0
    assert await fallbacks(bench, "error") == 0
    await nothing_is_held(bench)


async def test_after_a_kill_the_fleet_serves_without_the_node(bench: Bench) -> None:
    """It is taken out, and later requests are not even tried there."""
    bench.fleet.processes["PrfaaS prefill node"].kill()

    async def noticed() -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{bench.fleet.url}/health") as response:
            nodes = (await response.json())["nodes"]
        return not next(node["up"] for node in nodes if node["cluster"] == "prfaas")

    await settle(noticed, within_s=10.0)
    ids = bench.tokenizer.encode(bench.long_text)[:800]
    async with GatewayClient(bench.fleet.url) as client:
        name, _ = await client.model()
        answer = await client.complete({"model": name, "prompt": ids, "max_tokens": 8, "temperature": 0})
    assert answer.token_ids == bench.reference(ids, Sampling(max_tokens=8))
    assert answer.record["prefilled_in"] == "pd"
    assert not answer.record["fallbacks"]
    assert any("prfaas" in reason.lower() for reason in answer.record["reasons"])
