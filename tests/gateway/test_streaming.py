"""What a streamed answer looks like on the wire."""

from __future__ import annotations

import pytest

from .conftest import Bench
from .fakes import EOS, Script


def texts(events: list[object]) -> list[str]:
    return [e["choices"][0]["text"] for e in events if isinstance(e, dict) and e["choices"]]


def reasons(events: list[object]) -> list[str | None]:
    return [e["choices"][0]["finish_reason"] for e in events if isinstance(e, dict) and e["choices"]]


async def test_one_chunk_a_token_and_done(bench: Bench) -> None:
    """Clients count chunks as tokens: no chunk before the first, none after the last."""
    events = await bench.stream(max_tokens=4)
    assert texts(events) == list("Hell")
    assert reasons(events) == [None, None, None, "length"]
    assert events[-1] == "[DONE]" and len(events) == 5
    assert len({e["id"] for e in events[:-1]}) == 1
    assert "usage" not in events[0]


async def test_end_token_is_a_chunk_without_text(bench: Bench) -> None:
    """The token that ends an answer counts, and shows nothing."""
    bench.fleet.decode.script = Script(tokens=[*b"ab", EOS])
    events = await bench.stream(stream_options={"include_usage": True})
    assert texts(events) == ["a", "b", ""]
    assert reasons(events) == [None, None, "stop"]
    assert events[-2]["usage"]["completion_tokens"] == 3


async def test_finish_that_comes_late_gets_a_chunk_of_its_own(bench: Bench) -> None:
    """No token waits for what follows it."""
    bench.fleet.decode.script = Script(tokens=b"ab", split_finish=True)
    events = await bench.stream()
    assert "".join(texts(events)) == "ab"
    assert [r for r in reasons(events) if r] == ["stop"]
    assert events[-1] == "[DONE]"


async def test_usage_chunk_has_no_choices(bench: Bench) -> None:
    """With include_usage, other chunks carry a null usage and the last one the numbers."""
    events = await bench.stream(max_tokens=2, stream_options={"include_usage": True})
    assert [e["usage"] for e in events[:2]] == [None, None]
    assert events[2]["choices"] == []
    assert events[2]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert events[3] == "[DONE]"


async def test_continuous_usage_counts_up(bench: Bench) -> None:
    """Every chunk carries the usage so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await bench.stream(max_tokens=3, stream_options=options)
    assert [e["usage"]["completion_tokens"] for e in events[:-1]] == [1, 2, 3, 3]


async def test_characters_are_never_cut(bench: Bench) -> None:
    """A character of several tokens appears whole, with the token that completes it."""
    bench.fleet.decode.script = Script(tokens="aé€".encode())
    assert texts(await bench.stream()) == ["a", "", "é", "", "", "€"]


async def test_incomplete_character_at_the_end_is_replaced(bench: Bench) -> None:
    """What was cut off by max_tokens shows as U+FFFD."""
    bench.fleet.decode.script = Script(tokens="a€".encode())
    assert texts(await bench.stream(max_tokens=3)) == ["a", "", "\ufffd"]


@pytest.mark.parametrize(
    ("stop", "shown", "used_tokens"),
    [
        ("lo,", "Hel", 6),
        (["zzz", "wor"], "Hello, ", 10),
        (["o, w", "lo"], "Hel", 5),
        ("H", "", 1),
        ("world!", "Hello, world", 12),
        (["d", "Hello, world"], "", 12),
    ],
)
async def test_stop_strings_across_tokens(bench: Bench, stop: str | list[str], shown: str, used_tokens: int) -> None:
    """A stop string ends the answer wherever its tokens were cut; none of it is shown, streamed or not."""
    whole = await bench.complete(stop=stop, max_tokens=100)
    assert whole["choices"][0]["text"] == shown
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == used_tokens
    events = await bench.stream(stop=stop, max_tokens=100)
    assert "".join(texts(events)) == shown
    assert reasons(events)[-1] == "stop" and events[-1] == "[DONE]"
    assert len(texts(events)) == used_tokens


async def test_stop_string_cancels_both_nodes_at_once(bench: Bench) -> None:
    """Tokens that nobody will see are not made."""
    script = bench.fleet.decode.script = Script(hold_at=6)
    answer = await bench.complete(stop="lo")
    assert answer["choices"][0]["text"] == "Hel"
    await bench.fleet.all_idle()
    assert not script.gate.go_on.is_set()


async def test_min_tokens_shields_from_stop_strings(bench: Bench) -> None:
    """A stop string in the first min_tokens tokens is text like any other."""
    answer = await bench.complete(stop="l", min_tokens=5, max_tokens=100)
    assert answer["choices"][0]["text"] == "Hello, wor"


async def test_one_token_answer_need_not_wait_for_the_transfer(bench: Bench) -> None:
    """A first token that says it is the last one is answered before anything has landed."""
    raw = b'{"event":"token","token":72,"index":0,"finish":"length"}\n'
    bench.fleet.decode.script = Script(raw=raw)
    events = await bench.stream(max_tokens=1)
    assert texts(events) == ["H"] and reasons(events) == ["length"]
    assert events[-1] == "[DONE]"


async def test_explain_rides_on_the_usage_chunk(bench: Bench) -> None:
    """Asked for by field, the record comes with the last chunk."""
    events = await bench.stream(max_tokens=3, explain=True)
    assert events[-2]["choices"] == [] and events[-1] == "[DONE]"
    record = events[-2]["prfaas"]
    assert record["prefilled_in"] == "pd"
    assert record["output_tokens"] == 3
    assert record["kv_bytes"] == {"full": 20, "window": 0, "linear": 7}


async def test_explain_tells_decision_and_stages(bench: Bench) -> None:
    """Asked for by header, the record tells where, why, and how long each stage took."""
    body = {"prompt": "x" * 101, "max_tokens": 3}
    _, answer, _ = await bench.post("/v1/completions", body, headers={"X-PrfaaS-Explain": "1"})
    record = answer["prfaas"]
    expected = {
        "prompt_tokens": 101, "cached_tokens": 0, "incremental_tokens": 101, "threshold_tokens": 100,
        "policy": "threshold", "prefilled_in": "prfaas", "prefill_node": "prfaas-0", "decode_node": "pd-decode-0",
        "connections": 4, "prefill_s": 0.5, "transfer_s": 0.4, "exposed_s": 0.1, "finish_reason": "length",
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert record["reasons"][0] == "l = 101 > t = 100 tokens: the PrfaaS cluster"
    order = ["tokenized", "decided", "reserved", "first_token", "finished"]
    times = [record["stages_s"][stage] for stage in order]
    assert times == sorted(times)
    assert record["ttft_s"] == record["stages_s"]["first_token"]
    assert {"landed", "prefill_started", "prefilled", "transferred"} <= set(record["stages_s"])


async def test_no_explain_without_asking(bench: Bench) -> None:
    """An ordinary client sees an ordinary answer."""
    assert "prfaas" not in await bench.complete()


async def test_token_ids_on_request(bench: Bench) -> None:
    """With return_token_ids the very tokens come back, for exact comparison."""
    answer = await bench.complete(return_token_ids=True, max_tokens=5)
    assert answer["choices"][0]["token_ids"] == list(b"Hello")
    assert answer["choices"][0]["prompt_token_ids"] == list(b"Hi")
    events = await bench.stream(return_token_ids=True, max_tokens=2)
    assert [e["choices"][0]["token_ids"] for e in events[:2]] == [[72], [101]]
