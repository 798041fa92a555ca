"""Several gateways over one fleet: one that dies takes nothing with it but its own connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
import pytest

from engine.engine import Engine
from prfaas_net.errors import PeerError
from prfaas_net.localfleet.client import Answer, GatewayClient
from prfaas_net.localfleet.fleet import LocalFleet
from prfaas_net.localfleet.processes import Process
from tests.e2e.conftest import Bench
from tests.e2e.test_fallback import GAUGES, PLAN, Load
from tests.e2e.test_fleet import settle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

# What nodes may take to give back what a gateway held that was killed: its kernel closes its connections at once.
FREED_WITHIN_S = 5.0


class Gateways:
    """Two over one fleet, the first of which can be killed and started again at the same address."""

    def __init__(self, bench: Bench, stack: AsyncExitStack) -> None:
        self.bench = bench
        self._stack = stack
        self._nodes = [name for name in bench.fleet.processes if "node" in name]
        self.first = bench.fleet.processes["gateway"]
        self.urls = [bench.fleet.url]

    async def start(self, listen: str = "127.0.0.1:0") -> Process:
        urls = ["http://{}:{}".format(*self.bench.fleet.processes[name].ready["address"]) for name in self._nodes]
        nodes = [item for url in urls for item in ("--node", url)]
        command = ["gateway", "--listen", listen, "--threshold", str(PLAN.threshold_tokens), *nodes]
        process = await Process.start("another gateway", command)
        self._stack.push_async_callback(process.stop)
        return process

    async def start_first_again(self) -> None:
        self.first = await self.start(self.urls[0].removeprefix("http://"))

    async def held(self) -> float:
        """Everything that nodes hold for requests."""
        return sum(
            [
                await self.bench.metric(name, gauge)
                for name in self._nodes
                for gauge in GAUGES["decode" if "decode" in name else "prefill"]
            ]
        )

    async def fleet_view(self, url: str) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/fleet") as answer:
            view: dict[str, Any] = await answer.json()
            return view


@pytest.fixture
async def gateways(engine: Engine) -> AsyncIterator[Gateways]:
    async with LocalFleet(PLAN) as fleet, AsyncExitStack() as stack:
        gateways = Gateways(Bench(fleet, engine), stack)
        second = await gateways.start()
        gateways.urls.append("http://{}:{}".format(*second.ready["address"]))
        for url in gateways.urls:
            async with GatewayClient(url) as client:
                await client.wait_healthy(within_s=20)
        yield gateways


async def ask(urls: list[str], body: dict[str, Any]) -> tuple[Answer, str]:
    """As a client behind a load balancer: one that breaks is asked no more, and the next one is."""
    for url in urls:
        try:
            async with GatewayClient(url, timeout_s=120) as client:
                return await client.complete(body), url
        except (aiohttp.ClientError, PeerError):
            continue
    raise AssertionError("no gateway answered")


async def test_a_gateway_is_killed_and_started_again_under_load(gateways: Gateways) -> None:
    """Nodes give back what it held; the other one's requests do not notice; its own clients are served by the other;
    and afterwards both know that nothing is held."""
    first, second = gateways.urls
    load = Load(gateways.bench, 12)
    bodies = [
        {
            "prompt": prompt, "max_tokens": s.max_tokens, "temperature": s.temperature, "seed": s.seed,
            "ignore_eos": True, "presence_penalty": s.presence_penalty,
        }
        for prompt, s in load.asks
    ]  # fmt: skip

    # Alone: whatever it held is given back.
    asking = [asyncio.create_task(ask([first], body)) for body in bodies[:4]]
    await settle(partial(_positive, gateways), within_s=20.0)
    gateways.first.kill()
    await settle(partial(_zero, gateways), within_s=FREED_WITHIN_S)
    lost = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(answer, AssertionError) for answer in lost)

    # Beside another one, half of the clients at each; then it comes back, and is used again.
    await gateways.start_first_again()
    orders = [[first, second] if number % 2 else [second] for number in range(len(bodies))]
    asking = [asyncio.create_task(ask(urls, body)) for urls, body in zip(orders, bodies, strict=True)]
    await settle(partial(_positive, gateways), within_s=20.0)
    gateways.first.kill()
    await gateways.start_first_again()
    again = await asyncio.gather(*(ask([first], body) for body in bodies[:2]))
    answers = await asyncio.gather(*asking)
    load.check([answer for answer, _ in answers])
    assert [url for _, url in answers].count(second) >= len(bodies) // 2
    for (answer, url), (prompt, sampling) in zip(again, load.asks[:2], strict=True):
        assert (url, answer.token_ids) == (first, gateways.bench.reference(prompt, sampling))
    await settle(partial(_zero, gateways), within_s=10.0)
    for url in gateways.urls:
        await settle(partial(_knows_of_nothing, gateways, url), within_s=10.0)


async def _positive(gateways: Gateways) -> bool:
    return await gateways.held() > 0


async def _zero(gateways: Gateways) -> bool:
    return await gateways.held() == 0


async def _knows_of_nothing(gateways: Gateways, url: str) -> bool:
    """A gateway's view of the fleet is that of an idle one."""
    view = await gateways.fleet_view(url)
    charged = [node["queue_tokens"] + node["running_requests"] for node in view["nodes"]]
    return view["requests_in_flight"] == 0 and not any(charged) and all(node["up"] for node in view["nodes"])
