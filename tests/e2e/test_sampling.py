"""Everything that changes the choice of a token, through a gateway and two nodes in processes of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from prfaas_net.localfleet.client import GatewayClient
from prfaas_net.nodes.engine_api import Sampling
from tests.e2e.conftest import Bench

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5, "temperature": 0},
    {"temperature": 0.9, "min_p": 0.05, "top_k": 40, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {"100": -100, "7": 3}, "min_tokens": 8, "frequency_penalty": 1.5},
    {"temperature": 1.1, "seed": 11},
]


def sampling_of(case: dict[str, Any]) -> Sampling:
    """The same for an engine in this process."""
    bias = tuple((int(token), float(value)) for token, value in case.get("logit_bias", {}).items())
    return Sampling(**{**case, "logit_bias": bias, "max_tokens": 12})


async def test_any_sampling_gives_the_tokens_of_a_single_process_run(bench: Bench) -> None:
    """Penalties over prompt and answer, biases, and draws by seed, all at once in one batch."""
    prompt = bench.tokenizer.encode(bench.long_text)[:200]
    async with GatewayClient(bench.fleet.url) as client:
        name, _ = await client.model()
        answers = await asyncio.gather(
            *(client.complete({"model": name, "prompt": prompt, "max_tokens": 12, **case}) for case in CASES)
        )
    for case, answer in zip(CASES, answers, strict=True):
        assert answer.token_ids == bench.reference(prompt, sampling_of(case)), case


async def test_logprobs_come_all_the_way(bench: Bench) -> None:
    """One entry a token, the first one from the prefill node; greedy tokens are the likeliest."""
    body = {"prompt": "The early days", "max_tokens": 5, "temperature": 0, "logprobs": 3, "return_token_ids": True}
    url = f"{bench.fleet.url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        choice = (await response.json())["choices"][0]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(choice["token_ids"]) == 5
    for text, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert 1 <= len(top) <= 3
        assert max(top.values()) == top[text] == logprob <= 0
