"""The official client, against both endpoints."""

from __future__ import annotations

import openai
import pytest
from openai.types import Completion

from prfaas_net.errors import PeerError

from .conftest import Bench
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
