"""A pair of pretend nodes that speak the real protocol to the gateway, and a tokenizer of bytes."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from aiohttp import web

from prfaas_net.errors import CancelledByPeer, PrfaasError
from prfaas_net.nodes.auth import check_control_token

LAYOUT = "0123456789abcdef"
MAX_MODEL_TOKENS = 4096
VOCAB_SIZE = 300
# Ends an answer in a script; has no text.
EOS = 299


class ByteStream:
    """Bytes back to text, never cutting inside a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """One token a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def token_text(self, token: int) -> str:
        return bytes([token]).decode(errors="replace") if token < 256 else "<end>"

    def stream(self) -> ByteStream:
        return ByteStream()


@dataclass
class Gate:
    """A place where a script waits: the test learns that it was reached, and lets it go on."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> None:
        self.reached.set()
        await self.go_on.wait()


@dataclass
class Script:
    """What a node does with the next calls.

    Attributes:
        tokens: the answer, before ``max_tokens`` cuts it (decode).
        refuse: answer with this error as an HTTP status.
        fail_at: after so many tokens (decode), or after ``started`` (prefill, any number) ...
        error: ... send this as an error event,
        die: ... or break the connection,
        end: ... or just end the answer.
        hold_at, gate: wait at the gate before this token (decode), or after ``started`` (prefill).
        raw: send this line in place of the first token.
        split_finish: send the finish event in a write of its own.
        no_finish: end the answer without one.
        no_landed: never say that the KVCache has landed.
        no_logprobs: send none, although they were asked for.
        cached_tokens: of the prompt, as found in the cache.
    """

    tokens: Sequence[int] = tuple(b"Hello, world")
    refuse: PrfaasError | None = None
    fail_at: int | None = None
    error: PrfaasError | None = None
    die: bool = False
    end: bool = False
    hold_at: int | None = None
    gate: Gate = field(default_factory=Gate)
    raw: bytes | None = None
    split_finish: bool = False
    no_finish: bool = False
    no_landed: bool = False
    no_logprobs: bool = False
    cached_tokens: Any = 0


class Fabric:
    """Joins a prefill call to the decode call that issued its ticket, as the KV stream would."""

    def __init__(self) -> None:
        self.transfers: dict[str, asyncio.Future[None]] = {}

    def issue(self, request_id: str) -> dict[str, Any]:
        self.transfers[request_id] = asyncio.get_running_loop().create_future()
        return {"transfer": request_id}


class FakeNode:
    """One node on a port of its own."""

    def __init__(
        self, fabric: Fabric, role: Literal["prefill", "decode"], cluster: str, node_id: str, node_key: str | None
    ) -> None:
        self.fabric = fabric
        self.role = role
        self.info: dict[str, Any] = {
            "node_id": node_id, "boot_id": "boot-1", "cluster": cluster, "role": role, "model": "fake",
            "layout": LAYOUT, "max_model_tokens": MAX_MODEL_TOKENS, "vocab_size": VOCAB_SIZE,
            "prefill_chunk_tokens": 64,
        }  # fmt: skip
        self.script = Script()
        self.healthy = True
        # Does not say anything more of itself, as if the way to it had gone.
        self.silent = False
        # Where calls wait before they are answered at all.
        self.queue_gate: Gate | None = None
        self.calls: list[dict[str, Any]] = []
        self.extra_routes: list[web.RouteDef] = []
        self.open_calls = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.polled = asyncio.Condition()
        self._node_key = node_key
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        work = self._decode if self.role == "decode" else self._prefill
        app.add_routes(
            [
                web.get("/v1/node", self._info),
                web.get("/health", self._health),
                web.post(f"/v1/{self.role}", self._owned(work)),
                *self.extra_routes,
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def next_polls(self, count: int) -> None:
        """Wait until the gateway has finished asking for health so many times more."""
        for _ in range(count):
            async with self.polled:
                await self.polled.wait()

    async def _info(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.Event().wait()
        return web.json_response(self.info)

    async def _health(self, request: web.Request) -> web.Response:
        async with self.polled:
            self.polled.notify_all()
        return web.json_response({}, status=200 if self.healthy else 503)

    def _owned(self, work: Any) -> Any:
        async def handler(request: web.Request) -> web.StreamResponse:
            if self._node_key is not None:
                header = request.headers.get("Authorization")
                if not check_control_token(header, self._node_key):
                    return web.Response(status=401, text="who are you?")
            call = orjson.loads(await request.read())
            self.calls.append(call)
            if self.script.refuse is not None:
                error = self.script.refuse
                return web.json_response(error.to_wire(), status=error.http_status)
            self.open_calls += 1
            self.idle.clear()
            response = web.StreamResponse()
            try:
                if self.queue_gate is not None:
                    await self.queue_gate.wait()
                await response.prepare(request)
                await work(request, response, call)
                await response.write_eof()
                return response
            finally:
                self.open_calls -= 1
                if self.open_calls == 0:
                    self.idle.set()

        return handler

    async def _broken(self, request: web.Request, response: web.StreamResponse, script: Script) -> bool:
        """Fail as scripted; true if the answer is over."""
        if script.error is not None:
            await response.write(_line({"event": "error", "error": script.error.to_wire()}))
            return True
        if script.die:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()
        return script.end

    async def _decode(self, request: web.Request, response: web.StreamResponse, call: dict[str, Any]) -> None:
        script = self.script
        await response.write(_line({"event": "reserved", "ticket": self.fabric.issue(call["request_id"])}))
        transfer = self.fabric.transfers[call["request_id"]]
        limit = call["sampling"]["max_tokens"]
        tokens = list(script.tokens)[:limit]
        finish = {
            "event": "finish",
            "reason": "length" if len(tokens) == limit else "stop",
            "output_tokens": len(tokens),
        }
        try:
            for index, token in enumerate(tokens):
                if script.hold_at == index:
                    await script.gate.wait()
                if script.fail_at == index and await self._broken(request, response, script):
                    return
                if index == 0:
                    await transfer
                    if script.raw is not None:
                        await response.write(script.raw)
                event = {"event": "token", "token": token, "index": index}
                if index == 0:
                    event["cached_tokens"] = script.cached_tokens
                if call["sampling"]["logprobs"] is not None and not script.no_logprobs:
                    top = [[token + i, -0.5 - i] for i in range(call["sampling"]["logprobs"])]
                    event["logprobs"] = {"logprob": -0.5, "top": top}
                lines = _line(event)
                if index == 0 and not script.no_landed:
                    lines += _line({"event": "landed", "at_s": 0.01})
                if index == len(tokens) - 1 and not script.split_finish and not script.no_finish:
                    lines += _line(finish)
                await response.write(lines)
            if script.split_finish:
                await response.write(_line(finish))
        except CancelledByPeer as error:
            await response.write(_line({"event": "error", "error": error.to_wire()}))

    async def _prefill(self, request: web.Request, response: web.StreamResponse, call: dict[str, Any]) -> None:
        script, transfer = self.script, self.fabric.transfers[call["ticket"]["transfer"]]
        try:
            await response.write(_line({"event": "started", "queued_s": 0.0, "cached_tokens": script.cached_tokens}))
            if script.hold_at is not None:
                await script.gate.wait()
            if script.fail_at is not None and await self._broken(request, response, script):
                return
            n_tokens = len(call["token_ids"])
            await response.write(_line({"event": "progress", "tokens": n_tokens}))
            await response.write(_line({"event": "prefilled", "prefill_s": 0.5}))
            if not transfer.done():
                transfer.set_result(None)
            report = {
                "request_id": call["request_id"], "prompt_tokens": n_tokens, "cached_tokens": script.cached_tokens,
                "kv_bytes": {"full": 10 * n_tokens, "window": 0, "linear": 7}, "connections": 4,
                "resent_chunks": 0, "queued_s": 0.0, "prefill_s": 0.5, "transfer_s": 0.4, "exposed_s": 0.1,
            }  # fmt: skip
            await response.write(_line({"event": "done", "report": report}))
        finally:
            if not transfer.done():
                # What a decode node says when the KV stream it waits for is given up.
                transfer.set_exception(CancelledByPeer("the sender gave up"))
                transfer.exception()


def _line(event: dict[str, Any]) -> bytes:
    return orjson.dumps(event) + b"\n"


@dataclass
class FakeFleet:
    """A PrfaaS cluster of one prefill node, and a PD cluster of one prefill and one decode node; or more."""

    far: FakeNode
    near: FakeNode
    decode: FakeNode
    more: list[FakeNode] = field(default_factory=list)

    @property
    def nodes(self) -> list[FakeNode]:
        return [self.far, self.near, self.decode, *self.more]

    def add(self, role: Literal["prefill", "decode"], cluster: str, node_id: str) -> FakeNode:
        """One more node, before the fleet has started."""
        node = FakeNode(self.decode.fabric, role, cluster, node_id, None)
        self.more.append(node)
        return node

    async def all_idle(self) -> None:
        """Wait until no call is open on any node."""
        async with asyncio.timeout(5):
            for node in self.nodes:
                await node.idle.wait()


@asynccontextmanager
async def fake_fleet(
    node_key: str | None = None, prepare: Callable[[FakeFleet], object] = lambda fleet: None
) -> AsyncIterator[FakeFleet]:
    fabric = Fabric()
    fleet = FakeFleet(
        FakeNode(fabric, "prefill", "prfaas", "prfaas-0", node_key),
        FakeNode(fabric, "prefill", "pd", "pd-prefill-0", node_key),
        FakeNode(fabric, "decode", "pd", "pd-decode-0", node_key),
    )
    prepare(fleet)
    for node in fleet.nodes:
        await node.start()
    try:
        yield fleet
    finally:
        for node in fleet.nodes:
            await node.stop()
