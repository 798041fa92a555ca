"""A gateway before a fleet of pretend nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from prfaas_net.gateway import Gateway, GatewayConfig

from .fakes import ByteTokenizer, FakeFleet, fake_fleet

THRESHOLD_TOKENS = 100


@dataclass
class Bench:
    """A running gateway and what it stands on."""

    gateway: Gateway
    fleet: FakeFleet
    http: aiohttp.ClientSession

    async def post(
        self, path: str, body: Any, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, parsed body and headers of a POST; ``body`` may be bytes to send as they are."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(f"{self.gateway.url}{path}", data=data, headers=headers) as answer:
            return answer.status, orjson.loads(await answer.read()), dict(answer.headers)

    async def complete(self, **body: Any) -> Any:
        """The parsed body of a successful completion."""
        status, answer, _ = await self.post("/v1/completions", {"prompt": "Hi", **body})
        assert status == 200, answer
        return answer

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[Any]:
        """Every event of a streamed answer; ``"[DONE]"`` as itself."""
        body = {"prompt": "Hi", "stream": True, **body}
        async with self.http.post(f"{self.gateway.url}{path}", data=orjson.dumps(body)) as answer:
            assert answer.status == 200, await answer.text()
            raw = await answer.read()
        events = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
        return ["[DONE]" if event == b"[DONE]" else orjson.loads(event) for event in events]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.gateway.url}{path}") as answer:
            return answer.status, orjson.loads(await answer.read())

    async def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of ``/metrics``; 0 if it is not there."""
        return self.count(name, **labels)

    def count(self, name: str, **labels: str) -> float:
        """The same, at once."""
        return self.gateway.instruments.metrics.registry.get_sample_value(name, labels) or 0.0

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key="unused", max_retries=0)

    def assert_nothing_held(self) -> None:
        """No request is charged to any node any more."""
        self.gateway.router.validate_state()
        assert not self.gateway.router.state.assignments


OpenBench = Callable[..., AbstractAsyncContextManager[Bench]]


def config_for(fleet: FakeFleet, /, **settings: Any) -> GatewayConfig:
    """A configuration for a fleet, on a free port."""
    defaults: dict[str, Any] = {
        "http": {"port": 0},
        "model": "fake",
        "threshold_tokens": THRESHOLD_TOKENS,
        "request_deadline": 20,
        "nodes": [{"url": node.url} for node in fleet.nodes],
        # A machine that is busy must not look like a node that is gone.
        "fleet": {"poll_interval": 0.02, "poll_timeout": 10},
    }
    return GatewayConfig.model_validate({**defaults, **settings})


@asynccontextmanager
async def open_bench(
    *,
    fleet_key: str | None = None,
    prepare: Callable[[FakeFleet], object] = lambda fleet: None,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """A gateway with three nodes, which ``prepare`` may change before they start."""
    async with (
        fake_fleet(fleet_key, prepare) as fleet,
        aiohttp.ClientSession() as http,
        Gateway(config_for(fleet, **settings), ByteTokenizer()) as gateway,
    ):
        yield Bench(gateway, fleet, http)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A gateway with three nodes; at the end of the test nothing may be held anywhere."""
    async with open_bench() as bench:
        yield bench
        await bench.fleet.all_idle()
        bench.assert_nothing_held()
