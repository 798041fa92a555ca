"""A prefill server and a decode server give the tokens that one server gives, whatever happens between them.

Prompts are those of some that were looked at whose greedy tokens are the clearest: they do not hang on rounding, which
differs between running a prompt whole and running its last token alone.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid

import pytest

from tests.vllm.servers import Client, Pair, Server, gateway
from tests.waiting import until

N_TOKENS = 16
CHUNK = 128  # --max-num-batched-tokens
# Length to seed.
PROMPTS = {
    "gptoss-swa-sink": {5: 3, 33: 2, 70: 2, 130: 4, 300: 3, 900: 14},
    "qwen3next-gdn-gqa": {5: 21, 33: 11, 70: 21, 130: 20, 300: 6, 900: 8},
    "deepseekv3-mla576": {5: 10, 33: 16, 70: 10, 130: 5, 300: 17, 900: 7},
}
SLOW_BPS = 2_000_000
# vLLM keeps no prefixes of recurrent models unless it is told to, and none of latents on a CPU.
KEEPS_PREFIXES = {"gptoss-swa-sink"}
SITE_BPS, SITE_RTT_S = 200_000_000, 0.040


def prompt_of(pair: Pair, length: int) -> list[int]:
    generator = random.Random(f"{PROMPTS[pair.model][length]} {length}")
    return [generator.randrange(5, 260) for _ in range(length)]


async def used_blocks(client: Client, server: Server) -> float:
    return (await client.metrics(server))["vllm:kv_cache_usage_perc"]


async def until_free(client: Client, *servers: Server) -> None:
    """No block is held by any request."""
    async with asyncio.timeout(60):
        for server in servers:
            while await used_blocks(client, server) > 0:  # noqa: ASYNC110 - another process's doing
                await asyncio.sleep(0.2)


@pytest.mark.parametrize("length", [5, 33, 70, 130, 300])
async def test_two_steps_give_the_tokens_of_one_server(pair: Pair, client: Client, length: int) -> None:
    """Less than a block, more than a window, and several chunks of prefill."""
    prompt = prompt_of(pair, length)
    expected = await client.alone(pair.decode, prompt, N_TOKENS)
    before = await client.metrics(pair.decode)
    async with pair.path():
        answer = await client.two_step(pair, prompt, N_TOKENS)
    assert answer.tokens == expected
    after = await client.metrics(pair.decode)
    received = "vllm:prfaas_received_bytes_total"
    assert after[received] > before.get(received, 0.0), pair.decode.last_words()
    await until_free(client, pair.prefill, pair.decode)


async def test_both_at_once_give_the_tokens_of_one_server(pair: Pair, client: Client) -> None:
    """The decode server reserves first, and layers land while later layers and chunks are computed."""
    for length in (70, 900):
        prompt = prompt_of(pair, length)
        expected = await client.alone(pair.decode, prompt, N_TOKENS)
        async with pair.path():
            assert (await client.at_once(pair, prompt, N_TOKENS)).tokens == expected
    await until_free(client, pair.prefill, pair.decode)


async def test_many_requests_at_once_do_not_mix(pair: Pair, client: Client) -> None:
    """Half of them in two steps, half at once, in one batch on both sides."""
    lengths = [33, 70, 130, 300]
    prompts = [prompt_of(pair, length) for length in lengths]
    expected = [await client.alone(pair.decode, prompt, N_TOKENS) for prompt in prompts]
    async with pair.path():
        steps = [client.two_step(pair, prompt, N_TOKENS) for prompt in prompts]
        at_once = [client.at_once(pair, prompt, N_TOKENS) for prompt in prompts]
        answers = await asyncio.gather(*steps, *at_once)
    assert [answer.tokens for answer in answers] == 2 * expected
    await until_free(client, pair.prefill, pair.decode)


async def test_a_prefix_that_either_side_has_is_used(pair: Pair, client: Client) -> None:
    """The same prompt again: the prefill server computes less, and of what the decode server has nothing is sent."""
    prompt = prompt_of(pair, 900)
    expected = await client.alone(pair.decode, prompt, N_TOKENS)
    sizes = []
    async with pair.path():
        fresh = uuid.uuid4().hex
        for salt in (fresh, fresh, None):
            before = (await client.metrics(pair.decode)).get("vllm:prfaas_received_bytes_total", 0.0)
            answer = await client.two_step(pair, prompt, N_TOKENS, salt=salt)
            assert answer.tokens == expected
            after = (await client.metrics(pair.decode))["vllm:prfaas_received_bytes_total"]
            sizes.append(after - before)
    first, with_prefix, salted = sizes
    assert first == salted
    if pair.model in KEEPS_PREFIXES:
        assert with_prefix < first / 2
    await until_free(client, pair.prefill, pair.decode)


async def test_a_request_that_is_given_up_during_the_transfer_frees_both_sides(pair: Pair, client: Client) -> None:
    """A client leaves while its KVCache is crossing a thin path; the next one is served as if nothing had been."""
    prompt = prompt_of(pair, 900)
    async with pair.path(SLOW_BPS) as relay:
        params = await client.prefill(pair, prompt)
        asking = asyncio.create_task(client.ask(pair.decode, prompt, N_TOKENS, params, salt="given up"))
        try:
            await until(lambda: relay.forwarded_bytes > 100_000, within_s=30)
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        await until_free(client, pair.decode, pair.prefill)
    expected = await client.alone(pair.decode, prompt, N_TOKENS)
    async with pair.path():
        assert (await client.two_step(pair, prompt, N_TOKENS)).tokens == expected


async def test_two_sites_40_ms_apart_at_200_mbps(pair: Pair, client: Client, show: list[str]) -> None:
    """The tokens are the same, and how much of the transfer was not hidden behind prefill is shown."""
    prompt = prompt_of(pair, 900)
    expected = await client.alone(pair.decode, prompt, N_TOKENS)
    names = ("received_bytes_total", "received_seconds_sum", "received_exposed_seconds_sum")
    async with pair.path(SITE_BPS, SITE_RTT_S):
        for way in (client.two_step, client.at_once):
            # A first one opens the connections.
            await way(pair, prompt_of(pair, 70), 1)
            before = await client.metrics(pair.decode)
            started = time.monotonic()
            assert (await way(pair, prompt, N_TOKENS)).tokens == expected
            total_s = time.monotonic() - started
            after = await client.metrics(pair.decode)
            n_bytes, load_s, exposed_s = (
                after[f"vllm:prfaas_{name}"] - before[f"vllm:prfaas_{name}"] for name in names
            )
            if way == client.two_step:
                exposed_s = load_s  # prefill had ended before it began
            show.append(
                f"{pair.model}, 900 tokens, {way.__name__}, 40 ms 200 Mbps: {n_bytes / 1e6:.2f} MB "
                f"({8 * n_bytes / SITE_BPS * 1e3:.0f} ms on the wire), load {load_s * 1e3:.0f} ms, of which exposed "
                f"{exposed_s * 1e3:.0f} ms; request {total_s * 1e3:.0f} ms"
            )


async def test_a_prefill_server_killed_during_the_transfer_costs_time_and_no_tokens(pair: Pair, client: Client) -> None:
    """Behind the gateway: the prompt is computed at home, and all blocks there are free in the end. Nothing follows."""
    prompt = prompt_of(pair, 900)
    expected = await client.alone(pair.decode, prompt, N_TOKENS)
    async with pair.path(SLOW_BPS) as relay, gateway(pair) as url:
        asking = asyncio.create_task(client.ask(url, prompt, N_TOKENS, salt=uuid.uuid4().hex))
        try:
            await until(lambda: relay.forwarded_bytes > 100_000, within_s=30)
            pair.prefill.kill()
            answer = await asking
        finally:
            asking.cancel()
    assert answer.status == 200, answer.body
    assert answer.tokens == expected
    await until_free(client, pair.decode)
    assert (await client.metrics(pair.decode))["vllm:prfaas_failed_loads_total"] >= 1
