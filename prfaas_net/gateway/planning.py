"""The long-timescale planner in a gateway: it looks every few minutes, says what it would do, and does it if it may.

``advise`` looks and tells (``GET /v1/plan``, metrics, ``GET /v1/fleet``). ``act`` sets the router's threshold besides,
and changes the roles of nodes, one after the other: a node ends what it has (:mod:`prfaas_net.nodes.role`) while new
work goes elsewhere. The search for the best split runs in a thread; everything else on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from prfaas_net.clock import Clock
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import Fleet
from prfaas_net.gateway.planning_changes import ANSWER_MARGIN_S, RoleChanges
from prfaas_net.gateway.planning_config import PlannerSection
from prfaas_net.gateway.planning_events import LeaseMoved, Outcome, Planned, PlanningLog, ThresholdMoved
from prfaas_net.gateway.planning_lease import PlannerLease
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.scheduling import (
    Drain,
    FleetEvent,
    Instruction,
    KeepRole,
    Planner,
    Router,
    SetThreshold,
    Solution,
    ThresholdSet,
)

__all__ = ["Planning"]

log = logging.getLogger(__name__)

# From one glance at what drains to the next, at most.
TICK_S = 1.0


class Planning:
    """Runs a planner over a gateway's fleet.

    Args:
        observe: tells the router.
        events: takes note of what it sees and does.
    """

    def __init__(
        self,
        config: PlannerSection,
        router: Router,
        fleet: Fleet,
        client: NodeClient,
        clock: Clock,
        observe: Callable[[FleetEvent], None],
        events: PlanningLog,
    ) -> None:
        self.config = config
        self.log = events
        # A name for the lease; the random part tells two gateways in containers of the same name apart.
        self.name = f"{platform.node()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
        # A node knows best whether it drains in time: it says so before the planner's own patience ends.
        limit_s = config.drain_limit + ANSWER_MARGIN_S
        self.planner = Planner(None, settings=replace(config.settings(), drain_limit_s=limit_s))
        self._router = router
        self._fleet = fleet
        self._clock = clock
        self._observe = observe
        self._lease = PlannerLease(client, self.name, clock, config.lease)
        self._leads = False
        self._changes = RoleChanges(
            fleet, client, clock, self.name, config.drain_limit, self.log.note, self._change_ended
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        if self.config.mode != "off":
            self._task = asyncio.create_task(self._run(), name="planner")

    async def stop(self) -> None:
        """Call off what is under way, and let another gateway act."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._changes.stop()
        await self._lease.give_back(self._fleet.nodes)

    def served(self, record: RequestRecord) -> None:
        """A request that was decided on is over."""
        now = self._clock.now()
        if record.incremental_tokens:
            self.planner.arrived(record.incremental_tokens, now=now)
        if record.error is None and record.output_tokens:
            self.planner.answered(record.output_tokens, now=now)

    async def _run(self) -> None:
        tick_s = min(TICK_S, self.config.period / 4)
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("the planner failed; it looks again")
            await asyncio.sleep(tick_s)

    async def _look(self) -> None:
        """Go on with what is under way, and plan anew if it is time."""
        planner, state = self.planner, self._router.state
        acts = self.config.mode == "act"
        roles = acts and await self._lead()
        planner.kv = self._fleet.kv_size
        instructions = planner.go_on(state, now=self._clock.now(), roles=roles)
        before, problem = planner.next_deadline(), planner.problem
        question = planner.question(state, now=self._clock.now())
        if question is not None:
            answer = await asyncio.to_thread(question.answer)
            instructions += planner.conclude(answer, state, now=self._clock.now(), roles=roles)
            self._planned(acted=any(isinstance(instruction, Drain) for instruction in instructions))
        elif planner.next_deadline() != before and planner.problem != problem and planner.problem is not None:
            self.log.note(Planned(self._clock.now(), "no_plan", planner.problem))
        if acts:
            for instruction in instructions:
                self._carry_out(instruction)

    async def _lead(self) -> bool:
        """Whether this gateway is the one that changes roles."""
        leads = await self._lease.renew(self._fleet.nodes)
        if leads != self._leads:
            self._leads = leads
            self.log.note(LeaseMoved(self._clock.now(), leads, self.name if leads else self._lease.other))
        return leads

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case SetThreshold(threshold_tokens, reason):
                before = getattr(self._router.policy, "threshold_tokens", None)
                if before is not None:  # other policies than `threshold` have none
                    self._observe(ThresholdSet(threshold_tokens))
                    self.log.note(ThresholdMoved(self._clock.now(), before, threshold_tokens, reason))
            case Drain():
                self._changes.begin(instruction)
            case KeepRole(node_id, _, reason):
                self._changes.call_off(node_id, reason)
            case _:
                pass  # Convert: the node does so itself, when nothing of anybody's runs there any more

    def _change_ended(self, node_id: str, outcome: Outcome) -> None:
        if outcome != "converted":
            self.planner.ended(node_id)

    def _planned(self, *, acted: bool) -> None:
        plan = self.planner.plan
        if plan is None:
            return
        present, best = plan.answer.present, plan.answer.best
        outcome = "acted" if acted else "advised" if plan.moves else "as_it_is"
        self.log.note(
            Planned(
                self._clock.now(), outcome, plan.why, plan.threshold_tokens,
                present.result.lambda_max, best.result.lambda_max,
            )
        )  # fmt: skip
        self.log.show(plan.threshold_tokens, present, best)

    # -- telling --------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """For ``GET /v1/fleet``."""
        plan, planner = self.planner.plan, self.planner
        return {
            "mode": self.config.mode,
            "acting": self._leads,
            "why": planner.problem or (plan.why if plan else None),
            "threshold_tokens": plan.threshold_tokens if plan else None,
            "present": _solution(plan.answer.present) if plan else None,
            "best": _solution(plan.answer.best) if plan else None,
            "changing": self._changes.describe(),
        }

    def describe(self) -> dict[str, Any]:
        """The answer to ``GET /v1/plan``; docs/planner.md names every field."""
        plan, now = self.planner.plan, self._clock.now()
        next_s = max(0.0, self.planner.next_deadline() - now)
        body = {"now_s": round(now, 3), "gateway": self.name, **self.summary()}
        body["acts"] = self.name if self._leads else self._lease.other
        body["next_look_s"] = round(min(next_s, self.config.period), 3) if self.config.mode != "off" else None
        body["plan"] = None
        if plan is not None:
            question = plan.answer.question
            body["plan"] = {
                "at_s": round(plan.at_s, 3),
                "requests": question.requests,
                "output_tokens": round(question.work.output_tokens, 3),
                "threshold_tokens": plan.threshold_tokens,
                "moves": [
                    {"cluster": m.cluster, "before": m.before.value, "after": m.after.value, "nodes": m.count}
                    for m in plan.moves
                ],
            }
        body["events"] = self.log.describe()
        return body

    async def handle(self, request: web.Request) -> web.Response:
        """``GET /v1/plan``."""
        return web.Response(
            body=orjson.dumps(self.describe()),
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )


def _solution(solution: Solution) -> dict[str, Any]:
    result = solution.result
    return {
        "splits": {c.name: {"prefill": c.prefill_instances, "decode": c.decode_instances} for c in solution.pd},
        "carried_req_s": round(result.lambda_max, 4),
        "bottleneck": result.bottleneck,
        "offloaded_share": round(result.offloaded_share, 4),
        "egress_bps": round(result.egress_bps),
    }
