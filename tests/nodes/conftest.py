"""A prefill and a decode node on loopback, and a gateway's hand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson
import pytest

from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode import DecodeNode
from prfaas_net.nodes.prefill import PrefillNode
from tests.nodes.hash_engine import HashEngine
from tests.waiting import until

Event = dict[str, Any]


class Hand:
    """Calls nodes as a gateway does."""

    def __init__(self, session: aiohttp.ClientSession, prefill: PrefillNode, decode: DecodeNode) -> None:
        self.session = session
        self.prefill_node = prefill
        self.decode_node = decode

    @contextlib.asynccontextmanager
    async def call(self, node: PrefillNode | DecodeNode, path: str, body: Event) -> AsyncIterator[Stream]:
        url = "http://{}:{}".format(*node.control.address) + path
        async with self.session.post(url, data=orjson.dumps(body)) as response:
            yield Stream(response)

    def decode(self, n_tokens: int, **changes: Any) -> contextlib.AbstractAsyncContextManager[Stream]:
        body = {
            "request_id": "r1",
            "prompt_tokens": n_tokens,
            "layout": self.prefill_node.engine.layout.fingerprint,
            "chunk_tokens": self.prefill_node.engine.prefill_chunk_tokens,
            "source_cluster": "prfaas",
            "deadline_s": 10.0,
            "sampling": {"max_tokens": 8},
        } | changes
        return self.call(self.decode_node, "/v1/decode", body)

    def prefill(
        self, token_ids: list[int], ticket: Event, **changes: Any
    ) -> contextlib.AbstractAsyncContextManager[Stream]:
        body = {
            "request_id": "r1",
            "token_ids": token_ids,
            "ticket": ticket,
            "deadline_s": 10.0,
            "sampling": {"max_tokens": 8},
        } | changes
        return self.call(self.prefill_node, "/v1/prefill", body)

    async def settled(self) -> None:
        """Both nodes hold nothing any more."""
        await until(lambda: not self.decode_node.memory.used_bytes and not self.prefill_node.memory.used_bytes)
        await until(lambda: not self.decode_node.listener.reservations)


class Stream:
    """The events of an open call."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self) -> Event:
        line = await self.response.content.readline()
        event: Event = orjson.loads(line) if line else {"event": "end"}
        return event

    async def until(self, name: str) -> Event:
        while (event := await self.next())["event"] not in (name, "error", "end"):
            pass
        return event

    async def all(self) -> list[Event]:
        return [orjson.loads(line) async for line in self.response.content]


Nodes = Callable[..., contextlib.AbstractAsyncContextManager[Hand]]


@contextlib.asynccontextmanager
async def _nodes(
    prefill_engine: HashEngine | None = None,
    decode_engine: HashEngine | None = None,
    prefill: Event | None = None,
    decode: Event | None = None,
) -> AsyncIterator[Hand]:
    small = {"kv": {"arena": "8MiB"}}
    p_config = NodeConfig.model_validate(
        {"role": "prefill", "node_id": "p0", "cluster": "prfaas", **small, **(prefill or {})}
    )
    d_config = NodeConfig.model_validate({"role": "decode", "node_id": "d0", **small, **(decode or {})})
    p = PrefillNode(p_config, prefill_engine or HashEngine())
    d = DecodeNode(d_config, decode_engine or HashEngine())
    async with contextlib.AsyncExitStack() as stack:
        for node in (d, p):
            await node.start()
            stack.push_async_callback(node.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Hand(session, p, d)


@pytest.fixture
def nodes() -> Nodes:
    return _nodes
