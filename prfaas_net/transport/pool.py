"""Links kept warm: one for each receiver, dialled once however many ask for it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from prfaas_net.congestion.verdict import Verdict
from prfaas_net.errors import LinkError
from prfaas_net.transport.gate import SenderGate
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.link import SenderLink
from prfaas_net.transport.link_base import LinkBase
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.security import Security
from prfaas_net.wire import Ticket, Timers

__all__ = ["LinkPool"]

_Endpoints = tuple[tuple[str, int], ...]


class LinkPool:
    """Links of one sender.

    Args:
        options: of links to any cluster that ``options_towards`` is not asked about.
        options_towards: of links to one cluster, by its name.
        gate: where receivers that cannot be dialled dial in; a ticket without endpoints is for one of those.
        on_verdict: told on the loop, at once, whenever a link that this pool has dialled does something else.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        security: Security,
        options: LinkOptions,
        options_towards: Callable[[str], LinkOptions] | None = None,
        timers: Timers | None = None,
        gate: SenderGate | None = None,
        on_verdict: Callable[[LinkBase, Verdict], None] | None = None,
    ) -> None:
        self._gate = gate
        self._identity = identity
        self._security = security
        self._options = options
        self._options_towards = options_towards or (lambda cluster: options)
        self._timers = timers or Timers()
        self._on_verdict = on_verdict
        self._links: dict[_Endpoints, SenderLink] = {}
        self._dialling: dict[_Endpoints, asyncio.Task[SenderLink]] = {}

    @property
    def links(self) -> tuple[LinkBase, ...]:
        """Links that are up."""
        dialled = tuple(link for link in self._links.values() if link.alive)
        return dialled if self._gate is None else (*dialled, *self._gate.links)

    def set_budgets(self) -> None:
        """Have every link that is up take the budget that ``options_towards`` says now."""
        for link in self.links:
            link.set_budget(self._options_towards(link.towards).budget_bps)

    async def get(self, ticket: Ticket, towards: str = "") -> LinkBase:
        """A live link to whoever issued the ticket.

        Args:
            towards: the cluster that it is in; decides how a new link behaves.

        Raises:
            LinkError: it cannot be reached, or has restarted since (its tickets are void).
            PrfaasError: it refused.
        """
        if not ticket.endpoints and self._gate is not None:
            accepted = await self._gate.wait_for(ticket.boot_id, within_s=self._options.connect_timeout_s)
            if accepted.towards != towards:
                accepted.towards = towards
                accepted.set_budget(self._options_towards(towards).budget_bps)
            return accepted
        link = self._links.get(ticket.endpoints)
        if link is None or not link.alive:
            link = await self._dial(ticket.endpoints, towards)
        if link.peer_boot_id != ticket.boot_id:
            raise LinkError(
                "the receiver has restarted since it issued the ticket",
                expected=f"boot {ticket.boot_id[:8]}",
                found=f"boot {link.peer_boot_id[:8]}",
                do="reserve again",
                transfer=ticket.transfer_id,
            )
        return link

    async def _dial(self, endpoints: _Endpoints, towards: str) -> SenderLink:
        task = self._dialling.get(endpoints)
        if task is None:
            task = self._dialling[endpoints] = asyncio.create_task(self._connect(endpoints, towards))
            task.add_done_callback(lambda done: self._dialled(endpoints, done))
        # A caller that gives up must not take the link away from the others.
        return await asyncio.shield(task)

    async def _connect(self, endpoints: Sequence[tuple[str, int]], towards: str) -> SenderLink:
        options = self._options_towards(towards)
        link = await SenderLink.connect(
            endpoints, identity=self._identity, security=self._security, options=options, timers=self._timers
        )
        link.towards = towards
        # It may have changed while this was dialled.
        link.set_budget(self._options_towards(towards).budget_bps)
        link.tell_verdicts_to(self._on_verdict)
        return link

    def _dialled(self, endpoints: _Endpoints, task: asyncio.Task[SenderLink]) -> None:
        del self._dialling[endpoints]
        if not task.cancelled() and task.exception() is None:
            self._links[endpoints] = task.result()

    async def close(self) -> None:
        """End every link."""
        dialling = tuple(self._dialling.values())
        for task in dialling:
            task.cancel()
        await asyncio.gather(*dialling, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()
