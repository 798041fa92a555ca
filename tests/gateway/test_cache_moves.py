"""Prefixes move between real nodes behind a gateway: for a request that waits for one, and because they are hot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from prfaas_net.cache.advice import AdvicePolicy, Advisor
from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.congestion.verdict import LinkState
from prfaas_net.gateway import Gateway, GatewayConfig, cache_desk, cache_moves
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode import DecodeNode
from prfaas_net.nodes.engine_api import Sampling
from prfaas_net.nodes.prefill import PrefillNode
from prfaas_net.scheduling import LinkSeen
from tests.gateway.fakes import ByteTokenizer
from tests.nodes.hash_engine import LAYOUT, HashEngine
from tests.waiting import until

BLOCK, N_CACHED = 32, 288
PROMPT = [(7 * i + 3) % 1000 for i in range(300)]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy must not look like a copy that is slow."""
    monkeypatch.setattr(cache_moves, "PATIENCE_S", 15.0)


@dataclass
class Fleet:
    """A prefill node far away and one at home, a decode node, and a gateway."""

    gateway: Gateway
    http: aiohttp.ClientSession
    far: PrefillNode
    near: PrefillNode
    engine: HashEngine

    async def ask(self, **body: Any) -> Any:
        """The record of a request whose tokens are right."""
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, "explain": True, **body}
        async with self.http.post(f"{self.gateway.url}/v1/completions", json=body) as answer:
            got = await answer.json()
        assert answer.status == 200, got
        expected = HashEngine().generate(PROMPT, Sampling(max_tokens=4))
        assert got["choices"][0]["token_ids"] == expected
        return got["prfaas"]

    async def cache(self) -> Any:
        async with self.http.get(f"{self.gateway.url}/v1/cache") as answer:
            return await answer.json()

    async def known(self, node: str) -> None:
        """Wait until the gateway knows that a node caches something."""
        async with asyncio.timeout(30):
            while not (await self.cache())["nodes"].get(node, {}).get("blocks"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def join(self) -> None:
        """Let the router know of a link with room, as a node's telemetry would."""
        for pair in (("prfaas", "pd"), ("pd", "prfaas")):
            event = LinkSeen(*pair, LinkState.CLEAR, 1e9, 1e9)
            self.gateway.router.observe(event, now=self.gateway.clock.now())

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.instruments.metrics.registry.get_sample_value(name, labels) or 0.0

    async def settled(self) -> None:
        """No node holds a buffer."""
        await until(lambda: not self.far.memory.used_bytes and not self.near.memory.used_bytes, within_s=20)


@asynccontextmanager
async def fleet_of(policy: str, **settings: Any) -> AsyncIterator[Fleet]:
    engine = HashEngine()
    common = {"kv": {"arena": "8MiB"}, "cache": {"block_tokens": BLOCK, "state_interval_tokens": 4 * BLOCK}}

    def config(role: str, name: str, cluster: str) -> NodeConfig:
        return NodeConfig.model_validate({"role": role, "node_id": name, "cluster": cluster, **common})

    far = PrefillNode(config("prefill", "far", "prfaas"), HashEngine())
    near = PrefillNode(config("prefill", "near", "pd"), engine)
    decode = DecodeNode(config("decode", "decode", "pd"), HashEngine())
    async with AsyncExitStack() as stack:
        for node in (far, near, decode):
            await node.start()
            stack.push_async_callback(node.close)
        urls = ["http://{}:{}".format(*node.control.address) for node in (far, near, decode)]
        defaults: dict[str, Any] = {
            "http": {"port": 0}, "model": "hash", "policy": policy, "threshold_tokens": 100,
            "nodes": [{"url": url} for url in urls],
            # Links are told of by the tests.
            "fleet": {"poll_interval": 0.05, "poll_timeout": 10, "follow_state": False},
        }  # fmt: skip
        gateway = Gateway(GatewayConfig.model_validate({**defaults, **settings}), ByteTokenizer())
        await stack.enter_async_context(gateway)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = Fleet(gateway, http, far, near, engine)
        yield fleet
        await fleet.settled()
        gateway.router.validate_state()


async def test_a_request_waits_for_a_prefix_that_is_cheaper_to_copy_than_to_compute() -> None:
    """The paper's abundant bandwidth: the longest prefix anywhere counts, and comes to where the prompt is computed."""
    async with fleet_of("threshold") as fleet:
        assert (await fleet.ask())["prefill_node"] == "far"
        await fleet.known("far")
        fleet.join()
        record = await fleet.ask()
        assert (record["prefill_node"], record["cached_tokens"]) == ("near", N_CACHED)
        assert fleet.engine.started_at == [N_CACHED]
        assert f"a prefix of {N_CACHED} tokens was copied from far" in record["reasons"]
        assert "copied" in record["stages_s"]
        assert fleet.metric("prfaas_cache_moves_total", why="request", outcome="done") == 1
        assert fleet.metric("prfaas_cache_moved_bytes_total") > 0


async def test_requests_that_want_one_prefix_wait_for_one_copy() -> None:
    async with fleet_of("threshold") as fleet:
        await fleet.ask()
        await fleet.known("far")
        fleet.join()
        records = await asyncio.gather(*(fleet.ask() for _ in range(4)))
        assert {record["prefill_node"] for record in records} == {"near"}
        assert fleet.engine.started_at == [N_CACHED] * 4
        assert fleet.metric("prfaas_cache_moves_total", why="request", outcome="done") == 1


async def test_a_copy_that_fails_costs_no_request_its_answer() -> None:
    """The prefix was evicted a moment ago: the prompt is computed, and the record says why."""
    async with fleet_of("threshold") as fleet:
        await fleet.ask()
        await fleet.known("far")
        await fleet.settled()
        fleet.far.memory.cache.drop_all()
        fleet.join()
        record = await fleet.ask()
        assert fleet.engine.started_at == [0] and record["prefill_node"] == "near"
        assert any("no prefix copied from far: the prefix is not cached here" in reason for reason in record["reasons"])
        assert fleet.metric("prfaas_cache_moves_total", why="request", outcome="failed") == 1
        # For a while nobody waits for another.
        assert fleet.gateway.router.policy.copies
        assert "copied" not in (await fleet.ask())["stages_s"]


async def test_a_copy_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet_of("threshold") as fleet:
        await fleet.ask()
        await fleet.known("far")
        fleet.join()
        monkeypatch.setattr(cache_moves, "PATIENCE_S", 0.0)
        monkeypatch.setattr(cache_moves, "PATIENCE_RATIO", 0.0)
        record = await fleet.ask()
        assert fleet.engine.started_at == [0]
        assert any(reason.startswith("no prefix copied from far") for reason in record["reasons"])


async def test_salted_prompts_leave_their_prefix_where_it_is() -> None:
    async with fleet_of("threshold") as fleet:
        await fleet.ask(cache_salt="mine")
        await fleet.known("far")
        fleet.join()
        record = await fleet.ask(cache_salt="mine")
        assert "copied" not in record["stages_s"]
        assert fleet.metric("prfaas_cache_moves_total", why="request", outcome="done") == 0


async def test_a_prefix_that_is_hot_elsewhere_is_copied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advised, done, and reported as done; the next request at home starts from it."""
    monkeypatch.setattr(cache_moves, "ADVISE_EVERY_S", 0.02)
    advisor = Advisor(AdvicePolicy(copy_gain=0.0001, copy_hits_per_s=0.0001))
    monkeypatch.setattr(cache_desk, "Advisor", lambda: advisor)
    async with fleet_of("remote") as fleet:
        await fleet.ask()
        await fleet.known("far")
        fleet.join()
        keys = prefix_keys(PrefixScope(LAYOUT.fingerprint, BLOCK), PROMPT)[: N_CACHED // BLOCK * KEY_BYTES]
        advisor.used(keys, N_CACHED, "pd", private=False, now=fleet.gateway.clock.now())
        await fleet.known("near")
        await until(lambda: advisor.counters["done"], within_s=30)
        assert (advisor.counters["advised"], advisor.counters["failed"], advisor.outstanding) == (1, 0, ())
        assert fleet.metric("prfaas_cache_moves_total", why="advice", outcome="done") == 1


async def test_advice_that_cannot_be_followed_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source has lost the prefix: it is not asked for again at once."""
    monkeypatch.setattr(cache_moves, "ADVISE_EVERY_S", 0.02)
    advisor = Advisor(AdvicePolicy(copy_gain=0.0001, copy_hits_per_s=0.0001))
    monkeypatch.setattr(cache_desk, "Advisor", lambda: advisor)
    async with fleet_of("remote") as fleet:
        await fleet.ask()
        await fleet.known("far")
        await fleet.settled()
        fleet.far.memory.cache.drop_all()
        fleet.join()
        keys = prefix_keys(PrefixScope(LAYOUT.fingerprint, BLOCK), PROMPT)[: N_CACHED // BLOCK * KEY_BYTES]
        advisor.used(keys, N_CACHED, "pd", private=False, now=fleet.gateway.clock.now())
        await until(lambda: advisor.counters["failed"], within_s=30)
        assert advisor.outstanding == ()
