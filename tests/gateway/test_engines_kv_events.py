"""What vLLM and SGLang servers publish of their caches, over real ZeroMQ sockets, steers the gateway's requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from prfaas_net.cache.manager import Match, NodeMatch
from prfaas_net.config import load_config
from prfaas_net.errors import ConfigError
from prfaas_net.gateway import GatewayConfig
from prfaas_net.gateway.engines.ranks import by_node, rank_of
from tests.gateway.conftest import THRESHOLD_TOKENS
from tests.gateway.engine_fakes import (
    EngineBench,
    EngineScript,
    FakeEngine,
    FakeSglang,
    FakeVllm,
    Handovers,
    engine_bench,
    eventually,
)
from tests.gateway.test_zmq_events import Publisher

PAGE = Path(__file__).parent.parent.parent / "docs" / "engines.md"
BLOCK = 16
PROMPT = "".join(chr(65 + i % 50) for i in range(THRESHOLD_TOKENS + 28))  # 8 blocks, a token each character


def stored(first: int, last: int) -> list[Any]:
    """The event for some blocks of PROMPT; block i is called i + 1."""
    tokens = list(PROMPT.encode())[first * BLOCK : last * BLOCK]
    return ["BlockStored", [i + 1 for i in range(first, last)], first or None, tokens, BLOCK]


@asynccontextmanager
async def publishers(n: int) -> AsyncIterator[list[Publisher]]:
    context = zmq.asyncio.Context()
    found = [Publisher(context) for _ in range(n)]
    try:
        yield found
    finally:
        for publisher in found:
            await publisher.close()
        context.destroy(linger=0)


@asynccontextmanager
async def two_ranks() -> AsyncIterator[tuple[Publisher, Publisher]]:
    """Publishers whose ports follow each other."""
    for _ in range(50):
        context = zmq.asyncio.Context()
        first = Publisher(context)
        pub, router = first.ports
        try:
            second = Publisher(context, ports=(pub + 1, router + 1))
        except zmq.ZMQError:
            # The port beside one of the first's is somebody else's.
            await first.close()
            context.destroy(linger=0)
            continue
        try:
            yield first, second
        finally:
            await first.close()
            await second.close()
            context.destroy(linger=0)
        return
    raise AssertionError("no two free ports follow each other")


def follow(engine: FakeEngine, publisher: Publisher, **more: Any) -> None:
    """Have the gateway listen to a publisher as this engine's."""
    endpoint, replay = publisher.endpoints
    times = {"reply": 5, "silence": 0.05}
    engine.settings["kv_events"] = {"endpoint": endpoint, "replay_endpoint": replay, **times, **more}


async def known(bench: EngineBench, blocks: int, name: str) -> None:
    """Wait until so many blocks of a server are known."""
    async with asyncio.timeout(30):
        while True:
            rows = {row["node"]: row for row in (await bench.get("/v1/engines"))[1]}
            if rows[name]["kv_events"]["known_blocks"] == blocks:
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
async def test_the_server_that_has_the_prefix_gets_the_request(kind: type[FakeEngine]) -> None:
    """Before its events the other one did; after it has cleared its cache, again."""
    a, b = (kind(Handovers(), name, "both", "pd") for name in "ab")
    async with publishers(1) as (publisher,):
        follow(b, publisher)
        async with engine_bench(a, b) as bench:
            assert (await bench.record(prompt=PROMPT))["decode_node"] == "a"
            await publisher.publish(stored(0, 8))
            await known(bench, 8, "b")
            record = await bench.record(prompt=PROMPT)
            assert (record["decode_node"], record["cached_in"]) == ("b", {"pd": 112})
            await publisher.publish(["AllBlocksCleared"])
            await known(bench, 0, "b")
            assert (await bench.record(prompt=PROMPT))["decode_node"] == "a"


async def test_what_a_decode_server_holds_counts_against_the_threshold() -> None:
    """A long prompt of which little must be computed stays with the decode server that has the rest."""
    handovers = Handovers()
    prefill, decode = FakeVllm(handovers, "far", "prefill", "prfaas"), FakeVllm(handovers, "near", "decode", "pd")
    async with publishers(1) as (publisher,):
        follow(decode, publisher)
        async with engine_bench(prefill, decode) as bench:
            assert (await bench.record(prompt=PROMPT))["prefill_node"] == "far"
            await publisher.publish(stored(0, 4))
            await known(bench, 4, "near")
            decode.script = EngineScript(cached=64)
            record = await bench.record(prompt=PROMPT)
            assert (record["prefill_node"], record["incremental_tokens"]) == ("near", 128 - 64)


async def test_a_prefill_servers_cache_is_shown_in_the_record() -> None:
    handovers = Handovers()
    engines = [FakeVllm(handovers, name, "prefill", "prfaas") for name in ("far-0", "far-1")]
    async with publishers(1) as (publisher,):
        follow(engines[1], publisher)
        async with engine_bench(*engines, FakeVllm(handovers, "near", "decode", "pd")) as bench:
            await publisher.publish(stored(0, 2))
            await known(bench, 2, "far-1")
            record = await bench.record(prompt=PROMPT)
            assert (record["prefill_node"], record["cached_in"]) == ("far-1", {"prfaas": 32})


async def test_the_rank_that_has_the_prefix_is_named() -> None:
    """Behind one address several ranks cache each for itself; their publishers' ports are counted up."""
    engine = FakeVllm(Handovers(), "a", "both", "pd")
    async with two_ranks() as (first, second):
        follow(engine, first, dp_ranks=2)
        async with engine_bench(engine) as bench:
            await first.publish(stored(0, 2))
            await second.publish(stored(0, 5))
            await known(bench, 7, "a")
            record = await bench.record(prompt=PROMPT)
            assert record["cached_in"] == {"pd": 80}
            assert engine.headers[0]["X-Data-Parallel-Rank"] == "1"
            await bench.record(prompt="z" * 200)
            assert "X-Data-Parallel-Rank" not in engine.headers[1]
            (row,) = (await bench.get("/v1/engines"))[1]
            assert (row["kv_events"]["batches"], row["kv_cache_usage"]) == (2, 0.25)


async def test_following_is_counted() -> None:
    engine = FakeVllm(Handovers(), "a", "both", "pd")
    async with publishers(1) as (publisher,):
        follow(engine, publisher)
        async with engine_bench(engine) as bench:
            await publisher.publish(stored(0, 2))
            await known(bench, 2, "a")
            async with bench.http.get(f"{bench.gateway.url}/metrics/engines") as answer:
                text = await answer.text()
            assert 'prfaas_engine_kv_known_blocks{prfaas_node="a",prfaas_cluster="pd"} 2' in text
            assert 'prfaas_engine_kv_batches_total{prfaas_node="a",prfaas_cluster="pd"} 1' in text
            rows = {row["node"]: row for row in (await bench.get("/v1/fleet"))[1]["nodes"]}
            assert rows["a"]["cached_blocks"] == 2


async def test_events_that_are_of_no_use_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """A router that is taken to know caches and knows only load says so, once."""
    engine = FakeVllm(Handovers(), "a", "both", "pd")
    async with publishers(1) as (publisher,):
        follow(engine, publisher)
        async with engine_bench(engine) as bench:
            for _ in range(20):
                await publisher.publish(["BlockStored", [7], 6, list(range(BLOCK)), BLOCK])
            await eventually(lambda: "no block that can be used" in caplog.text)
            (row,) = (await bench.get("/v1/engines"))[1]
            assert row["kv_events"]["known_blocks"] == 0 and row["kv_events"]["unplaced"] >= 16
        assert caplog.text.count("no block that can be used") == 1


def test_ranks_are_one_server() -> None:
    match = Match((NodeMatch("a#0", "x", 16, 16), NodeMatch("a#1", "x", 48, 64), NodeMatch("b", "y", 32, 32)))
    assert {held.node_id: held.usable_tokens for held in by_node(match).nodes} == {"a": 48, "b": 32}
    assert [rank_of(match, name) for name in ("a", "b", "c")] == [1, None, None]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a node of ours says itself": ({"kind": "prfaas", "role": "decode"}, "cannot be told"),
    "no role": ({"kind": "vllm", "cluster": "pd"}, "does not say what it is for"),
    "no cluster": ({"kind": "vllm", "role": "both"}, "does not say what it is for"),
    "unknown kind": ({"kind": "trt", "role": "both", "cluster": "pd"}, "kind"),
    "a key that is near": ({"kind": "vllm", "role": "both", "clustr": "pd"}, "clustr"),
    "no bootstrap server": ({"kind": "sglang", "role": "prefill", "cluster": "pd"}, "bootstrap"),
    "a bootstrap server of vLLM": (
        {"kind": "vllm", "role": "prefill", "cluster": "pd", "bootstrap": "a:1"}, "for sglang servers",
    ),
    "a connector that decodes": (
        {"kind": "vllm", "role": "decode", "cluster": "pd", "connector": "a:1"}, "of role prefill alone",
    ),
    "an endpoint that is none": (
        {"kind": "vllm", "role": "both", "cluster": "pd", "kv_events": "10.0.0.1:5557"}, "not an address",
    ),
    "ranks without a port": (
        {"kind": "vllm", "role": "both", "cluster": "pd", "kv_events": {"endpoint": "ipc://x", "dp_ranks": 2}},
        "count up from",
    ),
    "a prefill server that may not compute": (
        {"kind": "vllm", "role": "prefill", "cluster": "pd", "computes_prompts": False}, "of role decode alone",
    ),
    "a name with a mark": ({"kind": "vllm", "role": "both", "cluster": "pd", "name": "a#1"}, "has no '#'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_does_not_fit_says_what_is_wrong(case: str) -> None:
    section, problem = BAD[case]
    flags = {"model": "m", "nodes": [{"url": "http://127.0.0.1:1", **section}]}
    with pytest.raises(ConfigError, match=problem):
        load_config(GatewayConfig, flags=flags)


@pytest.mark.parametrize("example", re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL))
def test_the_examples_of_the_page_are_configurations(example: str, tmp_path: Path) -> None:
    """Whoever copies them starts from something that works."""
    path = tmp_path / "gateway.toml"
    path.write_text(example)
    assert load_config(GatewayConfig, path).nodes[0].kind in ("vllm", "sglang")


TOGETHER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two kinds": ({"kind": "sglang"}, {}, "of one kind"),
    "one name": ({"name": "x"}, {"name": "x"}, "one name"),
    "blocks that differ": (
        {"kv_events": "tcp://h:1"}, {"kv_events": {"endpoint": "tcp://h:2", "block_tokens": 32}}, "kv_events differ",
    ),
    "groups that differ": (
        {"kv_events": "tcp://h:1"},
        {"kv_events": {"endpoint": "tcp://h:2", "groups": [{"group": 0, "kind": "linear"}]}}, "kv_events differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER)
def test_servers_that_cannot_share_a_gateway(case: str) -> None:
    *own, problem = TOGETHER[case]
    common = {"kind": "vllm", "role": "both", "cluster": "pd"}
    nodes = [{**common, "url": f"http://127.0.0.1:{i + 1}", **section} for i, section in enumerate(own)]
    with pytest.raises(ConfigError, match=problem):
        load_config(GatewayConfig, flags={"model": "m", "nodes": nodes})
