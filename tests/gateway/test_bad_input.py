"""Everything that a client can do wrong, in one table: what it is answered, and that nothing is held afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from tests.waiting import until

from .conftest import Bench, open_bench
from .fakes import Gate, Script

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
KEY = "a-key-that-is-good"
# Longer than a machine that stalls takes to do anything: a row that waits for it waits for the deadline itself.
SOON = "300ms"


def http(
    path: str = COMPLETIONS,
    body: Any = b"",
    *,
    method: str = "POST",
    key: str = KEY,
    header: bytes = b"",
    length: int = -1,
) -> bytes:
    """A request as it goes over the wire; ``length`` is what it says of its body, where that is not true."""
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (head, header, len(data) if length < 0 else length, data)


@dataclass(frozen=True)
class Row:
    """What is sent, and what comes back.

    Attributes:
        status: of the answer; None: the connection is closed without one.
        param, words: of its error; the message must hold the words.
        kind: its type.
        settings: of the gateway.
    """

    sent: bytes
    status: int | None
    param: str | None = None
    words: str = ""
    kind: str = "invalid_request_error"
    settings: dict[str, Any] = field(default_factory=dict)


def bad(path: str, body: Any, status: int, param: str | None, words: str) -> Row:
    return Row(http(path, body), status, param, words)


ROWS: dict[str, Row] = {
    # -- what it says ---------------------------------------------------------------------------------------------
    "malformed": bad(COMPLETIONS, b'{"prompt": ', 400, None, 'not valid JSON'),
    "no utf-8": bad(COMPLETIONS, b'{"prompt": "\xff"}', 400, None, 'not valid JSON'),
    "empty body": bad(COMPLETIONS, b"", 400, None, "not valid JSON"),
    "not an object": bad(COMPLETIONS, [1, 2], 400, None, "not a JSON object"),
    "no prompt": bad(COMPLETIONS, {}, 400, "prompt", "empty"),
    "empty prompt": bad(COMPLETIONS, {"prompt": ""}, 400, "prompt", "empty"),
    "empty list": bad(COMPLETIONS, {"prompt": []}, 400, "prompt", "empty"),
    "empty list inside": bad(COMPLETIONS, {"prompt": [[]]}, 400, "prompt", "empty"),
    "prompt number": bad(COMPLETIONS, {"prompt": 5}, 400, "prompt", "a string or a list of token ids"),
    "prompt bools": bad(COMPLETIONS, {"prompt": [True]}, 400, "prompt", "a list of mixed types"),
    "prompt floats": bad(COMPLETIONS, {"prompt": [1.5]}, 400, "prompt", "a list of mixed types"),
    "two prompts": bad(COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt", "2 prompts"),
    "token too big": bad(COMPLETIONS, {"prompt": [1, 300]}, 400, "prompt", "prompt[1]"),
    "token negative": bad(COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "prompt[0]"),
    "too long": bad(COMPLETIONS, {"prompt": "x" * 4096}, 400, "prompt", "too long for this model"),
    "too long ids": bad(COMPLETIONS, {"prompt": [7] * 5000}, 400, "prompt", "at most 4096 tokens"),
    "too many tokens": bad(COMPLETIONS, {"prompt": "x", "max_tokens": 4096}, 400, "prompt", "max_tokens together"),
    "n": bad(COMPLETIONS, {"prompt": "x", "n": 17}, 400, "n", "less than or equal to 16"),
    "best_of": bad(COMPLETIONS, {"prompt": "x", "best_of": 3}, 400, "best_of", "not supported yet"),
    "logprobs": bad(COMPLETIONS, {"prompt": "x", "logprobs": 21}, 400, "logprobs", "less than or equal to 20"),
    "top_logprobs": bad(CHAT, {"messages": [USER], "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs: true"),
    "bias list": bad(COMPLETIONS, {"prompt": "x", "logit_bias": [1]}, 400, "logit_bias", "by token id"),
    "bias name": bad(COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias", "by token id"),
    "bias high": bad(COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias", "from -100 to 100"),
    "penalty": bad(COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, 400, "presence_penalty", "less than or equal"),
    "repetition": bad(
        COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty", "greater than 0",
    ),
    "min_p": bad(COMPLETIONS, {"prompt": "x", "min_p": 2}, 400, "min_p", "less than or equal"),
    "max_tokens text": bad(COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens", "valid integer"),
    "max_tokens zero": bad(COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "greater than or equal"),
    "temperature": bad(COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "temperature", "greater than or equal"),
    "top_p": bad(COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "top_p", "greater than 0"),
    "stream text": bad(COMPLETIONS, {"prompt": "x", "stream": "yes"}, 400, "stream", "valid boolean"),
    "seed float": bad(COMPLETIONS, {"prompt": "x", "seed": 1.5}, 400, "seed", "valid integer"),
    "stop number": bad(COMPLETIONS, {"prompt": "x", "stop": 3}, 400, "stop", "a string or up to 16"),
    "stop empty": bad(COMPLETIONS, {"prompt": "x", "stop": [""]}, 400, "stop", "1 to 1024 characters"),
    "stop many": bad(COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, 400, "stop", "up to 16"),
    "options alone": bad(COMPLETIONS, {"prompt": "x", "stream_options": {}}, 400, "stream_options", "stream: true"),
    "nested field": bad(
        COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"include_usage": 3}}, 400,
        "stream_options.include_usage", "valid boolean",
    ),
    "model number": bad(COMPLETIONS, {"prompt": "x", "model": 3}, 400, "model", "valid string"),
    "other model": bad(COMPLETIONS, {"prompt": "x", "model": "gpt-9"}, 404, "model", "no such model"),
    "no messages": bad(CHAT, {}, 400, "messages", "at least one message"),
    "messages text": bad(CHAT, {"messages": "Hi"}, 400, "messages", "at least one message"),
    "message text": bad(CHAT, {"messages": ["Hi"]}, 400, "messages[0]", "an object"),
    "role": bad(CHAT, {'messages': [{'role': 'king', 'content': 'Hi'}]}, 400, 'messages[0].role', "'king'"),
    "content": bad(CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content", "int"),
    "image": bad(
        CHAT, {"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, 400,
        "messages[1].content[0]", "image_url",
    ),
    "no text": bad(CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages", "empty"),
    "chat too long": bad(CHAT, {"messages": [{"role": "user", "content": "x" * 4096}]}, 400, "messages", "too long"),
    "tools": bad(CHAT, {"messages": [USER], "tools": [{"type": "function"}]}, 400, "tools", "not supported yet"),
    # -- who asks ----------------------------------------------------------------------------------------------------
    "no key": Row(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 401, None, "missing or wrong",
        "authentication_error",
    ),
    "bad key": Row(
        http(body={"prompt": "x"}, key="a-key-that-is-bad"), 401, None, "missing or wrong", "authentication_error"
    ),
    "key of bytes": Row(http(body={}, key="\u00ff\u00fe"), 401, None, "missing or wrong", "authentication_error"),
    "no admin": Row(http("/v1/reload"), 403, None, "may not", "permission_error"),
    # -- how it is sent ----------------------------------------------------------------------------------------------
    "oversized body": bad(COMPLETIONS, {"prompt": "x" * (40 << 10)}, 413, None, "too large"),
    "oversized body announced": Row(http(length=1 << 40), 413, None, "too large"),
    "oversized body in chunks": Row(
        http(header=b"Transfer-Encoding: chunked\r\n").replace(b"Content-Length: 0\r\n", b"")
        + b"8000\r\n%b\r\n8000\r\n%b\r\n0\r\n\r\n" % (b"x" * 0x8000, b"x" * 0x8000),
        413, None, "too large",
    ),
    "negative length": Row(http(length=-1).replace(b"Content-Length: 0", b"Content-Length: -5"), 400, None, "not HTTP"),
    "two lengths": Row(http(body={}, header=b"Content-Length: 7\r\n"), 400, None, "not HTTP"),
    "header too large": Row(http(header=b"X-A: %b\r\n" % (b"a" * 9000)), 431, None, "headers are too large"),
    "path too large": Row(http("/v1/" + "a" * 9000), 431, None, "headers are too large"),
    "too many headers": Row(http(header=b"X-A: a\r\n" * 200), 431, None, "headers are too large"),
    "not HTTP": Row(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, None, "not HTTP"),
    "no such path": bad("/v1/embeddings", {}, 404, None, "/v1/embeddings"),
    "wrong method": bad("/v1/models", {}, 405, None, "GET"),
    # -- how slowly --------------------------------------------------------------------------------------------------
    "slow headers": Row(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", None, settings={"http": {"header_timeout": SOON}}
    ),
    "no headers": Row(b"", None, settings={"http": {"header_timeout": SOON}}),
    "slow body": Row(
        http(body=b"{", length=100), 408, None, "took too long", "timeout_error", {"http": {"body_timeout": SOON}}
    ),
    "no body": Row(http(length=100), 408, None, "took too long", "timeout_error", {"http": {"body_timeout": SOON}}),
    # -- what the operator does not want -----------------------------------------------------------------------------
    "prompt over the bound": Row(
        http(body={"prompt": "x" * 101}), 400, "prompt", "longer than this gateway takes",
        settings={"max_prompt_tokens": 100},
    ),
}  # fmt: skip


def settings_for(row_settings: dict[str, Any]) -> dict[str, Any]:
    http_settings = {"port": 0, **row_settings.get("http", {})}
    return {"max_body": "32KiB", "api_keys": [KEY], **row_settings, "http": http_settings}


async def answer_to(bench: Bench, sent: bytes) -> tuple[int | None, dict[str, Any]]:
    """Send it, read until the answer is whole or the connection is closed."""
    reader, writer = await asyncio.open_connection(*bench.gateway.address)
    try:
        async with asyncio.timeout(20):
            writer.write(sent)
            head = await reader.read(1)
            if not head:
                return None, {}
            head += await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return int(head.split(b" ")[1]), orjson.loads(await reader.readexactly(length))
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except ConnectionError:
            pass  # what was sent beyond what is read is answered by a reset


async def assert_nothing_held(bench: Bench) -> None:
    """On no node, and not in the gateway."""
    await bench.fleet.all_idle()
    await until(lambda: not bench.gateway.router.state.assignments)
    bench.assert_nothing_held()
    assert await bench.metric("prfaas_requests_in_flight") == 0


def groups() -> dict[str, list[str]]:
    """Names of rows by the settings that they need, which are one gateway's."""
    found: dict[str, list[str]] = {}
    for name, row in ROWS.items():
        found.setdefault(orjson.dumps(row.settings).decode(), []).append(name)
    return found


@pytest.mark.parametrize("names", groups().values(), ids=groups())
async def test_bad_input(names: list[str]) -> None:
    """One clear line in OpenAI's shape that names the field; it reaches no node, and nothing is held."""
    async with open_bench(**settings_for(ROWS[names[0]].settings)) as bench:
        for name in names:
            row = ROWS[name]
            status, answer = await answer_to(bench, row.sent)
            assert status == row.status, (name, answer)
            if status is not None:
                error = answer["error"]
                assert set(error) == {"message", "type", "param", "code"}, name
                assert (error["param"], error["type"]) == (row.param, row.kind), (name, answer)
                assert row.words in error["message"] and "\n" not in error["message"], (name, answer)
                assert isinstance(error["code"], str), name
            assert not any(node.calls for node in bench.fleet.nodes), name
        await assert_nothing_held(bench)


def queued(bench: Bench) -> Gate:
    bench.fleet.near.queue_gate = Gate()
    return bench.fleet.near.queue_gate


def prefilling(bench: Bench) -> Gate:
    bench.fleet.near.script = Script(hold_at=0)
    return bench.fleet.near.script.gate


def transferring(bench: Bench) -> Gate:
    """The prompt has been run, and its KVCache is on its way to the decode node."""
    bench.fleet.decode.script = Script(hold_at=0)
    return bench.fleet.decode.script.gate


def streaming(bench: Bench) -> Gate:
    bench.fleet.decode.script = Script(hold_at=2)
    return bench.fleet.decode.script.gate


LEAVING: dict[str, tuple[bytes, Callable[[Bench], Gate] | None]] = {
    "in the headers": (http()[:40], None),
    "before the body": (http(length=50), None),
    "in the body": (http(body=b'{"prompt": "Hi', length=50), None),
    "while queued": (http(body={"prompt": "Hi"}), queued),
    "while prefilling": (http(body={"prompt": "Hi"}), prefilling),
    "while transferring": (http(body={"prompt": "Hi"}), transferring),
    "while decoding": (http(body={"prompt": "Hi"}), streaming),
    "while streaming": (http(body={"prompt": "Hi", "stream": True}), streaming),
    "while several choices are made": (http(body={"prompt": "Hi", "stream": True, "n": 3}), streaming),
}


@pytest.mark.parametrize("abruptly", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("stage", LEAVING)
async def test_a_client_that_leaves_frees_everything(stage: str, abruptly: bool) -> None:
    """At every stage; it is counted as 499, and the next client is served."""
    sent, hold = LEAVING[stage]
    async with open_bench(**settings_for({})) as bench, asyncio.timeout(30):
        gate = hold(bench) if hold is not None else None
        reader, writer = await asyncio.open_connection(*bench.gateway.address)
        writer.write(sent)
        await writer.drain()
        if gate is not None:
            await gate.reached.wait()
        if stage.startswith("while streaming"):
            await reader.readuntil(b"data: ")
        if abruptly:
            writer.transport.abort()
        writer.close()
        if gate is not None:
            await assert_nothing_held(bench)
            gate.go_on.set()
        if stage != "in the headers":
            await until(lambda: bench.count("prfaas_requests_total", route=COMPLETIONS, status="499") == 1)
        bench.fleet.near.queue_gate, bench.fleet.near.script, bench.fleet.decode.script = None, Script(), Script()
        assert (await bench.post(COMPLETIONS, {"prompt": "Hi"}, headers={"Authorization": f"Bearer {KEY}"}))[0] == 200
        await assert_nothing_held(bench)


@pytest.mark.parametrize(
    "sent", [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", http(length=1 << 10)], ids=["headers", "body"]
)
async def test_one_byte_at_a_time_is_no_way_around_a_deadline(sent: bytes) -> None:
    """It is of the whole, and not of the next byte."""
    async with open_bench(**settings_for({"http": {"header_timeout": SOON, "body_timeout": SOON}})) as bench:
        reader, writer = await asyncio.open_connection(*bench.gateway.address)

        async def trickle() -> None:
            writer.write(sent)
            while True:
                await asyncio.sleep(0.02)
                writer.write(b"a")

        dripping = asyncio.create_task(trickle())
        try:
            async with asyncio.timeout(20):
                answer = await reader.read()  # until the gateway closes
        except ConnectionError:
            answer = b""  # a byte came after it had
        finally:
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
            writer.transport.abort()
        assert answer.startswith(b"HTTP/1.1 408") or not answer
        await assert_nothing_held(bench)
