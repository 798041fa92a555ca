"""SIGTERM to any daemon under load: what is held ends well, nothing new begins, and it leaves within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import orjson
import pytest

from engine.engine import Engine
from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.localfleet.fleet import ClusterPlace, LocalFleet
from prfaas_net.nodes.engine_api import Sampling
from tests.e2e.conftest import Bench
from tests.e2e.test_fallback import PLAN, Load, fallbacks, in_the_middle, nothing_is_held
from tests.e2e.test_fleet import settle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

# Of the gateway; nodes have what they have by default.
BOUND_S = 4.0


@pytest.fixture
async def bench(engine: Engine) -> AsyncIterator[Bench]:
    place = ClusterPlace(environ={"PRFAAS_GATEWAY__DRAIN_TIMEOUT": f"{BOUND_S}s"})
    async with LocalFleet(replace(PLAN, pd=place)) as fleet:
        async with GatewayClient(fleet.url) as client:
            await client.wait_healthy(within_s=20)
        yield Bench(fleet, engine)


async def test_nodes_that_leave_cost_no_request_and_a_gateway_leaves_in_time(bench: Bench) -> None:
    """A decode node and a prefill node leave while eight clients are served by both; then the gateway, which has a
    stream that does not end."""
    leaving = [bench.fleet.processes[name] for name in ("PD decode node 2", "PrfaaS prefill node")]

    async def strike() -> None:
        await in_the_middle(bench, "PD decode node 2", "prfaas_decode_running_requests")
        for process in leaving:
            process.terminate()

    load = Load(bench, 16)
    load.check(await load.run(strike))
    assert await fallbacks(bench, "error") == 0
    async with asyncio.timeout(20):
        assert [await process.wait() for process in leaving] == [0, 0]
    # Whoever is left serves all of it, and needs no second attempt.
    before = {rung: await fallbacks(bench, rung) for rung in ("prefill_node", "local_prefill", "decode_node")}
    async with GatewayClient(bench.fleet.url) as client:
        name, _ = await client.model()
        answer = await client.complete({"model": name, "prompt": load.asks[3][0], "max_tokens": 4, "temperature": 0})
    assert answer.token_ids == bench.reference(load.asks[3][0], Sampling(max_tokens=4))
    assert before == {rung: await fallbacks(bench, rung) for rung in before}
    await nothing_is_held(bench)
    await check_gateway(bench)


async def check_gateway(bench: Bench) -> None:
    """It says that it leaves, ends what has not ended by its bound with an error, and is gone."""
    gateway, url = bench.fleet.processes["gateway"], bench.fleet.url
    endless = {"prompt": "The early days", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=endless) as stream:
        assert (await stream.content.readline()).startswith(b"data: {")
        gateway.terminate()

        async def said() -> bool:
            async with session.get(f"{url}/ready") as answer:
                return answer.status == 503 and (await answer.json())["status"] == "draining"

        await settle(said, within_s=BOUND_S)
        async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        *_, last = [line async for line in stream.content if line.startswith(b"data: {")]
        assert "stopping" in orjson.loads(last[6:])["error"]["message"]
    # That it ended the stream shows its bound; how long its last steps take is the machine's affair.
    async with asyncio.timeout(30):
        assert await gateway.wait() == 0

    async def idle() -> bool:
        return await bench.metric("PD decode node", "prfaas_kv_arena_used_bytes") == 0

    await settle(idle, within_s=10.0)
