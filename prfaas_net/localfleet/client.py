"""A small client of the gateway: one streamed completion, with everything the gateway knows about it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from prfaas_net.errors import PeerError

__all__ = ["Answer", "GatewayClient", "Progress"]

Progress = Callable[[dict[str, Any]], None]
# How often a request's live record is asked for while nothing has come back yet.
WATCH_S = 0.2


@dataclass
class Answer:
    """What came back.

    Attributes:
        token_ids: of the answer.
        token_s: from sending the request to each token, as the client saw it.
        ttft_s: from sending the request to the first token, as the client saw it.
        record: the gateway's account of the request (``explain``).
        usage: as OpenAI's API counts tokens.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    ttft_s: float = 0.0
    total_s: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)


class GatewayClient:
    """Use as an async context manager.

    Args:
        api_key: what the gateway asks of its clients, if it does.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 300.0) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), headers=headers)

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def wait_healthy(self, *, within_s: float) -> None:
        """Until the gateway can serve requests.

        Raises:
            TimeoutError: it could not in time.
        """
        async with asyncio.timeout(within_s):
            while True:
                async with self._session.get(f"{self._url}/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.05)

    async def model(self) -> tuple[str, int]:
        """Name of the model that is served, and its longest prompt plus output in tokens."""
        async with self._session.get(f"{self._url}/v1/models") as response:
            card = (await response.json())["data"][0]
            return str(card["id"]), int(card["max_model_len"])

    async def complete(self, body: dict[str, Any], on_progress: Progress | None = None) -> Answer:
        """One streamed completion; ``on_progress`` gets the live record until the first token.

        Raises:
            PrfaasError: the gateway answered with an error.
        """
        request_id = secrets.token_hex(8)
        watching = asyncio.create_task(self._watch(request_id, on_progress)) if on_progress else None
        try:
            return await self._stream({**body, "stream": True, "return_token_ids": True}, request_id)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _stream(self, body: dict[str, Any], request_id: str) -> Answer:
        headers = {"X-PrfaaS-Explain": "1", "X-Request-ID": request_id, "Content-Type": "application/json"}
        answer, started = Answer(), time.perf_counter()
        async with self._session.post(
            f"{self._url}/v1/completions", data=orjson.dumps(body), headers=headers
        ) as response:
            if response.status != 200:
                raise PeerError("the gateway refused the request", found=(await response.text())[:500])
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise PeerError("the request failed", found=event["error"].get("message"))
                answer.record = event.get("prfaas", answer.record)
                answer.usage = event.get("usage") or answer.usage
                for choice in event["choices"]:
                    answer.text += choice["text"]
                    answer.token_ids += choice["token_ids"]
                    answer.token_s += [time.perf_counter() - started] * len(choice["token_ids"])
        answer.total_s = time.perf_counter() - started
        answer.ttft_s = answer.token_s[0] if answer.token_s else 0.0
        return answer

    async def _watch(self, request_id: str, on_progress: Progress | None) -> None:
        while on_progress is not None:
            await asyncio.sleep(WATCH_S)
            async with self._session.get(f"{self._url}/v1/requests/{request_id}") as response:
                if response.status == 200:
                    on_progress(await response.json(loads=orjson.loads))
