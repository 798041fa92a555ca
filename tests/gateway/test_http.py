"""The HTTP surface: what bad input gets, and what operators ask for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .conftest import Bench, open_bench
from .fakes import Script

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Hi", "user": "me", "kv_transfer_params": {"a": 1}, "min_tokens": 2, "cache_salt": None},
        {"prompt": ["Hi"]},
        {"prompt": [[72, 105]]},
        {"prompt": "Hi", "n": 1, "logprobs": None, "echo": False, "presence_penalty": 0.0, "top_k": -1},
        {"prompt": "Hi", "repetition_penalty": 1.0, "stop": None, "stream": None, "suffix": None},
        {"prompt": "Hi", "temperature": 0, "top_p": 1, "response_format": {"type": "text"}},
    ],
)
async def test_what_clients_really_send_passes(bench: Bench, body: dict[str, Any]) -> None:
    """Unknown fields and neutral values are no reason to refuse."""
    status, answer, _ = await bench.post(COMPLETIONS, body)
    assert status == 200, answer
    assert bench.fleet.near.calls[0]["token_ids"] == [72, 105]


async def test_sampling_reaches_both_nodes(bench: Bench) -> None:
    """Both nodes draw with the same settings, so that either could make any token."""
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "max_tokens": 7, "min_tokens": 9,
        "ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "logit_bias": {"7": 2, "9": -1.5}, "logprobs": 3,
    }  # fmt: skip
    await bench.complete(**body)
    expected = {**body, "seed": (1 << 64) - 3, "min_tokens": 7, "logit_bias": [[7, 2.0], [9, -1.5]]}
    assert bench.fleet.near.calls[0]["sampling"] == expected
    assert bench.fleet.decode.calls[0]["sampling"] == expected


async def test_the_decode_node_learns_the_prompts_tokens_only_if_it_needs_them(bench: Bench) -> None:
    """For the repetition penalty: each token once. Else nothing of the prompt but its length."""
    await bench.complete(prompt="abca")
    await bench.complete(prompt="abca", repetition_penalty=1.2)
    assert [call["prompt_token_set"] for call in bench.fleet.decode.calls] == [[], [97, 98, 99]]


async def test_logprobs_of_a_completion(bench: Bench) -> None:
    """Four lists side by side, whole and streamed; the offsets are those of the text."""
    _, answer, _ = await bench.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 3, "logprobs": 2})
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["H", "e", "l"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"H": -0.5, "I": -1.5}, {"e": -0.5, "f": -1.5}, {"l": -0.5, "m": -1.5}],
        "text_offset": [0, 1, 2],
    }
    _, answer, _ = await bench.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 3, "logprobs": False})
    assert answer["choices"][0]["logprobs"] is None


async def test_logprobs_of_a_chat(bench: Bench) -> None:
    """One entry a token, with its bytes; the likeliest ones only if they were asked for."""
    body = {"messages": [USER], "max_tokens": 1, "logprobs": True}
    _, answer, _ = await bench.post(CHAT, body)
    assert answer["choices"][0]["logprobs"] == {
        "content": [{"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []}], "refusal": None,
    }  # fmt: skip
    _, answer, _ = await bench.post(CHAT, body | {"top_logprobs": 2})
    assert [top["token"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]] == ["H", "I"]


async def test_a_node_that_leaves_logprobs_out_is_found_out(bench: Bench) -> None:
    """An answer never looks as if it had honoured what was ignored."""
    bench.fleet.decode.script.no_logprobs = True
    status, answer, _ = await bench.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 3, "logprobs": 2})
    assert status == 502
    assert "logprobs" in answer["error"]["message"]


async def test_default_sampling(bench: Bench) -> None:
    """OpenAI's defaults; without a seed each request draws its own."""
    await bench.complete()
    await bench.complete()
    first, second = (call["sampling"] for call in bench.fleet.decode.calls)
    assert (first["temperature"], first["top_p"], first["max_tokens"]) == (1.0, 1.0, 16)
    assert first["seed"] != second["seed"]


async def test_chat_bound_is_cut_to_the_model(bench: Bench) -> None:
    """A chat that names no bound gets a sensible one, and never more than fits."""
    for size, expected in ((10, 256), (4000, 4096 - 4000 - len("<user><assistant>"))):
        await bench.post(CHAT, {"messages": [{"role": "user", "content": "x" * size}]})
        assert bench.fleet.decode.calls[-1]["sampling"]["max_tokens"] == expected


async def test_min_tokens_is_never_more_than_the_bound(bench: Bench) -> None:
    """Nodes keep end tokens closed so long; more than is generated at all would be refused there."""
    await bench.complete(min_tokens=9, max_tokens=5)
    sampling = bench.fleet.decode.calls[0]["sampling"]
    assert (sampling["min_tokens"], sampling["ignore_eos"]) == (5, False)


async def test_request_id_is_kept_and_unique_inside(bench: Bench) -> None:
    """The client's id comes back; nodes see one that holds it and is never used twice."""
    for _ in range(2):
        _, _, headers = await bench.post(COMPLETIONS, {"prompt": "Hi"}, headers={"X-Request-ID": "mine-1"})
        assert headers["X-Request-ID"] == "mine-1"
    seen = [call["request_id"] for call in bench.fleet.decode.calls]
    assert len(set(seen)) == 2 and all(name.startswith("mine-1-") for name in seen)
    assert [call["request_id"] for call in bench.fleet.near.calls] == seen


@pytest.mark.parametrize("given", ["", "with space", "x" * 101, "caf\u00e9"])
async def test_unfit_request_id_is_replaced(bench: Bench, given: str) -> None:
    """An id that would break a log line is not kept."""
    _, _, headers = await bench.post(COMPLETIONS, {"prompt": ""}, headers={"X-Request-ID": given})
    assert len(headers["X-Request-ID"]) == 32


async def test_health_says_what_is_missing(bench: Bench) -> None:
    """200 only while both roles are up; the body names what is not."""
    status, body = await bench.get("/health")
    assert (status, body["status"], body["missing"]) == (200, "ok", [])
    assert [(n["node"], n["cluster"], n["role"], n["up"]) for n in body["nodes"]] == [
        ("prfaas-0", "prfaas", "prefill", True),
        ("pd-prefill-0", "pd", "prefill", True),
        ("pd-decode-0", "pd", "decode", True),
    ]
    bench.fleet.decode.healthy = False
    async with asyncio.timeout(5):
        while (await bench.get("/health"))[0] == 200:
            await bench.fleet.decode.next_polls(1)
    _, body = await bench.get("/health")
    assert body["missing"] == ["decode node"]
    assert "not ready" in body["nodes"][2]["problem"]
    assert (await bench.get("/live")) == (200, {"status": "ok"})


async def test_metrics(bench: Bench) -> None:
    """What was served is counted, by where it was prefilled."""
    await bench.complete(max_tokens=5)
    await bench.complete(prompt="x" * 150, max_tokens=2)
    await bench.post(COMPLETIONS, {"prompt": ""})
    await bench.post("/some/scanner/path", {})
    assert await bench.metric("prfaas_requests_total", route=COMPLETIONS, status="200") == 2
    assert await bench.metric("prfaas_requests_total", route=COMPLETIONS, status="400") == 1
    assert await bench.metric("prfaas_requests_total", route="unmatched", status="404") == 1
    assert await bench.metric("prfaas_offloaded_requests_total", cluster="prfaas") == 1
    assert await bench.metric("prfaas_offloaded_requests_total", cluster="pd") == 0
    assert await bench.metric("prfaas_tokens_total", kind="prompt") == 152
    assert await bench.metric("prfaas_tokens_total", kind="output") == 7
    assert await bench.metric("prfaas_ttft_seconds_count", cluster="prfaas") == 1
    assert await bench.metric("prfaas_request_duration_seconds_count", route=COMPLETIONS) == 3
    async with bench.http.get(f"{bench.gateway.url}/metrics") as answer:
        text = await answer.text()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'prfaas_offloaded_requests_total{cluster="prfaas"} 1.0' in text


async def test_record_of_a_request_can_be_watched(bench: Bench) -> None:
    """While it is prefilled and afterwards, by the id that the client gave; never what it said."""
    script = bench.fleet.near.script = Script(hold_at=0)
    body, headers = {"prompt": "Hello", "max_tokens": 3}, {"X-Request-ID": "watched"}
    posting = asyncio.create_task(bench.post(COMPLETIONS, body, headers=headers))
    await script.gate.reached.wait()
    status, record = await bench.get("/v1/requests/watched")
    assert status == 200
    assert (record["prefilled_in"], record["prompt_tokens"], record["prefilled_tokens"]) == ("pd", 5, 0)
    script.gate.go_on.set()
    await posting
    _, record = await bench.get("/v1/requests/watched")
    assert (record["prefilled_tokens"], record["output_tokens"]) == (5, 3)
    assert "Hel" not in str(record)
    assert (await bench.get("/v1/requests/other"))[0] == 404


async def test_version_and_models(bench: Bench) -> None:
    """What runs here, and how long a sequence it takes."""
    status, body = await bench.get("/version")
    assert status == 200 and body["version"]
    _, models = await bench.get("/v1/models")
    assert models["data"][0]["max_model_len"] == 4096


async def test_api_keys() -> None:
    """With keys set, /v1/ asks for one and probes stay open."""
    async with open_bench(api_keys=["correct-horse", "battery-staple"]) as bench:
        for header in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "battery-staple"}):
            status, answer, headers = await bench.post(COMPLETIONS, {"prompt": "Hi"}, headers=dict(header))
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        key = {"Authorization": "Bearer battery-staple"}
        status, _, _ = await bench.post(COMPLETIONS, {"prompt": "Hi"}, headers=key)
        assert status == 200
        assert (await bench.get("/health"))[0] == 200


async def test_too_many_at_once() -> None:
    """The bound on requests in flight answers 429, and is free again afterwards."""
    async with open_bench(max_concurrent_requests=1) as bench:
        script = bench.fleet.decode.script = Script(hold_at=0)
        first = asyncio.create_task(bench.post(COMPLETIONS, {"prompt": "Hi"}))
        await script.gate.reached.wait()
        status, answer, headers = await bench.post(COMPLETIONS, {"prompt": "Hi"})
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert headers["Retry-After"] == "1"
        script.gate.go_on.set()
        assert (await first)[0] == 200
        assert (await bench.post(COMPLETIONS, {"prompt": "Hi"}))[0] == 200


async def test_long_prompt_does_not_stop_the_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is tokenized beside the event loop, not on it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    tokenizer = bench.gateway._tokenizer
    encode = tokenizer.encode

    def blocking(text: str) -> list[int]:
        # Returns only after the loop has run something else: on the loop itself this would never end.
        asyncio.run_coroutine_threadsafe(ready.wait(), loop).result(timeout=5)
        return encode(text)

    monkeypatch.setattr(tokenizer, "encode", blocking)
    posting = asyncio.create_task(bench.post(COMPLETIONS, {"prompt": "x" * 3000}))
    assert (await bench.get("/live"))[0] == 200
    ready.set()
    assert (await posting)[0] == 200


async def test_bug_is_answered_not_dropped(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even our own mistake has a body and an id, and tells the client nothing of our insides."""

    def broken(text: str) -> list[int]:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(bench.gateway._tokenizer, "encode", broken)
    status, answer, headers = await bench.post(COMPLETIONS, {"prompt": "Hi"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert headers["X-Request-ID"] in answer["error"]["message"]
    assert "secret detail" not in answer["error"]["message"]
