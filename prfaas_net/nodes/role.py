"""Which role a node plays, what it holds in it, and how it changes to another while it serves.

    plays(role) --change--> drains(role, next) --nothing held--> plays(next)
                                  |
                                  +--called off, or out of time--> plays(role)

While it drains, new calls are refused as "no room": a gateway gives them to another node, or lets them wait within
their deadline. What is held runs to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from prfaas_net.clock import Clock, SystemClock
from prfaas_net.errors import BusyError
from prfaas_net.nodes.role_lease import RoleLease
from prfaas_net.nodes.role_messages import RoleCall
from prfaas_net.nodes.server import Emit

__all__ = ["RoleKeeper", "RoleName"]

RoleName = Literal["prefill", "decode"]


class RoleKeeper:
    """The role of one node. On the event loop.

    Args:
        on_change: told that the role, or the next one, is another.
        on_end: told how a change ended (``"converted"``, ``"kept"`` for want of time, ``"called_off"``), and its
            seconds.

    Attributes:
        role: what it admits, unless it drains.
        next_role: what it will be when nothing is held any more; None: it stays what it is.
        held: calls that run.
    """

    def __init__(
        self,
        role: RoleName,
        on_change: Callable[[], None] = lambda: None,
        on_end: Callable[[str, float], None] = lambda outcome, seconds: None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.role: RoleName = role
        self.next_role: RoleName | None = None
        self.held = 0
        self.lease = RoleLease()
        self.clock = clock or SystemClock()
        self._on_change = on_change
        self._on_end = on_end
        self._ended = asyncio.Event()

    @contextmanager
    def admitted(self, role: RoleName) -> Iterator[None]:
        """A call of this role runs in this block.

        Raises:
            BusyError: the node does not take such calls now.
        """
        if role != self.role or self.next_role is not None:
            now = f"a {self.role} node" if self.next_role is None else f"on its way to be a {self.next_role} node"
            raise BusyError(f"the node takes no {role} calls now", found=f"it is {now}", do="ask another node")
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
            self._ended.set()

    async def change(self, call: RoleCall, emit: Emit) -> None:
        """Drain, then take the role. Cancelled, or out of time, the node goes on as it was.

        Raises:
            BusyError: it is changing already, or another planner has the lease.
        """
        started_s = self.clock.now()
        self._check(call, started_s)
        outcome = "kept"
        if call.role != self.role:
            self.next_role = call.role
            self._on_change()
            try:
                outcome = "called_off"
                await self._drain(call.deadline_s, emit)
                outcome = "kept" if self.held else "converted"
                if outcome == "converted":
                    self.role = call.role
            finally:
                self.next_role = None
                self._on_change()
                self._on_end(outcome, self.clock.now() - started_s)
        took_s = round(self.clock.now() - started_s, 6)
        changed = outcome == "converted"
        emit({"event": "done", "role": self.role, "changed": changed, "held": self.held, "took_s": took_s})

    def describe(self) -> dict[str, Any]:
        """For the state that is streamed."""
        return {"role": self.role, "next_role": self.next_role}

    def _check(self, call: RoleCall, now: float) -> None:
        if self.next_role is not None:
            raise BusyError("the node is changing its role already", found=f"to {self.next_role}", do="try again later")
        if not self.lease.allows(call.holder, now=now):
            raise BusyError(
                "another planner looks after this node",
                expected=f"a call by {self.lease.holder(now)}",
                found=f"one by {call.holder or 'nobody'}",
                do="let that one act, or stop it",
            )

    async def _drain(self, within_s: float, emit: Emit) -> None:
        """Until nothing is held, or the time is up."""
        try:
            async with asyncio.timeout(within_s):
                while self.held:
                    self._ended.clear()
                    emit({"event": "draining", **self.describe(), "held": self.held})
                    await self._ended.wait()
        except TimeoutError:
            pass  # the caller is told what is left
