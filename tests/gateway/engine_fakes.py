"""Pretend vLLM and SGLang servers with the wire of the real ones, and a gateway before them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from prfaas_net.gateway import Gateway, GatewayConfig
from tests.gateway.conftest import THRESHOLD_TOKENS, Bench
from tests.gateway.fakes import ByteTokenizer, FakeFleet, Gate
from tests.waiting import until

MODEL = "org/model"
ANSWER = b"Hello, world"


@dataclass
class EngineScript:
    """What a server does with the next calls.

    Attributes:
        tokens: the answer, before the bound cuts it.
        refuse: answer with this status and body instead.
        fail_at, error: after so many tokens send this event as an error ...
        die: ... or break the connection,
        end: ... or just end the answer,
        hang_at: wait at the gate before this token.
        per_chunk: tokens in one event.
        incremental: events have new tokens only (SGLang).
        finish: why the answer ends, where that is not its length.
        cached: prompt tokens found in the cache.
        no_params: the prefill answer lacks kv_transfer_params (vLLM); params: it has these.
        no_tokens: events do not say which tokens they bring.
        hold: wait at the gate before anything is answered.
    """

    tokens: Sequence[int] = tuple(ANSWER)
    refuse: tuple[int, Any] | None = None
    fail_at: int | None = None
    error: dict[str, Any] | None = None
    die: bool = False
    end: bool = False
    hang_at: int | None = None
    gate: Gate = field(default_factory=Gate)
    per_chunk: int = 1
    incremental: bool = False
    finish: Any = None
    cached: int = 0
    no_params: bool = False
    params: dict[str, Any] | None = None
    no_tokens: bool = False
    hold: bool = False


class Handovers:
    """Joins the two halves of a request, as the KV transfer would."""

    def __init__(self) -> None:
        self._kept: defaultdict[Any, asyncio.Event] = defaultdict(asyncio.Event)

    def keep(self, key: Any) -> None:
        self._kept[key].set()

    async def take(self, key: Any) -> None:
        await self._kept[key].wait()


class FakeEngine:
    """One server on a port of its own."""

    path = ""
    metrics_text = ""

    def __init__(self, handovers: Handovers, name: str, role: str, cluster: str) -> None:
        self.handovers, self.name, self.role, self.cluster = handovers, name, role, cluster
        self.settings: dict[str, Any] = {}
        self.script = EngineScript()
        self.calls: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.aborted: list[str] = []
        self.health: int = 200
        # What it says that it was started for (SGLang).
        self.mode: str | None = None
        # Does not answer anything more, as if the way to it had gone.
        self.silent = False
        self.models: Any = {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]}
        self.running = self.waiting = 0
        self.started_s = 1000.0
        self.api_key = ""
        self.open_calls = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def node(self) -> dict[str, Any]:
        """Its part of a gateway's configuration."""
        own = {"url": f"http://127.0.0.1:{self.port}", "kind": self.kind, "role": self.role, "cluster": self.cluster}
        return {**own, "name": self.name, **self.settings}

    kind = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/abort_request", self._abort),
                web.get("/get_server_info", self._info),
                web.post(self.path, self._serve),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        if self.silent:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _info(self, request: web.Request) -> web.Response:
        if self.mode is None:
            raise web.HTTPNotFound
        return web.json_response({"disaggregation_mode": self.mode, "tp_size": 1})

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {"running": self.running, "waiting": self.waiting, "started": self.started_s}
        return web.Response(text=self.metrics_text % values)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(orjson.loads(await request.read())["rid"])
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = orjson.loads(await request.read())
        self.calls.append(body)
        self.headers.append(request.headers)
        script = self.script
        if script.refuse is not None:
            status, refusal = script.refuse
            text = refusal if isinstance(refusal, str) else orjson.dumps(refusal).decode()
            return web.Response(status=status, text=text, content_type="application/json")
        self.open_calls += 1
        self.idle.clear()
        try:
            if script.hold:
                await script.gate.wait()
            return await self.answer(request, body, script)
        finally:
            self.open_calls -= 1
            if self.open_calls == 0:
                self.idle.set()

    async def answer(self, request: web.Request, body: dict[str, Any], script: EngineScript) -> web.StreamResponse:
        raise NotImplementedError

    async def stream(
        self, request: web.Request, tokens: list[int], limit: int, script: EngineScript
    ) -> web.StreamResponse:
        """Events for these tokens, with everything that may go wrong on the way."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        reason = script.finish or ("length" if len(tokens) == limit else "stop")
        for start in range(0, len(tokens), script.per_chunk):
            if script.hang_at is not None and start >= script.hang_at:
                await script.gate.wait()
            if script.fail_at is not None and start >= script.fail_at:
                if script.error is not None:
                    await response.write(_sse(script.error) + b"data: [DONE]\n\n")
                    return response
                if script.die:
                    assert request.transport is not None
                    request.transport.abort()
                    await asyncio.Event().wait()
                if script.end:
                    return response
            stop = min(start + script.per_chunk, len(tokens))
            await response.write(_sse(self.event(tokens, start, stop, reason if stop == len(tokens) else None, script)))
        await response.write(self.last(tokens, script) + b"data: [DONE]\n\n")
        return response

    def event(self, tokens: list[int], start: int, stop: int, reason: Any, script: EngineScript) -> dict[str, Any]:
        raise NotImplementedError

    def last(self, tokens: list[int], script: EngineScript) -> bytes:
        return b""


class FakeVllm(FakeEngine):
    """``/v1/completions``; its connector hands over by remote block ids, or by transfer id where that is given."""

    kind, path = "vllm", "/v1/completions"
    metrics_text = (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0",model_name="org/model"} %(running)s\n'
        "# TYPE vllm:num_requests_waiting gauge\n"
        'vllm:num_requests_waiting{engine="0",model_name="org/model"} %(waiting)s\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="org/model"} 0.25\n'
        "# TYPE vllm:prompt_tokens counter\n"
        'vllm:prompt_tokens_total{engine="0",model_name="org/model"} 3000.0\n'
        "# TYPE vllm:request_success counter\n"
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="org/model"} 20.0\n'
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="org/model"} 10.0\n'
        "# TYPE process_start_time_seconds gauge\n"
        "process_start_time_seconds %(started)s\n"
    )

    async def answer(self, request: web.Request, body: dict[str, Any], script: EngineScript) -> web.StreamResponse:
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            key = params.get("transfer_id") or [self.name, len(self.calls)]
            self.handovers.keep(str(key))
            answer: dict[str, Any] = {
                "id": "cmpl-1", "object": "text_completion", "model": body["model"],
                "choices": [{"index": 0, "text": "?", "finish_reason": "length", "token_ids": [63]}],
                "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1,
                          "prompt_tokens_details": {"cached_tokens": script.cached}},
            }  # fmt: skip
            if script.params is not None:
                answer["kv_transfer_params"] = script.params
            elif not script.no_params:
                answer["kv_transfer_params"] = {
                    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2], [7]],
                    "remote_engine_id": self.name, "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1,
                    "key": str(key), "later": {"versions": ["may", None, 1.5]},
                }  # fmt: skip
            return web.json_response(answer)
        if params.get("do_remote_prefill"):
            await self.handovers.take(params.get("key") or params["transfer_id"])
        tokens = list(script.tokens)[: body["max_tokens"]]
        self._logprobs = body.get("logprobs")
        self._prompt_tokens = len(body["prompt"])
        return await self.stream(request, tokens, body["max_tokens"], script)

    def event(self, tokens: list[int], start: int, stop: int, reason: Any, script: EngineScript) -> dict[str, Any]:
        new = tokens[start:stop]
        choice: dict[str, Any] = {"index": 0, "text": bytes(t for t in new if t < 256).decode(errors="replace")}
        choice |= {"logprobs": None, "finish_reason": reason}
        if not script.no_tokens:
            choice["token_ids"] = new
        if self._logprobs is not None:
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}" for token in new],
                "token_logprobs": [-0.5 for _ in new],
                # The chosen one last, as vLLM adds it where it is not among the likeliest.
                "top_logprobs": [
                    {f"token_id:{t + i + 1}": -0.1 - i for i in range(self._logprobs)} | {f"token_id:{t}": -9.0}
                    for t in new
                ],
                "text_offset": [0 for _ in new],
            }
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}

    def last(self, tokens: list[int], script: EngineScript) -> bytes:
        usage = {"prompt_tokens": self._prompt_tokens, "completion_tokens": len(tokens)}
        details = {"prompt_tokens_details": {"cached_tokens": script.cached}}
        return _sse({"id": "cmpl-1", "choices": [], "usage": {**usage, **details}})


class FakeSglang(FakeEngine):
    """``/generate``; the two halves meet in a bootstrap room."""

    kind, path = "sglang", "/generate"
    metrics_text = (
        "# TYPE sglang:num_running_reqs gauge\n"
        'sglang:num_running_reqs{model_name="org/model"} %(running)s\n'
        "# TYPE sglang:num_queue_reqs gauge\n"
        'sglang:num_queue_reqs{model_name="org/model"} %(waiting)s\n'
        "# TYPE sglang:prompt_tokens counter\n"
        'sglang:prompt_tokens_total{model_name="org/model"} 3000.0\n'
        "# TYPE sglang:num_requests counter\n"
        'sglang:num_requests_total{model_name="org/model"} 30.0\n'
    )

    async def answer(self, request: web.Request, body: dict[str, Any], script: EngineScript) -> web.StreamResponse:
        room = body.get("bootstrap_room")
        self._body = body
        limit = body["sampling_params"]["max_new_tokens"]
        if room is not None and self.role == "prefill":
            self.handovers.keep(room)
            limit = 1
        elif room is not None:
            await self.handovers.take(room)
        return await self.stream(request, list(script.tokens)[:limit], limit, script)

    def event(self, tokens: list[int], start: int, stop: int, reason: Any, script: EngineScript) -> dict[str, Any]:
        shown = tokens[start:stop] if script.incremental else tokens[:stop]
        if isinstance(reason, str):
            reason = {"type": reason, "matched": None}
        meta: dict[str, Any] = {"id": self._body["rid"], "finish_reason": reason, "completion_tokens": stop}
        meta |= {"prompt_tokens": len(self._body["input_ids"]), "cached_tokens": script.cached}
        if self._body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in shown]
            n_top = self._body["top_logprobs_num"]
            meta["output_top_logprobs"] = [[[-0.1 - i, token + i + 1, None] for i in range(n_top)] for token in shown]
        event = {"text": bytes(t for t in shown if t < 256).decode(errors="replace"), "meta_info": meta}
        return event if script.no_tokens else {**event, "output_ids": shown}


async def eventually(condition: Callable[[], object]) -> None:
    """Wait for something that does not take long, on a machine that may be busy."""
    await until(condition, within_s=20)


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


@dataclass
class EngineBench(Bench):
    """A running gateway and the servers behind it, by name."""

    engines: dict[str, FakeEngine] = field(default_factory=dict)

    async def all_idle(self) -> None:
        """Wait until no call is open on any server."""
        async with asyncio.timeout(30):
            for engine in self.engines.values():
                await engine.idle.wait()

    async def record(self, **body: Any) -> Any:
        """The record of a request that is answered whole."""
        return (await self.complete(explain=True, **body))["prfaas"]


@asynccontextmanager
async def engine_bench(*engines: FakeEngine, **settings: Any) -> AsyncIterator[EngineBench]:
    """A gateway before these servers; at the end nothing may be held anywhere."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        defaults: dict[str, Any] = {
            "http": {"port": 0}, "model": "fake", "threshold_tokens": THRESHOLD_TOKENS, "request_deadline": 50,
            "nodes": [engine.node for engine in engines],
            # A machine that is busy must not look like a server that is gone.
            "fleet": {"poll_interval": 0.02, "poll_timeout": 10},
        }  # fmt: skip
        config = GatewayConfig.model_validate({**defaults, **settings})
        http = await stack.enter_async_context(aiohttp.ClientSession())
        gateway = await stack.enter_async_context(Gateway(config, ByteTokenizer()))
        nobody: Any = None
        fleet: FakeFleet = nobody
        bench = EngineBench(gateway, fleet, http, {engine.name: engine for engine in engines})
        yield bench
        await bench.all_idle()
        bench.assert_nothing_held()
