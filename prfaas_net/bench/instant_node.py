"""Nodes that answer at once, so that what a request takes is what stands in front of them.

One process with three nodes of our protocol (a PrfaaS cluster's prefill node, a PD cluster's prefill and decode node)
and the OpenAI API of an engine, for the direct call and for routers that speak that. Written on bare protocols: it has
to be faster than whatever is measured in front of it.

An answer of few tokens is written in one piece. A longer one is written as engines do it, a token at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import orjson
import uvloop

from prfaas_net.bench.processes import obey
from prfaas_net.nodes.feed import BEAT_S
from prfaas_net.nodes.node_state import STATE_BEAT_S

__all__ = ["MAX_BURST_TOKENS", "MODEL"]

MODEL = "instant"
# Longer answers are written one token a turn of the loop.
MAX_BURST_TOKENS = 32
BLOCK_TOKENS = 256
LAYOUT = "instant-layout"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\n%s\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
END = b"0\r\n\r\n"

Handler = Callable[["Exchange", bytes], None]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _line(event: dict[str, Any]) -> bytes:
    return orjson.dumps(event) + b"\n"


class Exchange(asyncio.Protocol):
    """One keep-alive connection; one request after the other.

    Args:
        routes: by method and path.
    """

    def __init__(self, routes: dict[bytes, Handler]) -> None:
        self._routes = routes
        self._received = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            method, path, _ = head.split(b" ", 2)
            route = method + b" " + path.split(b"?", 1)[0]
            self._routes.get(route, _unknown)(self, body)

    def write(self, data: bytes) -> None:
        """Nothing happens once the caller has left."""
        if self.transport is not None:
            self.transport.write(data)

    def begin(self, kind: bytes, data: bytes = b"") -> None:
        """Head of an answer in chunks, and the first of them."""
        self.write(HEAD % (kind, CHUNKED) + (_chunk(data) if data else b""))

    def answer(self, body: bytes) -> None:
        """A whole answer."""
        self.write(HEAD % (b"application/json", b"Content-Length: %d\r\n" % len(body)) + body)

    def pour(self, pieces: Iterator[bytes], n_tokens: int, first: bytes = b"") -> None:
        """The rest of an answer in chunks: in one write, or one piece a turn of the loop."""
        if n_tokens <= MAX_BURST_TOKENS:
            self.write(first + b"".join(map(_chunk, pieces)) + END)
            return
        self.write(first)
        self._drip(pieces)

    def _drip(self, pieces: Iterator[bytes]) -> None:
        if self.transport is None:
            return
        piece = next(pieces, None)
        self.write(END if piece is None else _chunk(piece))
        if piece is not None:
            asyncio.get_running_loop().call_soon(self._drip, pieces)


def _unknown(exchange: Exchange, body: bytes) -> None:
    exchange.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


class InstantNodes:
    """The nodes, their ports and what they answer.

    Args:
        token_ids: an answer is these, again and again; ``texts``, by place, as what.
    """

    def __init__(self, token_ids: list[int], texts: list[str], vocab_size: int, max_model_tokens: int) -> None:
        self._token_ids, self._texts = token_ids, texts
        self._sizes = {"max_model_tokens": max_model_tokens, "vocab_size": vocab_size}
        # Decode calls by the request that waits for its prefill.
        self._waiting: dict[str, tuple[Exchange, int]] = {}
        self._servers: list[asyncio.Server] = []

    async def start(self) -> list[int]:
        """Listen; the ports of the engine, the PrfaaS node, and the PD cluster's prefill and decode node."""
        nodes = (("prfaas", "prefill"), ("pd", "prefill"), ("pd", "decode"))
        return [await self._listen(self._engine()), *[await self._listen(self._node(*node)) for node in nodes]]

    def stop(self) -> None:
        for server in self._servers:
            server.close()

    async def _listen(self, routes: dict[bytes, Handler]) -> int:
        server = await asyncio.get_running_loop().create_server(lambda: Exchange(routes), "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    # -- our protocol ---------------------------------------------------------------------------------------------

    def _node(self, cluster: str, role: str) -> dict[bytes, Handler]:
        name = f"{cluster}-{role}"
        info = orjson.dumps(
            {
                "node_id": name, "boot_id": name, "cluster": cluster, "role": role, "model": MODEL, "layout": LAYOUT,
                "prefill_chunk_tokens": 512, "block_tokens": BLOCK_TOKENS, "groups": ["full"],
                "kv_size": {"constant_bytes": 0, "bytes_per_token": 1024},
                "profile": {"prefill": [[512, 1e-4], [131072, 1e-2]], "decode_step_s": 1e-4, "max_batch": 256},
                **self._sizes,
            }
        )  # fmt: skip
        snapshot = _line(
            {
                "event": "snapshot", "node": name, "boot": name, "layout": LAYOUT, "block_tokens": BLOCK_TOKENS,
                "seq": 1, "groups": ["full"], "stored": [],
            }
        )  # fmt: skip
        state = _line({"event": "state", "queue_tokens": 0, "links": []})
        return {
            b"GET /v1/node": lambda exchange, body: exchange.answer(info),
            b"GET /health": lambda exchange, body: exchange.answer(b"{}"),
            b"GET /v1/cache/events": lambda exchange, body: _tell(exchange, snapshot, _line({"event": "beat"}), BEAT_S),
            b"GET /v1/state/events": lambda exchange, body: _tell(exchange, state, state, STATE_BEAT_S),
            b"POST /v1/prefill": self._prefill,
            b"POST /v1/decode": self._decode,
        }

    def _decode(self, exchange: Exchange, body: bytes) -> None:
        call = orjson.loads(body)
        request_id = call["request_id"]
        self._waiting[request_id] = (exchange, call["sampling"]["max_tokens"])
        exchange.begin(b"application/x-ndjson", _line({"event": "reserved", "ticket": {"transfer": request_id}}))

    def _prefill(self, exchange: Exchange, body: bytes) -> None:
        call = orjson.loads(body)
        request_id = call["ticket"]["transfer"]
        report = {
            "request_id": request_id, "prompt_tokens": len(call["token_ids"]), "kv_bytes": {"full": 1},
            "connections": 1, "resent_chunks": 0, "queued_s": 0.0, "prefill_s": 0.0, "transfer_s": 0.0,
            "exposed_s": 0.0,
        }  # fmt: skip
        events: list[dict[str, Any]] = [
            {"event": "started", "queued_s": 0.0, "cached_tokens": 0},
            {"event": "prefilled", "prefill_s": 0.0},
            {"event": "done", "report": report},
        ]
        exchange.begin(b"application/x-ndjson", b"".join(map(_line, events)))
        exchange.write(END)
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            decode, n_tokens = waiting
            decode.pour(self._token_lines(n_tokens), n_tokens)

    def _token_lines(self, n_tokens: int) -> Iterator[bytes]:
        for index in range(n_tokens):
            event = {"event": "token", "token": self._token_ids[index % len(self._token_ids)], "index": index}
            if index == 0:
                yield _line({**event, "cached_tokens": 0}) + _line({"event": "landed", "at_s": 0.0})
            else:
                yield _line(event)
        yield _line({"event": "finish", "reason": "length", "output_tokens": n_tokens})

    # -- an engine's ------------------------------------------------------------------------------------------------

    def _engine(self) -> dict[bytes, Handler]:
        models = orjson.dumps(
            {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "max_model_len": self._sizes["max_model_tokens"]}],
            }
        )
        return {
            b"GET /health": lambda exchange, body: exchange.answer(b"{}"),
            b"GET /v1/models": lambda exchange, body: exchange.answer(models),
            b"POST /v1/completions": self._complete,
        }

    def _complete(self, exchange: Exchange, body: bytes) -> None:
        call = orjson.loads(body)
        n_tokens = call.get("max_tokens") or 16
        head = {"id": "cmpl-instant", "object": "text_completion", "created": 0, "model": MODEL}
        usage = {"prompt_tokens": 1, "completion_tokens": n_tokens, "total_tokens": n_tokens + 1}
        texts = (self._texts[index % len(self._texts)] for index in range(n_tokens))
        if not call.get("stream"):
            choice = {"index": 0, "text": "".join(texts), "logprobs": None, "finish_reason": "length"}
            answer: dict[str, Any] = {**head, "choices": [choice], "usage": usage}
            # A prefill of routers that split prefill and decode.
            if "kv_transfer_params" in call:
                answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [0]}
            exchange.answer(orjson.dumps(answer))
            return
        token_ids = self._token_ids if call.get("return_token_ids") else None
        events = _events(head, texts, n_tokens, token_ids)
        exchange.pour(events, n_tokens, HEAD % (b"text/event-stream", CHUNKED))


def _events(
    head: dict[str, Any], texts: Iterator[str], n_tokens: int, token_ids: Sequence[int] | None
) -> Iterator[bytes]:
    """Server-sent events, one a token."""
    for index, text in enumerate(texts):
        reason = "length" if index == n_tokens - 1 else None
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        if token_ids is not None:
            choice["token_ids"] = [token_ids[index % len(token_ids)]]
        yield b"data: " + orjson.dumps({**head, "choices": [choice]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _tell(exchange: Exchange, first: bytes, beat: bytes, every_s: float) -> None:
    """An endless answer."""

    def again() -> None:
        if exchange.transport is not None:
            exchange.write(_chunk(beat))
            asyncio.get_running_loop().call_later(every_s, again)

    exchange.begin(b"application/x-ndjson", first)
    asyncio.get_running_loop().call_later(every_s, again)


async def _main() -> None:
    running: list[InstantNodes] = []

    async def start(**answer: Any) -> dict[str, Any]:
        running.append(InstantNodes(**answer))
        return {"ports": await running[-1].start()}

    await obey({"start": start})
    for nodes in running:
        nodes.stop()


if __name__ == "__main__":
    uvloop.run(_main())
