"""Changes of role that this gateway makes: one open call for each, which owns the change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prfaas_net.clock import Clock
from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import Fleet
from prfaas_net.gateway.planning_events import ChangeBegan, ChangeEnded, Outcome, PlanningEvent
from prfaas_net.nodes.role_messages import RoleCall
from prfaas_net.scheduling import Drain, Role

__all__ = ["ANSWER_MARGIN_S", "RoleChanges"]

# A node that has not said how its change ended by so long after it had to is taken for lost.
ANSWER_MARGIN_S = 10.0


@dataclass
class _Change:
    node: str
    before: Role
    after: Role
    since_s: float
    held: int = 0
    called_off: str | None = None
    task: asyncio.Task[None] | None = None


class RoleChanges:
    """The changes that are under way.

    Args:
        holder: this gateway, as the nodes' lease knows it.
        drain_limit_s: how long a node may take to end what it has.
        note: told when a change begins and ends.
        on_end: told the node of a change that is over, and how it ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        client: NodeClient,
        clock: Clock,
        holder: str,
        drain_limit_s: float,
        note: Callable[[PlanningEvent], None],
        on_end: Callable[[str, Outcome], None],
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._clock = clock
        self._holder = holder
        self._drain_limit_s = drain_limit_s
        self._note = note
        self._on_end = on_end
        self._changes: dict[str, _Change] = {}

    def begin(self, instruction: Drain) -> None:
        """Tell a node to drain and to take its new role."""
        before = Role.DECODE if instruction.role is Role.PREFILL else Role.PREFILL
        change = _Change(instruction.node_id, before, instruction.role, self._clock.now())
        self._changes[change.node] = change
        self._note(ChangeBegan(change.since_s, change.node, before.value, change.after.value, instruction.reason))
        change.task = asyncio.create_task(self._run(change), name=f"role of {change.node}")

    def call_off(self, node_id: str, reason: str) -> None:
        """Let a node go on as it was."""
        change = self._changes.get(node_id)
        if change is not None and change.task is not None:
            change.called_off = reason
            change.task.cancel()

    async def stop(self) -> None:
        """Call off whatever is under way."""
        tasks = [change.task for change in self._changes.values() if change.task is not None]
        for node_id in list(self._changes):
            self.call_off(node_id, "the gateway is stopping")
        await asyncio.gather(*tasks, return_exceptions=True)

    def describe(self) -> list[dict[str, Any]]:
        """Changes under way, as plain data."""
        now = self._clock.now()
        return [
            {
                "node": change.node,
                "before": change.before.value,
                "after": change.after.value,
                "for_s": round(now - change.since_s, 3),
                "held": change.held,
            }
            for change in self._changes.values()
        ]

    async def _run(self, change: _Change) -> None:
        """One change, to its end."""
        outcome, detail = "called_off", ""
        try:
            async with asyncio.timeout(self._drain_limit_s + ANSWER_MARGIN_S):
                outcome, detail = await self._ask(change)
        except TimeoutError:
            outcome, detail = "lost", "the node has not said how it ended"
        except LinkError as error:
            outcome, detail = "lost", error.line()
        except PrfaasError as error:
            outcome, detail = "refused", error.line()
        finally:
            detail = detail or change.called_off or ""
            del self._changes[change.node]
            now = self._clock.now()
            before, after = change.before.value, change.after.value
            self._note(ChangeEnded(now, change.node, before, after, outcome, round(now - change.since_s, 6), detail))
            self._look_at(change.node)
            self._on_end(change.node, outcome)

    async def _ask(self, change: _Change) -> tuple[Outcome, str]:
        """Until the node says how it ended.

        Raises:
            PrfaasError: it refused, or cannot be reached.
        """
        node = self._fleet.find(change.node)
        call = RoleCall(role=change.after.value, deadline_s=self._drain_limit_s, holder=self._holder)
        stream = await self._client.open(node.name, node.url, "/v1/role", call)
        try:
            while (event := await stream.next())["event"] != "done":
                held = event.get("held")
                change.held = held if isinstance(held, int) else 0
                self._look_at(change.node)
        finally:
            stream.close()
        if event.get("role") == change.after.value:
            return "converted", ""
        return "kept", f"{event.get('held')} calls were left"

    def _look_at(self, node_id: str) -> None:
        """Ask the node what it is now, and not only when its turn comes."""
        for node in self._fleet.nodes:
            if node.name == node_id:
                node.wake.set()
