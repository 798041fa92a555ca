"""A PD node: one engine, one memory and one KV port that prefills or decodes, and changes between the two."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.metrics import Metrics
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode import DecodeNode
from prfaas_net.nodes.engine_api import Engine
from prfaas_net.nodes.ground import NodeGround
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.nodes.prefill import PrefillNode
from prfaas_net.nodes.role import RoleKeeper, RoleName
from prfaas_net.nodes.role_messages import LeaseCall, RoleCall
from prfaas_net.nodes.server import ControlServer, Emit, parse_call

__all__ = ["PdNode"]

# What the answer to a role call may take longer than the drain that it asks for.
ANSWER_MARGIN_S = 5.0


class PdNode:
    """Serves ``POST /v1/prefill`` or ``POST /v1/decode``, and ``POST /v1/role`` to change from the one to the other.

    Both roles stand on one ground: a prefix that was computed or that has landed stays cached when the role changes.
    """

    def __init__(self, config: NodeConfig, engine: Engine) -> None:
        self.config = config = config.model_copy(update={"convertible": True})
        self.ground = NodeGround(config, engine)
        self._describe_ground = self.ground.describe
        self.ground.describe = self.info
        self._changes = self.metrics.counter("node_role_changes", "Changes of role by how they ended", ("outcome",))
        self._drain_s = self.metrics.histogram("node_drain_seconds", "From being told to change to the end of it")
        self._role = self.metrics.gauge("node_role", "1 for the role that the node plays", ("role",))
        self._draining = self.metrics.gauge("node_draining", "1 while it ends what it has, to change its role")
        self.roles = RoleKeeper(config.role, self._role_changed, self._change_ended)
        self.decode = DecodeNode(config, engine, self.ground)
        self.prefill = PrefillNode(config, engine, self.ground, self.decode.listener)
        self.prefill.admission = lambda: self._admitted("prefill")
        self.decode.admission = lambda: self._admitted("decode")
        self.prefill.state.also = self._state
        router = self.control.app.router
        router.add_post("/v1/role", self._change_role)
        router.add_post("/v1/lease", self._lease)
        self._show_role()

    @property
    def control(self) -> ControlServer:
        return self.ground.control

    @property
    def metrics(self) -> Metrics:
        return self.ground.metrics

    def info(self) -> NodeInfo:
        return self._describe_ground().model_copy(update={"convertible": True, **self.roles.describe()})

    async def start(self) -> None:
        """Open the KV port and the control port."""
        await self.decode.start()
        await self.prefill.start()
        await self.ground.start()

    async def drain(self) -> None:
        """Take no new work, and finish what is held, within the configured time."""
        await self.ground.drain()

    async def close(self) -> None:
        """Stop; whatever runs is cancelled, and those who wait for it are told."""
        self.prefill.state_feed.close()
        await self.ground.end_calls()
        await self.prefill.close()
        await self.decode.close()
        await self.ground.close()

    def _admitted(self, role: RoleName) -> AbstractContextManager[None]:
        return self.roles.admitted(role)

    async def _change_role(self, request: web.Request) -> web.StreamResponse:
        call = await parse_call(RoleCall, request)

        async def job(emit: Emit) -> None:
            await self.roles.change(call, emit)

        return await self.control.run(request, job, deadline_s=call.deadline_s + ANSWER_MARGIN_S)

    async def _lease(self, request: web.Request) -> web.Response:
        answer = self.roles.lease.ask(await parse_call(LeaseCall, request), now=self.roles.clock.now())
        return web.Response(body=orjson.dumps(answer.model_dump()) + b"\n", content_type="application/json")

    # -- telling --------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """What is streamed beside the queue: the role; links only count where prompts are run."""
        return self.roles.describe() | ({} if self.roles.role == "prefill" else {"links": []})

    def _role_changed(self) -> None:
        self._show_role()
        self.prefill.state.changed()

    def _show_role(self) -> None:
        now: dict[str, Any] = self.roles.describe()
        for role in ("prefill", "decode"):
            self._role.labels(role).set(now["role"] == role)
        self._draining.set(now["next_role"] is not None)

    def _change_ended(self, outcome: str, seconds: float) -> None:
        self._changes.labels(outcome).inc()
        self._drain_s.observe(seconds)
