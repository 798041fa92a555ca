"""The official client, against both endpoints."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import Completion

from prfaas_net.errors import PeerError

from .conftest import Bench, open_bench
from .fakes import Script


async def test_completion(bench: Bench) -> None:
    """A completion comes back whole, with its usage."""
    async with bench.openai() as client:
        answer = await client.completions.create(model="fake", prompt="Hi there", max_tokens=5, temperature=0)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_completion_of_token_ids(bench: Bench) -> None:
    """A prompt may be token ids; they reach the prefill node as they are."""
    async with bench.openai() as client:
        answer = await client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=100)
    assert answer.choices[0].text == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert bench.fleet.near.calls[0]["token_ids"] == [5, 6, 7]


async def test_chat(bench: Bench) -> None:
    """A chat of string and parts content goes through the template."""
    async with bench.openai() as client:
        answer = await client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]},
            ],
            max_completion_tokens=5,
        )
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].message.role == "assistant"
    prompt = bytes(bench.fleet.near.calls[0]["token_ids"]).decode()
    assert prompt == "<system>Be brief.<user>Hi!<assistant>"


async def test_streamed_completion(bench: Bench) -> None:
    """Text arrives in one chunk a token, usage in a last chunk without choices."""
    async with bench.openai() as client:
        stream = await client.completions.create(
            model="fake", prompt="Hi", max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == list("Hello")
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


async def test_streamed_chat(bench: Bench) -> None:
    """The role rides on the first token."""
    async with bench.openai() as client:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert [delta.content for delta in deltas] == list("Hel")
    assert [delta.role for delta in deltas] == ["assistant", None, None]


async def test_models(bench: Bench) -> None:
    """The served model is listed and can be looked up."""
    async with bench.openai() as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("meta/other")


async def test_errors_are_those_the_client_knows(bench: Bench) -> None:
    """Statuses map to the client's exception classes, with code and param."""
    async with bench.openai() as client:
        with pytest.raises(openai.NotFoundError, match="no such model") as missing:
            await client.completions.create(model="other", prompt="Hi")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="fake", prompt="x" * 5000)
        assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")


async def test_error_in_the_middle_of_a_stream_reaches_the_client(bench: Bench) -> None:
    """The client sees the tokens so far, then an exception with the reason."""
    bench.fleet.decode.script = Script(fail_at=3, error=PeerError("the engine broke"))
    texts: list[str] = []

    async def read(stream: openai.AsyncStream[Completion]) -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].text)

    async with bench.openai() as client:
        stream = await client.completions.create(model="fake", prompt="Hi", stream=True)
        with pytest.raises(openai.APIError, match="the engine broke"):
            await read(stream)
    assert texts == list("Hel")


async def test_token_ids_may_be_streamed_with_logprobs(bench: Bench) -> None:
    """Every chunk of a completion carries those of its one token."""
    async with bench.openai() as client:
        stream = await client.completions.create(model="fake", prompt=[5, 6], max_tokens=3, logprobs=2, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hel"
    for chunk, text in zip(chunks, "Hel", strict=True):
        logprobs = chunk.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens == [text] and logprobs.token_logprobs == [-0.5]
        assert logprobs.top_logprobs is not None and len(logprobs.top_logprobs[0]) == 2


async def test_chat_with_logprobs_stop_and_seed(bench: Bench) -> None:
    """A stop string ends the answer; each token has its log-probability."""
    async with bench.openai() as client:
        answer = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2,
            stop=["lo"], seed=7, max_tokens=100,
        )  # fmt: skip
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Hel", "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == list("Hello")
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 5
    assert bench.fleet.near.calls[0]["sampling"]["seed"] == 7


async def test_several_choices(bench: Bench) -> None:
    """Whole and streamed: each choice has its index, and usage counts them all."""
    async with bench.openai() as client:
        whole = await client.completions.create(model="fake", prompt="Hi", max_tokens=2, n=3)
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, n=2, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "He"), (1, "He"), (2, "He")]
    assert whole.usage is not None and whole.usage.completion_tokens == 6
    told = sorted((choice.index, choice.delta.content) for chunk in chunks for choice in chunk.choices)
    assert told == [(0, "H"), (0, "e"), (1, "H"), (1, "e")]
    usage = chunks[-1].usage
    assert chunks[-1].choices == [] and usage is not None and usage.completion_tokens == 4


async def test_what_the_client_does_not_know_passes_through_extra_body(bench: Bench) -> None:
    """vLLM's fields, and fields that nobody knows."""
    extra = {"ignore_eos": True, "min_tokens": 2, "kv_transfer_params": None, "unheard_of": {"a": [1]}}
    async with bench.openai() as client:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=3, stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True}, extra_body=extra,
        )  # type: ignore[call-overload, misc, unused-ignore]  # fmt: skip
        chunks = [chunk async for chunk in stream]
    sampling = bench.fleet.decode.calls[0]["sampling"]
    assert (sampling["ignore_eos"], sampling["min_tokens"], sampling["max_tokens"]) == (True, 2, 3)
    # The usage so far rides on every chunk, also where several tokens came together.
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [1, 2, 3, 3]


async def test_keys_limits_and_nodes_that_are_gone_are_exceptions_of_their_own() -> None:
    """401, 429 and 5xx, as the client tells them apart."""
    body: dict[str, Any] = {"model": "fake", "prompt": "Hi"}
    async with open_bench(api_keys=["a-long-enough-key"], max_concurrent_requests=1) as bench:
        async with bench.openai() as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.completions.create(**body)
            assert refused.value.code == "invalid_api_key"
        async with bench.openai().with_options(api_key="a-long-enough-key") as client:
            with pytest.raises(openai.RateLimitError) as crowded:
                await client.completions.create(**body, n=2)
            assert crowded.value.response.headers["Retry-After"]
            assert (await client.completions.create(**body)).choices[0].text == "Hello, world"
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**body, stop=[""])
    async with open_bench(prepare=lambda fleet: setattr(fleet.decode, "healthy", False)) as bench:
        async with bench.openai() as client:
            with pytest.raises(openai.InternalServerError) as gone:
                await client.completions.create(**body)
        assert gone.value.status_code == 503
