"""Cached prefixes in a whole fleet of real processes: the same answers, less work, less on the link."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.nodes.engine_api import Sampling
from tests.e2e.conftest import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BLOCK = 256  # the default of [cache] block_tokens


async def ask(client: GatewayClient, prompt: list[int], **body: Any) -> Any:
    """One explained completion of 8 tokens."""
    name, _ = await client.model()
    return await client.complete({"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, **body})


async def known_to_the_gateway(client: GatewayClient, prompt: list[int], tokens: int) -> Any:
    """Ask until the gateway has heard of what the prompt before has left behind: a matter of milliseconds."""
    async with asyncio.timeout(10):
        while (answer := await ask(client, prompt)).record["cached_in"].get("prfaas", 0) < tokens:
            pass
    return answer


async def test_a_second_long_prompt_prefills_its_tail_and_sends_the_increment(bench: Bench) -> None:
    """usage tells the truth, explain shows both savings, and the tokens are those of a single process without cache."""
    ids = bench.tokenizer.encode(bench.long_text)
    prompt, turn = ids[:1000], ids[:1000] + ids[3000:3400]
    expected = {len(p): bench.reference(p, Sampling(max_tokens=8)) for p in (prompt, turn)}
    async with GatewayClient(bench.fleet.url) as client:
        first = await ask(client, prompt)
        assert first.record["cached_tokens"] == first.record["held_tokens"] == 0
        again = await known_to_the_gateway(client, prompt, 3 * BLOCK)
        longer = await ask(client, turn)
        salted = await ask(client, prompt, cache_salt="somebody else")
    for answer, n_tokens in ((first, 1000), (again, 1000), (longer, 1400), (salted, 1000)):
        assert answer.token_ids == expected[n_tokens]
        assert answer.record["prefilled_in"] == "prfaas"
        assert answer.record["incremental_tokens"] == n_tokens - answer.record["cached_tokens"]
    row_bytes = first.record["kv_bytes"]["full"] // 1000
    for answer, n_tokens in ((again, 1000), (longer, 1400)):
        assert (answer.record["cached_tokens"], answer.record["held_tokens"]) == (3 * BLOCK, 3 * BLOCK)
        assert answer.record["kv_bytes"]["full"] == (n_tokens - 3 * BLOCK) * row_bytes
        assert answer.usage["prompt_tokens_details"] == {"cached_tokens": 3 * BLOCK}
    assert salted.record["cached_tokens"] == salted.record["held_tokens"] == 0
    for process in ("PrfaaS prefill node", "PD decode node"):
        async with asyncio.timeout(5):
            while await bench.metric(process, "prfaas_kv_arena_used_bytes"):  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.02)
