"""The gateway's calls to nodes: JSON lines over one open response that owns the work."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from prfaas_net.errors import (
    AuthError,
    BusyError,
    IncompatibleError,
    LinkError,
    PeerError,
    PrfaasError,
    ProtocolError,
    error_from_wire,
)
from prfaas_net.gateway.http_pool import HttpAnswer, HttpPool
from prfaas_net.gateway.traces import trace_headers
from prfaas_net.nodes.auth import control_token
from prfaas_net.nodes.messages import NodeInfo

__all__ = ["CONNECT_TIMEOUT_S", "MAX_LINE_BYTES", "LineBuffer", "NodeClient", "NodeDraining", "NodeStream"]

# The longest line is a ticket: some hundred bytes and a digest for each endpoint. This is far above it and
# still bounds what a broken node can make us hold.
MAX_LINE_BYTES = 256 << 10
# Of an error body that is read to learn the reason.
MAX_ERROR_BYTES = 64 << 10
# Three lost SYNs (1 s, 2 s, 4 s apart); a node that answers later than this is not worth waiting for.
CONNECT_TIMEOUT_S = 5.0


class NodeDraining(BusyError):
    """A node says that it is about to leave: it ends what it has and takes nothing new."""


class LineBuffer:
    """Cuts a byte stream into lines of bounded length, however it arrives."""

    def __init__(self, limit_bytes: int = MAX_LINE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        # Of the line that is not complete yet; joined once, when it is.
        self._parts: list[bytes] = []
        self._part_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their newline; empty lines are dropped.

        Raises:
            ProtocolError: a line is longer than the bound.
        """
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts, self._part_bytes = [], 0
        self._parts.append(rest)
        self._part_bytes += len(rest)
        if max(map(len, lines), default=0) > self._limit_bytes or self._part_bytes > self._limit_bytes:
            raise ProtocolError("a line is too long", expected=f"at most {self._limit_bytes} bytes")
        return [line for line in lines if line.strip()]


def _unreachable(node: str, error: OSError) -> LinkError:
    """What went wrong on the way to a node, with its name."""
    return LinkError(
        "a node cannot be reached",
        found=str(error) or type(error).__name__,
        do="check that it runs and that its address is right",
        node=node,
    )


class NodeStream:
    """The events of one call. Closing it cancels the call on the node.

    Attributes:
        broken: the call itself failed, and not something that the node told of.
    """

    def __init__(
        self,
        response: HttpAnswer,
        node_id: str,
        broke: Callable[[OSError], LinkError],
        limit_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self.node_id = node_id
        self.broken = False
        self._response = response
        self._broke = broke
        self._buffer = LineBuffer(limit_bytes)
        # What has come, and instead of what is not an event, the error that says so.
        self._events: deque[dict[str, Any] | ProtocolError] = deque()
        self._ended = False

    @property
    def next_kind(self) -> str | None:
        """The kind of the event that :meth:`next` would return at once; None if it would wait or raise."""
        event = self._events[0] if self._events else None
        return event["event"] if isinstance(event, dict) and event["event"] != "error" else None

    async def next(self) -> dict[str, Any]:
        """The next event, never one of kind ``error``.

        Raises:
            PrfaasError: the node reported it; whatever its kind was there.
            LinkError: the connection broke, or the answer ended without a last event.
            ProtocolError: a line is not an event.
        """
        self.broken = True
        while not self._events:
            try:
                data = await self._response.readany()
            except OSError as lost:
                raise self._broke(lost) from lost
            if not data:
                raise LinkError(
                    "a node ended its answer early",
                    expected="a last event: finish, done or error",
                    do="see the node's log",
                    node=self.node_id,
                )
            self._events.extend(map(self._parse, self._buffer.feed(data)))
        event = self._events.popleft()
        if isinstance(event, ProtocolError):
            raise event
        self.broken = False
        if event["event"] == "error":
            error = error_from_wire(event.get("error"))
            error.ids.setdefault("node", self.node_id)
            raise error
        self._ended = event["event"] in ("finish", "done")
        return event

    def _parse(self, line: bytes) -> dict[str, Any] | ProtocolError:
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            return event
        return ProtocolError("a node sent a line that is not an event", found=repr(line[:80]), node=self.node_id)

    def close(self) -> None:
        """Give the connection back if the call has ended, or break it: the node then frees everything."""
        if self._ended:
            self._response.release()
        else:
            self._response.close()


class NodeClient:
    """Speaks to nodes, over connections that stay open. To be closed.

    Args:
        node_key: secret shared with the nodes, if they ask for it.
        on_unreachable: told the id of a node whose connection failed.
        tls: how nodes with ``https`` addresses are called; True: as this host trusts.
    """

    def __init__(
        self,
        node_key: str | None = None,
        on_unreachable: Callable[[str], None] = lambda node_id: None,
        *,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        self._pool = HttpPool(tls)
        self._headers = {"Content-Type": "application/json"}
        if node_key is not None:
            self._headers["Authorization"] = f"Bearer {control_token(node_key)}"
        self.on_unreachable = on_unreachable

    async def close(self) -> None:
        """Break every connection."""
        await self._pool.close()

    async def info(self, url: str, *, timeout_s: float) -> NodeInfo:
        """Ask a node what it is and whether it takes work.

        Raises:
            LinkError: no answer in ``timeout_s`` seconds.
            BusyError: it answers and takes no work now.
            PrfaasError: it refused to answer, or answered something else than a node does.
        """
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._get(url, "/v1/node", MAX_LINE_BYTES)
                if status != 200:
                    raise self._refusal(status, body, url)
                health, reason = await self._get(url, "/health", MAX_ERROR_BYTES)
        except OSError as error:
            raise _unreachable(url, error) from error
        try:
            info = NodeInfo.model_validate_json(body)
        except ValidationError as error:
            raise IncompatibleError(
                "this is not a node of ours, or of another version",
                expected="NodeInfo at /v1/node",
                found=repr(body[:80]),
                do="check the url",
                node=url,
            ) from error
        if info.draining:
            raise NodeDraining("the node is about to leave", node=info.node_id)
        if health != 200:
            found = f"status {health} {reason[:200].decode(errors='replace')}"
            raise BusyError("the node says that it is not ready", found=found, node=info.node_id)
        return info

    async def reload(self, node_id: str, url: str, *, within_s: float) -> dict[str, Any]:
        """Have a node read its configuration anew. Returns what it says has changed.

        Raises:
            LinkError: no answer in ``within_s`` seconds.
            PrfaasError: it refused, for the reason it gave.
        """
        try:
            async with asyncio.timeout(within_s):
                status, body = await self._get(url, "/v1/reload", MAX_LINE_BYTES, "POST")
        except OSError as error:
            raise _unreachable(node_id, error) from error
        answer = _object(body)
        if status != 200 or answer is None:
            raise self._refusal(status, body, node_id)
        return answer

    async def open(self, node_id: str, url: str, path: str, call: BaseModel) -> NodeStream:
        """Start a call; the stream that comes back owns it.

        Raises:
            LinkError: the node cannot be reached.
            PrfaasError: the node refused, for the reason it gave.
        """
        # The fields of models are what orjson writes fastest; a prompt has thousands of tokens.
        body = orjson.dumps(vars(call), default=vars)

        def broke(error: OSError) -> LinkError:
            self.on_unreachable(node_id)
            return _unreachable(node_id, error)

        return await self._open(node_id, "POST", url, path, body, broke, MAX_LINE_BYTES)

    async def watch(self, node_id: str, url: str, path: str, *, limit_bytes: int, silence_s: float) -> NodeStream:
        """Listen to what a node tells, without end. Whether that breaks says nothing about the node's work.

        Args:
            limit_bytes: of a line.
            silence_s: a node that says nothing for so long cannot be reached.

        Raises:
            LinkError: the node cannot be reached.
            PrfaasError: the node refused, for the reason it gave.
        """
        return await self._open(
            node_id, "GET", url, path, None, lambda error: _unreachable(node_id, error), limit_bytes, silence_s
        )

    async def _open(
        self,
        node_id: str,
        method: str,
        url: str,
        path: str,
        body: bytes | None,
        broke: Callable[[OSError], LinkError],
        limit_bytes: int,
        silence_s: float | None = None,
    ) -> NodeStream:
        trace = trace_headers()
        headers = {**self._headers, **trace} if trace else self._headers
        try:
            response = await self._pool.request(
                method, url, path,
                headers=headers, body=body, connect_timeout_s=CONNECT_TIMEOUT_S, silence_s=silence_s,
            )  # fmt: skip
            if response.status == 200:
                return NodeStream(response, node_id, broke, limit_bytes)
            try:
                reason = await response.read(MAX_ERROR_BYTES)
            finally:
                response.release()
        except OSError as error:
            raise broke(error) from error
        raise self._refusal(response.status, reason, node_id)

    async def _get(self, url: str, path: str, limit_bytes: int, method: str = "GET") -> tuple[int, bytes]:
        """Status and body of a short answer; the caller has a deadline."""
        answer = await self._pool.request(
            method, url, path, headers=self._headers, body=None, connect_timeout_s=CONNECT_TIMEOUT_S
        )
        try:
            return answer.status, await answer.read(limit_bytes)
        finally:
            answer.release()

    @staticmethod
    def _refusal(status: int, body: bytes, node: str) -> PrfaasError:
        """The error that a node answered with."""
        wire = _object(body)
        if wire is not None and isinstance(wire.get("code"), int):
            error = error_from_wire(wire)
            error.ids.setdefault("node", node)
            return error
        found = f"status {status} {body[:200].decode(errors='replace')}".strip()
        if status in (401, 403):
            return AuthError(
                "the node did not accept our key", found=found, do="set the same node_key on both", node=node
            )
        return PeerError("the node refused the call", found=found, node=node)


def _object(body: bytes) -> dict[str, Any] | None:
    """A JSON object; None if it is none."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
