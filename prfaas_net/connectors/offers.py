"""The prefill side's book: prompts whose KVCache will be asked for, and the transfers that read them.

An :class:`Offer` lives from the prompt's first step until its blocks are let go. The engine's thread tells it how far
each layer has come; the loop's thread attaches transfers to it. A transfer copies each chunk out of the pages as soon
as its layer has passed the chunk's last token, in whichever thread finds that out first, and never reads a page again:
so blocks may be taken away at any time, and what was copied is still right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from prfaas_net.connectors.layout import EngineLayout, StateKind
from prfaas_net.connectors.orders import Blocks, PrefillOrder
from prfaas_net.connectors.pages import PagedMemory
from prfaas_net.connectors.plan import PageChunk, PagePlan, state_block
from prfaas_net.errors import PrfaasError
from prfaas_net.transport import Outgoing

__all__ = ["Offer", "PageSending"]


class PageSending:
    """One transfer out of an offer's pages.

    Args:
        views: where each chunk is copied to, and sent from.
        on_failure: told, from any thread, of a chunk that could not be copied.
    """

    def __init__(
        self,
        plan: PagePlan,
        memory: PagedMemory,
        outgoing: Outgoing,
        views: Sequence[memoryview],
        on_failure: Callable[[PrfaasError], None],
    ) -> None:
        self._plan = plan
        self._memory = memory
        self.outgoing = outgoing
        self._views = views
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._left: dict[str, list[PageChunk]] = {}
        for chunk in reversed(plan.chunks):
            self._left.setdefault(chunk.layer, []).append(chunk)
        for left in self._left.values():
            left.sort(key=lambda chunk: chunk.stop, reverse=True)
        self._uncopied = len(plan.chunks)
        self._closed = False
        self._tenure = 0

    def advance(self, layer: str, reached: int, blocks: Sequence[int], tenure: int) -> None:
        """The layer holds every token before ``reached``. From any thread.

        Args:
            tenure: of the blocks; once the offer has lost them, nothing is read out of them any more.
        """
        left = self._left.get(layer, [])
        while True:
            with self._lock:
                if self._closed or tenure < self._tenure or not left or left[-1].stop > reached:
                    return
                chunk = left.pop()
                section = self._plan.sections[chunk.section]
                try:
                    self._memory.gather(
                        chunk, section, blocks, self._views[chunk.index], partial(self._copied, chunk.index)
                    )
                except PrfaasError as error:
                    self._closed = True
                    self._on_failure(error)

    def _copied(self, index: int) -> None:
        # From a copying engine's thread it may come when the transfer has been closed: the link ignores it then.
        self.outgoing.ready(index)
        self._uncopied -= 1
        if self._uncopied == 0:
            self.outgoing.seal({})

    def leave(self, tenure: int) -> None:
        """Blocks of an earlier tenure are not read any more once this returns."""
        with self._lock:
            self._tenure = tenure
        self._memory.settle()

    def close(self) -> None:
        """No chunk is copied any more once this returns."""
        with self._lock:
            self._closed = True
        self._memory.settle()


class Offer:
    """One prompt's KVCache. Made in the engine's thread.

    Attributes:
        claims_left: transfers that have to end before the blocks may go; None until the first claim says so.
        let_go_at: when a finished prompt that nobody takes is given up; None while the engine still runs it.
        error: why it will not be served any more.
        gone: the engine has been told that the blocks may be freed.
    """

    def __init__(self, layout: EngineLayout, order: PrefillOrder) -> None:
        self.request_id = order.request_id
        self.transfer_id = order.transfer_id
        self.digest = order.digest
        self.stop = order.stop
        self.claims_left: int | None = None
        self.let_go_at: float | None = None
        self.error: PrfaasError | None = None
        self.gone = False
        self._layout = layout
        self._lock = threading.Lock()
        self._blocks: Blocks | None = None
        self._reached = dict.fromkeys(layout.by_layer, 0)
        self._after = 0
        self._tenure = 0
        self._sendings: list[PageSending] = []

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def begin_step(self, order: PrefillOrder) -> None:
        """The prompt is run in the step that begins now. What a prefix cache held is there already."""
        with self._lock:
            self._blocks, self._after = order.blocks, order.after
        for name, (_, group, _) in self._layout.by_layer.items():
            if group.kind is not StateKind.STATE:
                self._reach(name, order.before)

    def layer_done(self, layer: str) -> None:
        """The layer has run this step's tokens."""
        self._reach(layer, self._after)

    def end_step(self) -> None:
        """Every layer has, also those that tell nothing of it: recurrent ones, and all of them inside a graph."""
        for layer in self._reached:
            self._reach(layer, self._after)

    def leave_blocks(self) -> None:
        """Its blocks are about to be somebody else's: nothing reads them once this returns."""
        with self._lock:
            self._blocks = None
            self._reached = dict.fromkeys(self._reached, 0)
            self._tenure += 1
            sendings = tuple(self._sendings)
        for sending in sendings:
            sending.leave(self._tenure)

    def _reach(self, layer: str, tokens: int) -> None:
        with self._lock:
            if self._blocks is None or tokens <= self._reached[layer]:
                return
            self._reached[layer] = tokens
            sendings, blocks, tenure = tuple(self._sendings), self._table(layer), self._tenure
        for sending in sendings:
            sending.advance(layer, tokens, blocks, tenure)

    def _table(self, layer: str) -> Sequence[int]:
        index, group, _ = self._layout.by_layer[layer]
        assert self._blocks is not None
        table = self._blocks[index]
        return [state_block(table, group.spare_blocks)] if group.kind is StateKind.STATE else table

    # -- the loop's thread -------------------------------------------------------------------------------------------

    def attach(self, sending: PageSending) -> None:
        """Begin to copy: what is there at once, the rest as it comes."""
        with self._lock:
            self._sendings.append(sending)
            tenure = self._tenure
            sending.leave(tenure)
            if self._blocks is None:
                return
            there = [(layer, tokens, self._table(layer)) for layer, tokens in self._reached.items() if tokens]
        for layer, tokens, blocks in there:
            sending.advance(layer, tokens, blocks, tenure)

    def detach(self, sending: PageSending) -> None:
        with self._lock:
            self._sendings.remove(sending)
        sending.close()

    def claim_ended(self, n_claims: int) -> None:
        """One of so many transfers has ended, well or not."""
        self.claims_left = (n_claims if self.claims_left is None else self.claims_left) - 1

    def fail(self, error: PrfaasError) -> None:
        """It will not be served any more: whoever waits for it is told why."""
        self.error = error
        with self._lock:
            sendings = tuple(self._sendings)
        for sending in sendings:
            sending.outgoing.abort(error)
