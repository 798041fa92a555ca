"""vLLM and SGLang servers behind the gateway: what they are asked, and what a client gets of their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from prfaas_net.gateway.engines import attempts
from prfaas_net.scheduling import QueueSeen
from tests.gateway.conftest import THRESHOLD_TOKENS
from tests.gateway.engine_fakes import (
    ANSWER,
    MODEL,
    EngineScript,
    FakeEngine,
    FakeSglang,
    FakeVllm,
    Handovers,
    engine_bench,
    eventually,
)

LONG = "x" * (THRESHOLD_TOKENS + 20)
KINDS: list[type[FakeEngine]] = [FakeVllm, FakeSglang]


def whole(kind: type[FakeEngine], name: str = "a") -> FakeEngine:
    return kind(Handovers(), name, "both", "pd")


def pair(kind: type[FakeEngine], *, connector: bool = False) -> tuple[FakeEngine, FakeEngine]:
    """A prefill server in a cluster of its own, and a decode server."""
    handovers = Handovers()
    prefill, decode = kind(handovers, "far", "prefill", "prfaas"), kind(handovers, "near", "decode", "pd")
    if kind is FakeSglang:
        prefill.settings["bootstrap"] = "10.0.0.1:8998"
    elif connector:
        prefill.settings["connector"] = "10.0.0.1:7700"
    return prefill, decode


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


# -- one server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_one_server_serves_a_request_end_to_end(kind: type[FakeEngine]) -> None:
    async with engine_bench(engine := whole(kind)) as bench:
        engine.script = EngineScript(cached=1)
        answer = await bench.complete(prompt="Hi", max_tokens=50, explain=True)
    assert answer["choices"][0]["text"] == ANSWER.decode()
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}
    assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 1}}
    record = answer["prfaas"]
    assert (record["prefill_node"], record["decode_node"]) == ("a", "a")
    assert list(record["stages_s"]) == [
        "tokenized", "decided", "prefill_started", "prefilled", "landed", "first_token", "finished",
    ]  # fmt: skip
    assert "kv_transfer_params" not in engine.calls[0] and "bootstrap_room" not in engine.calls[0]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("per_chunk", [1, 5, 12])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_has_one_chunk_a_token(kind: type[FakeEngine], per_chunk: int, incremental: bool) -> None:
    """However many tokens an engine puts into one event: clients count chunks."""
    async with engine_bench(engine := whole(kind)) as bench:
        engine.script = EngineScript(per_chunk=per_chunk, incremental=incremental)
        events = await bench.stream(stream_options={"include_usage": True})
    *chunks, usage, done = events
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(ANSWER.decode())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 11 + ["stop"]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_role_rides_on_the_first_token_of_a_chat(kind: type[FakeEngine]) -> None:
    async with engine_bench(whole(kind)) as bench:
        messages = [{"role": "user", "content": "Hi"}]
        first, *_ = await bench.stream("/v1/chat/completions", messages=messages, max_tokens=4)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "H"}


async def test_what_vllm_is_asked() -> None:
    """Every option of a request, by vLLM's names; token ids in, token ids out."""
    async with engine_bench(engine := whole(FakeVllm)) as bench:
        await bench.complete(
            prompt="Hi", max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=2**63 + 5,
            presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={"65": -100},
            ignore_eos=True, cache_salt="mine", stop="never",
        )  # fmt: skip
    assert engine.calls[0] == {
        "model": MODEL, "prompt": [72, 105], "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9,
        "top_k": 5, "min_p": 0.1, "seed": 5, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "logit_bias": {"65": -100.0}, "ignore_eos": True, "cache_salt": "mine",
        "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def test_what_sglang_is_asked() -> None:
    async with engine_bench(engine := whole(FakeSglang)) as bench:
        await bench.complete(
            prompt="Hi", max_tokens=7, min_tokens=2, temperature=0.5, top_p=0.9, min_p=0.1, seed=5,
            presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={"65": -100},
            ignore_eos=True, cache_salt="mine",
        )  # fmt: skip
    assert without(engine.calls[0], "rid") == {
        "input_ids": [72, 105],
        "stream": True,
        "extra_key": "mine",
        "sampling_params": {
            "max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
            "sampling_seed": 5, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1,
            "logit_bias": {"65": -100.0}, "ignore_eos": True,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "told"),
    [({}, False), ({"seed": 5}, True), ({"seed": 5, "temperature": 0}, False), ({"presence_penalty": 0.5}, True)],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_seed_is_told_where_it_matters(kind: type[FakeEngine], body: dict[str, Any], told: bool) -> None:
    """Where the client chose it, or where the answer could not be made once more without."""
    async with engine_bench(engine := whole(kind)) as bench:
        await bench.complete(**body)
    call = engine.calls[0]
    assert (("seed" in call) or ("sampling_seed" in call.get("sampling_params", {}))) is told


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FakeVllm, {"structured_outputs": {"json": {"type": "object"}}, "stop_token_ids": [7], "bad_words": ["no"]}),
        (FakeSglang, {"json_schema": '{"type": "object"}', "stop_token_ids": [7]}),
    ],
)
async def test_what_only_the_engine_knows_is_handed_on(kind: type[FakeEngine], fields: dict[str, Any]) -> None:
    """To both servers; what nobody knows is not, and what the gateway sets itself cannot be overridden."""
    prefill, decode = pair(kind)
    async with engine_bench(prefill, decode) as bench:
        await bench.complete(prompt=LONG, best_guess=1, kv_transfer_params={"x": 1}, bootstrap_room=7, **fields)
    for call in (prefill.calls[0], decode.calls[0]):
        asked = call.get("sampling_params", call)
        assert {name: asked[name] for name in fields} == fields
        assert "best_guess" not in call and call.get("bootstrap_room") != 7
        assert "x" not in call.get("kv_transfer_params", {})


async def test_an_answer_under_a_grammar_is_made_once_more_elsewhere() -> None:
    """The other server does not know where in its grammar it stands: it is compared, and not sent twice."""
    a, b = (FakeVllm(Handovers(), name, "both", "pd") for name in "ab")
    async with engine_bench(a, b) as bench:
        a.script = EngineScript(fail_at=5, die=True)
        record = await bench.record(structured_outputs={"regex": ".*"}, temperature=0)
    assert record["output_tokens"] == len(ANSWER) and not record["fallbacks"][0]["resumed"]
    assert b.calls[0]["prompt"] == a.calls[0]["prompt"] and b.calls[0]["max_tokens"] == a.calls[0]["max_tokens"]


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_pass(kind: type[FakeEngine]) -> None:
    """As many of the likeliest tokens as the client asked for, whatever an engine adds."""
    async with engine_bench(whole(kind)) as bench:
        answer = await bench.complete(logprobs=2, max_tokens=2)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == ["H", "e"] and found["token_logprobs"] == [-0.5, -0.5]
    assert found["top_logprobs"] == [{"I": -0.1, "J": -1.1}, {"f": -0.1, "g": -1.1}]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_of_one_token(kind: type[FakeEngine]) -> None:
    async with engine_bench(whole(kind)) as bench:
        answer = await bench.complete(max_tokens=1)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("H", "length")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stop_string_ends_the_request_on_the_server(kind: type[FakeEngine]) -> None:
    """The gateway finds it, and the server stops: it hangs in the next token here."""
    async with engine_bench(engine := whole(kind)) as bench:
        engine.script = EngineScript(hang_at=5)
        answer = await bench.complete(stop="lo")
        assert answer["choices"][0]["text"] == "Hel"
        await bench.all_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_asks_for_a_key_gets_it(kind: type[FakeEngine]) -> None:
    engine = whole(kind)
    engine.api_key = engine.settings["api_key"] = "a secret of the engine"
    async with engine_bench(engine) as bench:
        assert (await bench.complete())["choices"][0]["text"] == ANSWER.decode()


# -- pairs ---------------------------------------------------------------------------------------------------------


async def test_kv_transfer_params_pass_from_prefill_to_decode_exactly() -> None:
    """Whatever a connector puts into them: they are not read here."""
    prefill, decode = pair(FakeVllm)
    async with engine_bench(prefill, decode) as bench:
        prefill.script = EngineScript(cached=100)
        record = await bench.record(prompt=LONG, max_tokens=50, seed=3)
    first, second = prefill.calls[0], decode.calls[0]
    assert first["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    }  # fmt: skip
    assert (first["stream"], first["max_tokens"], first["min_tokens"]) == (False, 1, 1)
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2], [7]],
        "remote_engine_id": "far", "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1,
        "key": "['far', 1]", "later": {"versions": ["may", None, 1.5]},
    }  # fmt: skip
    # Of the prefill server's token nothing is used.
    assert first["temperature"] == 0 and "seed" not in first and second["seed"] == 3
    own = ("stream", "stream_options", "max_tokens", "min_tokens", "kv_transfer_params", "temperature", "seed")
    assert without(first, *own) == without(second, *own)
    assert second["max_tokens"] == 50 and second["stream"]
    assert (record["prefill_node"], record["decode_node"], record["prefilled_in"]) == ("far", "near", "prfaas")
    assert (record["cached_tokens"], record["incremental_tokens"]) == (100, 20)
    assert {"prefill_started", "prefilled", "landed", "first_token", "finished"} <= set(record["stages_s"])
    assert prefill.headers[0]["X-Request-Id"] == decode.headers[0]["X-Request-Id"] == record["request_id"]


async def test_with_our_connector_both_servers_are_asked_at_once() -> None:
    """One name that nobody can guess, and where the prefill server's connector takes tickets."""
    prefill, decode = pair(FakeVllm, connector=True)
    async with engine_bench(prefill, decode) as bench:
        prefill.script = EngineScript(hold=True)
        streaming = asyncio.create_task(bench.stream(prompt=LONG))
        async with asyncio.timeout(30):
            await prefill.script.gate.reached.wait()
            # The prefill has not been answered yet.
            await eventually(lambda: decode.calls)
            prefill.script.gate.go_on.set()
            events = await streaming
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == ANSWER.decode()
    there, here = (engine.calls[0]["kv_transfer_params"] for engine in (prefill, decode))
    assert len(there["transfer_id"]) == 36 and 0 < there["transfer_deadline_s"] <= 50
    shared = {name: there[name] for name in ("transfer_id", "transfer_deadline_s")}
    assert there == {"do_remote_decode": True, "do_remote_prefill": False, **shared}
    address = {"remote_host": "10.0.0.1", "remote_port": 7700}
    assert here == {"do_remote_decode": False, "do_remote_prefill": True, **address, **shared}


async def test_both_servers_of_an_sglang_pair_get_the_same_body() -> None:
    prefill, decode = pair(FakeSglang)
    async with engine_bench(prefill, decode) as bench:
        prefill.script = EngineScript(cached=100)
        record = await bench.record(prompt=LONG, max_tokens=50)
        await bench.complete(prompt=LONG)
    first, second = prefill.calls[0], decode.calls[0]
    assert without(first, "rid") == without(second, "rid")
    assert (first["bootstrap_host"], first["bootstrap_port"]) == ("10.0.0.1", 8998)
    rooms = {call["bootstrap_room"] for engine in (prefill, decode) for call in engine.calls}
    assert len(rooms) == 2 and all(0 <= room < 2**63 for room in rooms)
    assert record["cached_tokens"] == 100 and "transferred" in record["stages_s"]


@pytest.mark.parametrize("connector", [False, True])
async def test_short_prompts_stay_with_the_decode_server(connector: bool) -> None:
    prefill, decode = pair(FakeVllm, connector=connector)
    async with engine_bench(prefill, decode) as bench:
        record = await bench.record(prompt="Hi")
        assert (record["prefill_node"], record["prefilled_in"]) == ("near", "pd")
        assert not prefill.calls and "kv_transfer_params" not in decode.calls[0]
        record = await bench.record(prompt=LONG)
    assert (record["prefill_node"], record["prefilled_in"]) == ("far", "prfaas")


async def test_an_sglang_decode_server_computes_no_prompt() -> None:
    """It cannot: every prompt goes to a prefill server."""
    prefill, decode = pair(FakeSglang)
    async with engine_bench(prefill, decode) as bench:
        assert (await bench.record(prompt="Hi"))["prefill_node"] == "far"


async def test_an_answer_may_end_with_its_first_token_on_a_pair() -> None:
    prefill, decode = pair(FakeVllm)
    async with engine_bench(prefill, decode) as bench:
        answer = await bench.complete(prompt=LONG, max_tokens=1)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("H", 1)


# -- what is known of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_load_of_others_counts(kind: type[FakeEngine]) -> None:
    """Whoever else uses a server: its queue is seen in its metrics, and the other server is taken."""
    a, b = whole(kind, "a"), whole(kind, "b")
    a.running, a.waiting = 20, 10
    async with engine_bench(a, b) as bench:
        state = bench.gateway.router.state.nodes
        await eventually(lambda: state["a"].foreign_requests == 30)
        assert state["a"].foreign_tokens == 1000
        assert (await bench.record())["decode_node"] == "b"
        a.running = a.waiting = 0
        await eventually(lambda: state["a"].foreign_requests == 0)
        log = bench.gateway.router.story("a")
    assert sum(isinstance(event, QueueSeen) for _, event in log) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_how_long_prompts_take_is_learnt(kind: type[FakeEngine]) -> None:
    async with engine_bench(engine := whole(kind)) as bench:
        for prompt in ("x" * 10, "x" * 100, "x" * 11, "x" * 101):
            await bench.complete(prompt=prompt)
        nodes = bench.gateway.router.state.nodes
        await eventually(lambda: nodes[engine.name].profile is not None)
        profile = nodes[engine.name].profile
        assert profile is not None and profile.prefill_s(50) > 0


@pytest.mark.parametrize("kind", KINDS)
async def test_the_longest_request_is_what_the_server_says(kind: type[FakeEngine]) -> None:
    async with engine_bench(whole(kind)) as bench:
        status, models = await bench.get("/v1/models")
        assert models["data"][0]["max_model_len"] == 4096
        status, body, _ = await bench.post("/v1/completions", {"prompt": "x" * 4096})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


UNFIT: dict[str, tuple[Callable[[FakeEngine], object], str]] = {
    "not well": (lambda engine: setattr(engine, "health", 503), "not ready"),
    "another model": (lambda engine: engine.settings.update(model="other"), "does not serve the model"),
    "no models": (lambda engine: setattr(engine, "models", {"data": []}), "does not serve the model"),
    "no list": (lambda engine: setattr(engine, "models", ["?"]), "cannot be read"),
    "no length": (lambda engine: setattr(engine, "models", {"data": [{"id": MODEL}]}), "set max_model_tokens"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", UNFIT)
async def test_a_server_that_does_not_fit_gets_no_work(kind: type[FakeEngine], case: str) -> None:
    spoil, problem = UNFIT[case]
    engine = whole(kind)
    spoil(engine)
    async with engine_bench(engine) as bench:
        status, health = await bench.get("/health")
        assert status == 503 and problem in health["nodes"][0]["problem"]
        status, _, _ = await bench.post("/v1/completions", {"prompt": "Hi"})
        assert status == 503


async def test_a_length_may_be_configured() -> None:
    engine = whole(FakeVllm)
    engine.models = {"data": [{"id": MODEL}]}
    engine.settings["max_model_tokens"] = 100
    async with engine_bench(engine) as bench:
        assert (await bench.get("/v1/models"))[1]["data"][0]["max_model_len"] == 100


async def test_metrics_of_all_servers_in_one_exposition() -> None:
    """Names and values as the engines have them; labels say whose they are."""
    a, b = whole(FakeVllm, "a"), whole(FakeVllm, "b")
    b.running = 7
    async with engine_bench(a, b) as bench, bench.http.get(f"{bench.gateway.url}/metrics/engines") as answer:
        text = await answer.text()
    own = 'engine="0",model_name="org/model"'
    assert f'vllm:num_requests_running{{{own},prfaas_node="b",prfaas_cluster="pd"}} 7' in text
    assert f'vllm:num_requests_running{{{own},prfaas_node="a",prfaas_cluster="pd"}} 0' in text
    assert 'process_start_time_seconds{prfaas_node="a",prfaas_cluster="pd"} 1000.0' in text
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1


async def test_an_sglang_server_without_metrics_is_served_all_the_same() -> None:
    engine = whole(FakeSglang)
    engine.metrics_text = ""
    async with engine_bench(engine) as bench:
        assert (await bench.complete())["choices"][0]["text"] == ANSWER.decode()


async def test_a_decode_server_that_may_not_compute_prompts_does_not() -> None:
    """Then a request without a prefill server is refused with the reason, and not served the slow way in silence."""
    prefill, decode = pair(FakeVllm)
    decode.settings["computes_prompts"] = False
    async with engine_bench(prefill, decode) as bench:
        assert (await bench.record(prompt="Hi"))["prefill_node"] == "far"
        prefill.health = 503
        await eventually(lambda: not bench.gateway.fleet.find("far").up)
        status, body, _ = await bench.post("/v1/completions", {"prompt": LONG})
        assert status == 503 and "no prefill node is up" in body["error"]["message"]


async def test_who_computed_the_prompt_is_told() -> None:
    """Where a decode server steps in for a prefill cluster that is gone, the record and the counters say so."""
    prefill, decode = pair(FakeVllm)
    prefill.health = 503
    async with engine_bench(prefill, decode) as bench:
        record = await bench.record(prompt=LONG)
        assert (record["prefill_node"], record["prefilled_in"]) == ("near", "pd")
        assert any("no PrfaaS prefill node is up" in reason for reason in record["reasons"])
        assert await bench.metric("prfaas_decisions_total", policy="threshold", cluster="pd") == 1


@pytest.mark.parametrize(("mode", "fits"), [("decode", True), ("null", False), ("prefill", False), (None, True)])
async def test_an_sglang_server_started_for_something_else_is_not_admitted(mode: str | None, fits: bool) -> None:
    """It says what it was started for; a version that does not is believed."""
    prefill, decode = pair(FakeSglang)
    decode.mode = mode
    async with engine_bench(prefill, decode) as bench:
        status, health = await bench.get("/health")
        assert (status == 200) is fits
        if not fits:
            assert "not started for its role" in health["nodes"][1]["problem"]


@pytest.mark.parametrize("connector", [False, True])
async def test_our_connectors_refusal_is_the_prefill_servers_fault(connector: bool) -> None:
    prefill, decode = pair(FakeVllm, connector=connector)
    prefill.script = EngineScript(params={"error": "wrong role: do_remote_decode was asked of a kv_consumer"})
    async with engine_bench(prefill, decode) as bench:
        (step,) = (await bench.record(prompt=LONG))["fallbacks"]
        assert step["failed"] == "prefill node far" and "wrong role" in step["error"]


@pytest.mark.parametrize("kind", KINDS)
async def test_both_servers_are_told_the_trace(kind: type[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans of engines then belong to the request's own."""
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    monkeypatch.setattr(attempts, "trace_headers", lambda: parent)
    prefill, decode = pair(kind)
    async with engine_bench(prefill, decode) as bench:
        await bench.complete(prompt=LONG)
    for engine in (prefill, decode):
        assert engine.headers[0]["traceparent"] == parent["traceparent"]
