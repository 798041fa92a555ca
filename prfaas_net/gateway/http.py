"""The HTTP routes."""

from __future__ import annotations

import time
from typing import Any

import orjson
from aiohttp import web

from prfaas_net import __version__
from prfaas_net.gateway.api_errors import ApiError
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.fleet import Fleet
from prfaas_net.gateway.instruments import GatewayMetrics
from prfaas_net.gateway.openai_api import ChatBody, CompletionBody
from prfaas_net.gateway.openai_shapes import ChatShape, CompletionShape
from prfaas_net.gateway.serving import Serving
from prfaas_net.metrics import CONTENT_TYPE

__all__ = ["HttpApi"]


class HttpApi:
    """Every route of a gateway."""

    def __init__(self, config: GatewayConfig, serving: Serving, fleet: Fleet, instruments: GatewayMetrics) -> None:
        self._config = config
        self._serving = serving
        self._fleet = fleet
        self._instruments = instruments
        self._created_s = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """For :meth:`aiohttp.web.Application.add_routes`."""
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get("/v1/requests/{id}", self.request),
            web.post("/tokenize", self.tokenize),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/live", self.live),
            web.get("/metrics", self.metrics),
            web.get("/version", self.version),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``."""
        return await self._serving.serve(request, CompletionBody, CompletionShape)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        return await self._serving.serve(request, ChatBody, ChatShape)

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models``."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        """``GET /v1/models/{model}``."""
        self._serving.intake.check_model(request.match_info["model"])
        return _json(self._card())

    async def request(self, request: web.Request) -> web.Response:
        """``GET /v1/requests/{id}``: the record of a request in flight, or of one that ended lately."""
        record = self._serving.records.find(request.match_info["id"])
        if record is None:
            raise ApiError("no such request, or it ended long ago", status=404, api_code="request_not_found")
        return _json(record.to_json())

    async def tokenize(self, request: web.Request) -> web.Response:
        """``POST /tokenize``: ``prompt`` or ``messages`` as tokens, in the shape that vLLM answers with."""
        tokens = await self._serving.intake.tokenize(request)
        limit = self._serving.intake.max_model_tokens
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    async def health(self, request: web.Request) -> web.Response:
        """``GET /health``: 200 while requests can be served."""
        missing = [f"{role.value} node" for role in self._fleet.missing_roles()]
        status = "draining" if self._serving.draining else "unavailable" if missing else "ok"
        body = {"status": status, "missing": missing, "nodes": self._fleet.describe()}
        return _json(body, status=200 if status == "ok" else 503)

    async def ready(self, request: web.Request) -> web.Response:
        """``GET /ready``: 200 while a load balancer should send requests here; ``/health`` says why not."""
        nodes = self._fleet.nodes
        ready = not self._fleet.missing_roles() and not self._serving.draining
        body = {
            "status": "draining" if self._serving.draining else "ready" if ready else "not_ready",
            "healthy_nodes": sum(node.up for node in nodes),
            "total_nodes": len(nodes),
        }
        return _json(body, status=200 if ready else 503)

    async def live(self, request: web.Request) -> web.Response:
        """``GET /live``: 200 while the process answers."""
        return _json({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """``GET /metrics``."""
        return web.Response(body=self._instruments.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, request: web.Request) -> web.Response:
        """``GET /version``."""
        return _json({"version": __version__})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._config.model,
            "object": "model",
            "created": self._created_s,
            "owned_by": "prfaas-net",
            "max_model_len": self._serving.intake.max_model_tokens,
        }


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
