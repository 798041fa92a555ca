"""The gateway in front of a prefill server and a decode server of vLLM: both are asked at once, under one name."""

from __future__ import annotations

import asyncio

from tests.vllm.servers import Client, Pair, gateway
from tests.vllm.test_two_servers import N_TOKENS, prompt_of, until_free


async def test_long_prompts_are_prefilled_in_the_other_site_and_short_ones_are_not(pair: Pair, client: Client) -> None:
    """The tokens are those of one server either way."""
    expected = [await client.alone(pair.decode, prompt_of(pair, length), N_TOKENS) for length in (33, 900)]
    async with pair.path(), gateway(pair) as url:
        sizes = []
        for length, tokens in zip((33, 900), expected, strict=True):
            before = (await client.metrics(pair.decode)).get("vllm:prfaas_received_bytes_total", 0.0)
            answer = await client.ask(url, prompt_of(pair, length), N_TOKENS)
            assert answer.status == 200, answer.body
            assert answer.tokens == tokens
            sizes.append((await client.metrics(pair.decode)).get("vllm:prfaas_received_bytes_total", 0.0) - before)
    assert sizes[0] == 0
    assert sizes[1] > 0
    await until_free(client, pair.prefill, pair.decode)


async def test_many_requests_through_the_gateway_do_not_mix(pair: Pair, client: Client) -> None:
    """Four prompts at once, of which each has its own transfer."""
    prompts = [prompt_of(pair, length) for length in (70, 130, 300, 900)]
    expected = [await client.alone(pair.decode, prompt, N_TOKENS) for prompt in prompts]
    async with pair.path(), gateway(pair) as url:
        answers = await asyncio.gather(*(client.ask(url, prompt, N_TOKENS) for prompt in prompts))
    assert [answer.status for answer in answers] == [200] * 4, [answer.body for answer in answers]
    assert [answer.tokens for answer in answers] == expected
    await until_free(client, pair.prefill, pair.decode)
