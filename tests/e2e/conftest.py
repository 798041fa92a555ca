"""A whole fleet as real processes, and the model once more in this process to compare with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from engine.engine import Engine
from prfaas_net.cli.models import demo_documents, load_engine, load_tokenizer
from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.localfleet.fleet import FleetPlan, LocalFleet
from prfaas_net.nodes.engine_api import Sampling

PLAN = FleetPlan(port=0, threshold_tokens=300, link_rate="50Mbps", arena="64MiB")


class Bench:
    """The fleet, and what it should answer."""

    def __init__(self, fleet: LocalFleet, engine: Engine) -> None:
        self.fleet = fleet
        self.engine = engine
        self.tokenizer = load_tokenizer(None)
        self.long_text = demo_documents()["long"]

    def reference(self, token_ids: list[int], sampling: Sampling) -> list[int]:
        return self.engine.generate(token_ids, sampling)

    async def metric(self, process: str, name: str) -> float:
        """One sample of a daemon's /metrics."""
        url = "http://{}:{}/metrics".format(*self.fleet.processes[process].ready["address"])
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            for line in (await response.text()).splitlines():
                if line.split(" ")[0] == name:
                    return float(line.split(" ")[1])
        raise AssertionError(f"{process} has no {name}")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(None)


@pytest.fixture
async def bench(engine: Engine) -> AsyncIterator[Bench]:
    async with LocalFleet(PLAN) as fleet:
        async with GatewayClient(fleet.url) as client:
            await client.wait_healthy(within_s=20)
        yield Bench(fleet, engine)
