"""One attempt at a request: one node that decodes it, one that computes its prompt, and the tokens that come of it.

An attempt has one outcome: the answer, or one error together with the side whose fault it is. What is said to the two
nodes, and in which order, is the business of their kind (:mod:`prfaas_net.gateway.engines`); this is what all kinds
have in common: who is blamed, what is recorded, and how it ends early.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, TypeVar

from prfaas_net.errors import CancelledByPeer, InternalError, PrfaasError, ProtocolError
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.request import Finish, ServingRequest, Token
from prfaas_net.gateway.services import Services
from prfaas_net.scheduling import Decision, PrefillEnded, TransferLanded

__all__ = ["Attempt", "Side"]

log = logging.getLogger(__name__)

# When one node says "the other side cancelled", the cause is on the other side and arrives within a round trip or
# two. So long it may take to be preferred.
ROOT_CAUSE_WAIT_S = 0.25

_T = TypeVar("_T")


class Side(StrEnum):
    """Who failed an attempt."""

    PREFILL = "prefill node"
    LINK = "link"
    DECODE = "decode node"


class Attempt(ABC):
    """Reads one answer from one pair of nodes. Made and closed by a run, read by one task.

    Args:
        request: the request, or what is left of it.
        keys: :func:`prfaas_net.cache.prefix_keys` of its prompt.
        resumed: whether the prompt ends in tokens that were generated before.

    Attributes:
        side: whose fault the error was that :meth:`start` or :meth:`next` raised; None: no node's.
    """

    def __init__(
        self,
        request: ServingRequest,
        decision: Decision,
        keys: bytes,
        services: Services,
        record: RequestRecord,
        *,
        resumed: bool = False,
    ) -> None:
        self.decision = decision
        self.resumed = resumed
        self.side: Side | None = None
        self._request = request
        self._keys = keys
        self._services = services
        self._record = record
        self._failure: PrfaasError | None = None
        self._blamed: Side | None = None
        self._waiting: asyncio.Timeout | None = None
        # In a task of its own: a prefill node may let us wait in its queue, and meanwhile the decode node must be
        # listened to.
        self._prefilling: asyncio.Task[None] | None = None
        self._landed = False
        self._n_tokens = 0

    # -- what each kind of node does its own way --------------------------------------------------------------------

    @property
    @abstractmethod
    def next_is_here(self) -> bool:
        """Whether :meth:`next` would return what has come already, and not wait or fail."""

    @property
    @abstractmethod
    def finish_is_here(self) -> bool:
        """Whether :meth:`next` would return a :class:`Finish` without waiting."""

    @abstractmethod
    async def start(self) -> None:
        """Begin: whatever must have succeeded before anything is computed.

        Raises:
            PrfaasError: a node could not be reached or refused.
        """

    @abstractmethod
    async def next(self) -> Token | Finish:
        """The next token, or the end.

        Raises:
            PrfaasError: the attempt failed; :attr:`side` says whose fault it is.
        """

    @abstractmethod
    def _hang_up(self) -> None:
        """Close every call that is open, at once."""

    def _blame_decode(self, error: PrfaasError) -> Side:
        """Whose fault an error is that the decode call ended in."""
        return Side.DECODE

    def _caused_elsewhere(self, error: PrfaasError) -> bool:
        """Whether the prefill side may be about to say why the decode call ended so."""
        return isinstance(error, CancelledByPeer)

    # -- the same for all -------------------------------------------------------------------------------------------

    async def settle(self, wait_s: float) -> None:
        """After the last token: wait for the transfer's report, so that the record is whole.

        A request of few tokens can end before its last KV byte has landed.
        """
        if self._prefilling is not None:
            # Never so long that the deadline spoils an answer that is complete.
            await asyncio.wait({self._prefilling}, timeout=min(wait_s, self._remaining_s() / 2))

    def lost(self, node_id: str, error: PrfaasError) -> None:
        """A node has forgotten its calls, whatever their connections say."""
        if node_id == self.decision.decode_node:
            self._abort(error, Side.DECODE)
        elif node_id == self.decision.prefill_node and not self._landed:
            self._abort(error, Side.PREFILL)

    def reached(self, stage: str) -> None:
        """Note when a stage was reached, once."""
        self._record.reached(stage, self._services.clock.now() - self._request.arrived_s)

    def stop(self) -> None:
        """No more tokens are wanted: both nodes stop at once."""
        # The reader first: it must not take our own closing for a failure of the node.
        if self._prefilling is not None:
            self._prefilling.cancel()
        self._hang_up()

    async def close(self) -> None:
        """Close both calls. Safe at any time, in any state."""
        self.stop()
        if self._prefilling is not None:
            await asyncio.gather(self._prefilling, return_exceptions=True)

    def _remaining_s(self) -> float:
        """Seconds left for a stage that starts now; a node cannot be given less than some."""
        return max(0.001, self._request.deadline_at - asyncio.get_running_loop().time())

    def _abort(self, error: PrfaasError, side: Side | None) -> None:
        """Let :meth:`next` raise this error, also if it waits now. The first error counts."""
        if self._failure is None:
            self._failure, self._blamed = error, side
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())

    async def _unless_aborted(self, wait: Callable[[], Awaitable[_T]]) -> _T:
        """What the decode side says next.

        Raises:
            PrfaasError: the first failure of any side; :attr:`side` is set.
        """
        try:
            if self._failure is None:
                async with asyncio.timeout(None) as self._waiting:
                    return await wait()
        except TimeoutError:
            if self._failure is None:
                raise
        except PrfaasError as error:
            self._waiting = None
            if self._prefilling is not None and self._caused_elsewhere(error):
                # If the prefill side has the cause, its task aborts this attempt while we wait here.
                await asyncio.wait({self._prefilling}, timeout=ROOT_CAUSE_WAIT_S)
            self._abort(error, self._blame_decode(error))
        finally:
            self._waiting = None
        assert self._failure is not None
        # Only now: whoever ended the attempt may have done so while it was still being started, on another side.
        self.side = self._blamed
        raise self._failure

    def _follow_prefill(self, read: Callable[[], Awaitable[None]], blame: Callable[[PrfaasError], Side]) -> None:
        """Read the prefill side in a task; its failure ends the attempt, unless decoding needs nothing more of it."""

        async def follow() -> None:
            try:
                await read()
            except PrfaasError as error:
                if isinstance(error, CancelledByPeer):
                    # The decode side has the cause: let it speak first.
                    await asyncio.sleep(ROOT_CAUSE_WAIT_S)
                if self._landed:
                    self._record.reasons.append(f"after landing, the prefill call failed: {error.line()}")
                else:
                    self._abort(error, blame(error))
            except Exception as error:
                log.exception("request %s: following the prefill failed", self._request.request_id)
                self._abort(InternalError("following the prefill failed", found=repr(error)), None)

        self._prefilling = asyncio.create_task(follow(), name=f"prefill {self._request.request_id}")

    def _note_prefilled(self) -> None:
        """The prompt has passed every layer."""
        self._record.prefilled_tokens = self._record.prompt_tokens
        self.reached("prefilled")
        self._services.observe(PrefillEnded(self._request.request_id))

    def _note_landed(self) -> None:
        """Decoding needs nothing more from the prefill side."""
        self._landed = True
        self.reached("landed")
        self._services.observe(TransferLanded(self._request.request_id))

    def _note_cached(self, cached: Any) -> bool:
        """What the prefill node really found in its cache; the router only knew what was told of it."""
        if type(cached) is not int or not 0 <= cached < len(self._request.token_ids):
            return False
        if not self.resumed:
            self._record.note_cached(cached)
        return True

    def _unexpected(self, found: Any, expected: str, side: Side = Side.DECODE) -> ProtocolError:
        self.side = side
        node = self.decision.decode_node if side is Side.DECODE else self.decision.prefill_node
        return ProtocolError(
            "a node sent something out of order", expected=expected, found=repr(found)[:120], node=node
        )
