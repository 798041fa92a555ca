"""Real processes under real requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.nodes.engine_api import Sampling
from tests.e2e.conftest import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


async def settle(check: Callable[[], Any], within_s: float = 5.0) -> None:
    """Wait until an asynchronous check is true."""
    async with asyncio.timeout(within_s):
        while not await check():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.05)


async def test_the_openai_client_works(bench: Bench) -> None:
    """Both endpoints, whole and streamed, to either cluster; the text is that of a single-process run."""
    client = openai.AsyncOpenAI(base_url=f"{bench.fleet.url}/v1", api_key="none", timeout=60)
    async with client:
        (model,) = (await client.models.list()).data
        long = bench.tokenizer.encode(bench.long_text)[:1000]
        for ids in (long, long[:100]):
            expected = bench.tokenizer.decode(bench.reference(ids, Sampling(max_tokens=12)))
            whole = await client.completions.create(model=model.id, prompt=ids, temperature=0, max_tokens=12)
            assert whole.choices[0].text == expected
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids), 12)
            stream = await client.completions.create(
                model=model.id, prompt=ids, temperature=0, max_tokens=12, stream=True
            )
            assert "".join([chunk.choices[0].text async for chunk in stream]) == expected
        question: Any = [{"role": "user", "content": "What is a hacker?"}]
        chat = await client.chat.completions.create(model=model.id, messages=question, temperature=0, max_tokens=20)
        ids = bench.tokenizer.apply_chat_template(question)
        expected = bench.tokenizer.decode(bench.reference(ids, Sampling(max_tokens=20)))
        assert chat.choices[0].message.content == expected
        streamed = await client.chat.completions.create(
            model=model.id, messages=question, temperature=0, max_tokens=20, stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in streamed]) == expected
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="another", prompt="x")
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=model.id, prompt="")


async def test_concurrent_requests_do_not_mix(bench: Bench) -> None:
    """Eight at once, of both kinds, greedy and sampled with a seed: each equals its own single-process run."""
    ids = bench.tokenizer.encode(bench.long_text)
    prompts = [ids[40 * i : 40 * i + (600 if i % 2 else 90)] for i in range(8)]
    async with GatewayClient(bench.fleet.url) as client:
        name, _ = await client.model()
        answers = await asyncio.gather(
            *(
                client.complete({"model": name, "prompt": p, "max_tokens": 10, "temperature": 0.8 * (i % 3), "seed": i})
                for i, p in enumerate(prompts)
            )
        )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sampling = Sampling(temperature=0.8 * (i % 3), seed=i, max_tokens=10)
        assert answer.token_ids == bench.reference(prompt, sampling)
        assert answer.record["prefilled_in"] == ("prfaas" if i % 2 else "pd")

    async def idle() -> bool:
        return await bench.metric("PD decode node", "prfaas_kv_arena_used_bytes") == 0

    await settle(idle)


async def test_curl_gets_an_answer_while_the_gateway_serves(bench: Bench) -> None:
    """Streamed and not, with the plainest of clients."""
    body = {"messages": [{"role": "user", "content": "What is a hacker?"}], "max_tokens": 5, "temperature": 0}
    url = f"{bench.fleet.url}/v1/chat/completions"
    for stream in (False, True):
        data = json.dumps({**body, "stream": stream})
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sN", url, "-H", "Content-Type: application/json", "-d", data, stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await asyncio.wait_for(curl.communicate(), 30)
        assert curl.returncode == 0
        if stream:
            assert answer.endswith(b"data: [DONE]\n\n")
            assert answer.count(b"data: {") == 5
        else:
            assert json.loads(answer)["usage"]["completion_tokens"] == 5


async def test_a_client_that_leaves_frees_everything_within_a_second(bench: Bench) -> None:
    """Disconnect in the middle of a long prefill: both arenas return to zero."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": bench.long_text, "max_tokens": 8, "stream": True}
        post = asyncio.create_task(session.post(f"{bench.fleet.url}/v1/completions", json=body))

        async def in_flight() -> bool:
            return await bench.metric("PD decode node", "prfaas_kv_arena_used_bytes") > 0

        await settle(in_flight)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)

    async def idle() -> bool:
        return await bench.metric("PD decode node", "prfaas_kv_arena_used_bytes") == 0

    await settle(idle, within_s=1.0)
