"""The decode side's calls to prefill servers: what their pages look like, and claims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from pydantic import ValidationError

from prfaas_net.connectors.agreement import Agreement, agree
from prfaas_net.connectors.layout import EngineLayout
from prfaas_net.connectors.messages import ClaimCall, PeerInfo
from prfaas_net.errors import LinkError, PrfaasError, ProtocolError, error_from_wire
from prfaas_net.nodes.auth import control_token

__all__ = ["Peer", "PeerBook"]

# A prefill server says something once a second while a claim is open.
SILENCE_S = 10.0
CONNECT_S = 5.0
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Peer:
    """One rank of a prefill server, that this rank can take KVCache from.

    Attributes:
        local_host: this side's address on the way there.
    """

    host: str
    port: int
    info: PeerInfo
    agreement: Agreement
    local_host: str


class PeerBook:
    """Prefill servers by address; each is asked for its layout once a boot. On one loop."""

    def __init__(self, layout: EngineLayout, *, node_key: str | None) -> None:
        self._layout = layout
        self._headers = {} if node_key is None else {"Authorization": f"Bearer {control_token(node_key)}"}
        self._session: aiohttp.ClientSession | None = None
        self._peers: dict[tuple[str, int], asyncio.Task[Peer]] = {}

    async def close(self) -> None:
        for task in self._peers.values():
            task.cancel()
        await asyncio.gather(*self._peers.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def get(self, host: str, port: int) -> Peer:
        """A server whose layout is agreed with ours.

        Raises:
            LinkError: it cannot be reached.
            IncompatibleError: its KVCache cannot be used here, and why.
        """
        task = self._peers.get((host, port))
        if task is None:
            task = self._peers[host, port] = asyncio.create_task(self._ask(host, port))
            # Whoever asked may have given up by the time it fails.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except PrfaasError:
            self.forget(host, port, task)  # the next one asks again: the other side may have been mended
            raise

    def forget(self, host: str, port: int, asked: asyncio.Task[Peer] | None = None) -> None:
        """It may have restarted."""
        if asked is None or self._peers.get((host, port)) is asked:
            self._peers.pop((host, port), None)

    async def _ask(self, host: str, port: int) -> Peer:
        timeout = aiohttp.ClientTimeout(total=3 * SILENCE_S, sock_connect=CONNECT_S)
        try:
            async with self._client().get(f"{_url(host, port)}/v1/kv/layout", timeout=timeout) as response:
                local = _local_host(response)
                info = PeerInfo.model_validate(orjson.loads(await _body(response)))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(host, port, error) from error
        except (orjson.JSONDecodeError, ValidationError) as error:
            raise ProtocolError(
                f"what listens on {host}:{port} is no connector", found=str(error)[:200],
                do="remote_port is the connector's port (listen), not the engine's HTTP port",
            ) from error  # fmt: skip
        return Peer(host, port, info, agree(self._layout, EngineLayout.from_json(info.layout)), local)

    async def claim(self, peer: Peer, call: ClaimCall) -> AsyncGenerator[dict[str, Any], None]:
        """Hand a claim over; its events, until it ends.

        Raises:
            LinkError: it cannot be reached, or fell silent.
            PrfaasError: it refuses, and why.
        """
        timeout = aiohttp.ClientTimeout(total=call.deadline_s, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        url = f"{_url(peer.host, peer.port)}/v1/kv/claims"
        try:
            async with self._client().post(url, data=call.model_dump_json(), timeout=timeout) as response:
                if response.status >= 400:
                    await _body(response)
                async for line in response.content:
                    event = orjson.loads(line)
                    if event.get("event") == "error":
                        raise error_from_wire(event["error"])
                    yield event
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _unreachable(peer.host, peer.port, error) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A claim is open for as long as its transfer: no limit on how many there are.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, read_bufsize=MAX_LINE_BYTES
            )
        return self._session


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _local_host(response: aiohttp.ClientResponse) -> str:
    connection = response.connection
    address = connection.transport.get_extra_info("sockname") if connection and connection.transport else None
    return str(address[0]) if address else "127.0.0.1"


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = await response.read()
    if response.status >= 400:
        try:
            raise error_from_wire(orjson.loads(body))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError("unexpected answer to a claim", found=f"HTTP {response.status}") from error
    return body


def _unreachable(host: str, port: int, error: Exception) -> LinkError:
    return LinkError(
        f"cannot reach the prefill server's connector at {host}:{port}",
        found=f"{type(error).__name__}: {error}"[:200],
        do="check remote_host and remote_port, that the server runs, and that the port is open between the sites",
    )
