"""The prefill side: prompts whose KVCache will be asked for, and whoever asks for it."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from prfaas_net.connectors.config import ConnectorConfig
from prfaas_net.connectors.layout import PROTOCOL, EngineLayout
from prfaas_net.connectors.messages import ClaimCall
from prfaas_net.connectors.offers import Offer, PageSending
from prfaas_net.connectors.orders import HoldOrder, StepOrders
from prfaas_net.connectors.pages import PagedMemory
from prfaas_net.connectors.plan import PagePlan
from prfaas_net.connectors.room import Room, views_of
from prfaas_net.connectors.stats import ConnectorStats
from prfaas_net.errors import (
    CancelledByPeer,
    DeadlineError,
    IncompatibleError,
    InvalidRequest,
    PrfaasError,
    ProtocolError,
)
from prfaas_net.nodes.server import Emit
from prfaas_net.transport import LinkPool
from prfaas_net.wire import Ticket

__all__ = ["PrefillDesk"]

BEAT_S = 1.0
REAP_EVERY_S = 0.1


class PrefillDesk:
    """Offers of one rank.

    ``begin_step``, ``layer_done`` and ``end_step`` belong to the engine's thread, everything else to the loop's.

    Args:
        let_go: told, on the loop, of a finished request whose blocks may be freed.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: EngineLayout,
        memory: PagedMemory,
        room: Room,
        links: LinkPool,
        stats: ConnectorStats,
        let_go: Callable[[str], None],
    ) -> None:
        self._config = config
        self._layout = layout
        self._memory = memory
        self._room = room
        self._links = links
        self._stats = stats
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()
        self.boot_id = ""
        # The engine's thread: prompts that it runs, and those of this step.
        self._running: dict[str, Offer] = {}
        self._stepping: list[Offer] = []
        # The loop's thread: everything that can be claimed, and claims that are ahead of their prompt.
        self._offers: dict[str, Offer] = {}
        self._waiting: dict[str, list[asyncio.Future[Offer]]] = defaultdict(list)
        # What became of those that are over, for whoever comes late: (why not, when to forget it).
        self._over: dict[str, tuple[PrfaasError, float]] = {}

    def __len__(self) -> int:
        return len(self._offers)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def begin_step(self, orders: StepOrders) -> None:
        """Before the step's first layer, and before freed blocks are used again."""
        for request_id in (*orders.preempted, *orders.dropped):
            offer = self._running.get(request_id)
            if offer is not None:
                offer.leave_blocks()
        for request_id in orders.dropped:
            offer = self._running.pop(request_id, None)
            if offer is not None:
                self._post(self._drop, offer, CancelledByPeer("the prefill was given up"))
        for hold in orders.holds:
            offer = self._running.pop(hold.request_id, None)
            # Without an offer the engine would wait for ever to be told that the blocks may go.
            self._post(self._hold, offer, hold)
        self._stepping = []
        for order in orders.prefills:
            offer = self._running.get(order.request_id)
            if offer is None:
                offer = self._running[order.request_id] = Offer(self._layout, order)
                self._post(self._put, offer)
            self._stepping.append(offer)
            offer.begin_step(order)

    def layer_done(self, layer: str) -> None:
        for offer in self._stepping:
            offer.layer_done(layer)

    def end_step(self) -> None:
        for offer in self._stepping:
            offer.end_step()
        self._stepping = []

    def _post(self, call: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(call, *args)

    # -- the book ----------------------------------------------------------------------------------------------------

    def _put(self, offer: Offer) -> None:
        self._offers[offer.transfer_id] = offer
        self._over.pop(offer.transfer_id, None)
        for waiting in self._waiting.pop(offer.transfer_id, ()):
            if not waiting.done():
                waiting.set_result(offer)

    def _drop(self, offer: Offer, error: PrfaasError) -> None:
        self._forget(offer, error)
        offer.fail(error)

    def _forget(self, offer: Offer, error: PrfaasError) -> None:
        if self._offers.get(offer.transfer_id) is offer:
            del self._offers[offer.transfer_id]
            self._over[offer.transfer_id] = (error, time.monotonic() + self._config.deadline)

    def _hold(self, offer: Offer | None, order: HoldOrder) -> None:
        if offer is None:
            self._let_go(order.request_id)
            return
        offer.let_go_at = time.monotonic() + order.deadline_s
        self._settle(offer)

    def _settle(self, offer: Offer) -> None:
        """Let the blocks go if nobody will ask for them any more."""
        if offer.let_go_at is None or offer.gone:
            return
        if offer.claims_left == 0 or offer.error is not None:
            taken = InvalidRequest("the KVCache has been taken by another request", found=offer.transfer_id)
            offer.fail(offer.error or taken)  # whoever else reads from it would wait for its deadline
            offer.leave_blocks()
            self._forget(offer, offer.error or taken)
            self._let_go(offer.request_id)
            offer.gone = True

    async def reap_forever(self) -> None:
        """Give up, on a timer, what nobody has taken in time."""
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            now = time.monotonic()
            for name in [name for name, (_, forget_at) in self._over.items() if now >= forget_at]:
                del self._over[name]
            for offer in tuple(self._offers.values()):
                if offer.let_go_at is not None and now >= offer.let_go_at:
                    self._stats.add("expired_holds")
                    offer.fail(DeadlineError("nobody took the KVCache in time", transfer=offer.transfer_id))
                    self._settle(offer)

    # -- claims ------------------------------------------------------------------------------------------------------

    async def serve(self, call: ClaimCall, emit: Emit) -> None:
        """One claim, to its end.

        Raises:
            PrfaasError: the KVCache cannot be had, and why.
        """
        if call.protocol != PROTOCOL:
            raise IncompatibleError(
                "the two connectors speak different versions", expected=PROTOCOL, found=call.protocol,
                do="run the same version of prfaas-net on both sides",
            )  # fmt: skip
        if call.release:
            self._release(call.transfer_id)
            return
        if call.boot_id != self.boot_id:
            emit({"event": "stale"})
            return
        beat = asyncio.create_task(self._beat(emit))
        try:
            offer = await self._find(call.transfer_id)
            try:
                self._check(call, offer)
                emit({"event": "paired"})
                await self._send(call, offer, emit)
            except PrfaasError:
                self._stats.add("failed_sends")
                raise
            finally:
                # Also a claim that was given up counts: who gave it up computes the prompt itself.
                offer.claim_ended(call.claims)
                self._settle(offer)
        finally:
            beat.cancel()

    @staticmethod
    async def _beat(emit: Emit) -> None:
        while True:
            emit({"event": "waiting"})
            await asyncio.sleep(BEAT_S)

    def _release(self, transfer_id: str) -> None:
        offer = self._offers.get(transfer_id)
        if offer is not None:
            offer.fail(CancelledByPeer("the decode server does not need the KVCache", transfer=transfer_id))
            self._settle(offer)

    async def _find(self, transfer_id: str) -> Offer:
        offer = self._offers.get(transfer_id)
        if offer is not None:
            return offer
        if transfer_id in self._over:
            raise self._over[transfer_id][0]
        future: asyncio.Future[Offer] = self._loop.create_future()
        self._waiting[transfer_id].append(future)
        try:
            async with asyncio.timeout(self._config.pairing):
                return await future
        except TimeoutError as error:
            raise InvalidRequest(
                "no prompt with this transfer_id is here",
                found=transfer_id,
                do="send the prompt with do_remote_decode to this server first or at the same time; it may have been "
                "answered, given up or taken already",
            ) from error
        finally:
            waiting = self._waiting.get(transfer_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self._waiting.pop(transfer_id, None)

    @staticmethod
    def _check(call: ClaimCall, offer: Offer) -> None:
        if offer.error is not None:
            raise offer.error
        if (call.stop_token, call.digest) != (offer.stop, offer.digest):
            raise InvalidRequest(
                "the two servers were given different prompts", expected=f"{offer.stop} tokens of {offer.digest}",
                found=f"{call.stop_token} tokens of {call.digest}",
                do="give both the same prompt, chat template and adapter", transfer=call.transfer_id,
            )  # fmt: skip

    async def _send(self, call: ClaimCall, offer: Offer, emit: Emit) -> None:
        if call.ticket is None:
            return
        if call.plan is None:
            raise ProtocolError("a claim with a ticket has a plan", transfer=call.transfer_id)
        plan = PagePlan.from_json(call.plan)
        plan.check(self._layout)
        ticket = Ticket.from_json(call.ticket)
        block = await self._room.reserve(plan.table.total_bytes)
        sending: PageSending | None = None
        try:
            link = await self._links.get(ticket)
            views = views_of(plan, block)
            outgoing = link.open(ticket, plan.table, views, lifetime_s=call.deadline_s)
            sending = PageSending(plan, self._memory, outgoing, views, outgoing.abort)
            offer.attach(sending)
            if offer.error is not None:
                outgoing.abort(offer.error)
            stats = await outgoing.wait()
        finally:
            if sending is not None:
                sending.outgoing.abort(CancelledByPeer("the claim was given up", transfer=call.transfer_id))
                offer.detach(sending)
            self._room.release(block)
        assert stats.done_s is not None
        assert stats.first_sent_s is not None
        assert stats.sealed_s is not None
        seconds, exposed_s = stats.done_s - stats.first_sent_s, stats.done_s - stats.sealed_s
        self._stats.add("sent_bytes", plan.table.total_bytes)
        self._stats.add("sent_s", seconds)
        self._stats.add("sent_exposed_s", exposed_s)
        emit({"event": "sent", "bytes": plan.table.total_bytes, "seconds": seconds, "exposed_s": exposed_s})
