"""``POST /v1/reload``: the gateway's file is read anew, and nodes are told to read theirs; no request is disturbed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.errors import ConfigError, PrfaasError
from prfaas_net.gateway.api_errors import ApiError
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.fleet import Fleet, WatchedNode
from prfaas_net.gateway.instruments import GatewayMetrics
from prfaas_net.gateway.middleware import client_key
from prfaas_net.nodes.reloading import change_of, read_anew

__all__ = ["HOT", "Reloader"]

log = logging.getLogger(__name__)

# What takes effect while the gateway serves.
HOT = (
    "policy", "threshold_tokens", "policy_seed", "link_patience", "request_deadline", "ttft_limit", "drain_timeout",
    "max_prompt_tokens", "max_concurrent_requests", "chat_max_tokens", "api_keys", "join",
    "links",
)  # fmt: skip
NODE_ANSWERS_WITHIN_S = 10.0


class Reloader:
    """One at a time.

    Args:
        reread: reads the configuration anew; None: it came from no file.
        current: the one in force.
        apply: puts another one in force.
    """

    def __init__(
        self,
        reread: Callable[[], GatewayConfig] | None,
        current: Callable[[], GatewayConfig],
        apply: Callable[[GatewayConfig], None],
        fleet: Fleet,
        client: NodeClient,
        instruments: GatewayMetrics,
    ) -> None:
        self._reread = reread
        self._current = current
        self._apply = apply
        self._fleet = fleet
        self._client = client
        self._instruments = instruments
        self._one = asyncio.Lock()

    async def handle(self, request: web.Request) -> web.Response:
        """What has changed, what only a restart would change, and what every node says of its own.

        Raises:
            ApiError: the key is no admin's, or the file cannot be used: what was in force goes on.
        """
        key = client_key()
        if key is None or not key.admin:
            raise ApiError(
                "this key may not reload the configuration",
                status=403,
                api_code="not_an_admin",
                do="give a key admin = true, and send it (prfaas key new --admin)",
            )
        async with self._one:
            answer = await self._reload(key.name)
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def _reload(self, who: str) -> dict[str, Any]:
        try:
            change = change_of(self._current(), await read_anew(self._reread), HOT)
            self._apply(change.config)
        except ConfigError as error:
            self._instruments.reloads.labels("refused").inc()
            log.error("not reloaded, the old configuration goes on: %s", error.line())
            raise ApiError(error.line(), status=400, api_code="bad_configuration") from error
        self._instruments.reloads.labels(change.outcome).inc()
        log.info("reloaded by key %s: %s", who, change.line())
        own = [node for node in self._fleet.nodes if node.up and node.engine is None]
        told = await asyncio.gather(*(self._tell(node) for node in own))
        return {**change.to_json(), "nodes": dict(zip((node.name for node in own), told, strict=True))}

    async def _tell(self, node: WatchedNode) -> dict[str, Any]:
        try:
            return await self._client.reload(node.name, node.url, within_s=NODE_ANSWERS_WITHIN_S)
        except PrfaasError as error:
            return {"error": error.line()}
