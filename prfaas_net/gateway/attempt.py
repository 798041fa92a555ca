"""One attempt at a request: a reservation on one decode node, a prefill on one node, and the tokens that come of it.

An attempt has one outcome: the answer, or one error together with the side whose fault it is.
"""

from __future__ import annotations

import asyncio
import logging
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from prfaas_net.errors import CancelledByPeer, CorruptionError, InternalError, LinkError, PrfaasError, ProtocolError
from prfaas_net.gateway.calls import NodeStream
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.services import Finish, Services, ServingRequest, Token
from prfaas_net.nodes.messages import DecodeCall, LogprobsModel, PrefillCall, SamplingModel, TransferReport
from prfaas_net.scheduling import Decision, PrefillEnded, TransferLanded

__all__ = ["Attempt", "Side"]

log = logging.getLogger(__name__)

# When one node says "the other side cancelled", the cause is on the other side and arrives within a round trip or
# two. So long it may take to be preferred.
ROOT_CAUSE_WAIT_S = 0.25
FINISH_REASONS = ("stop", "length")
# What a decode node says of a KV stream that broke before it was whole: not its own fault.
BROKEN_STREAM = (LinkError, CorruptionError, CancelledByPeer, ProtocolError)


class Side(StrEnum):
    """Who failed an attempt."""

    PREFILL = "prefill node"
    LINK = "link"
    DECODE = "decode node"


class Attempt:
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
        self._waiting: asyncio.Timeout | None = None
        self._decode: NodeStream | None = None
        self._prefill: NodeStream | None = None
        self._prefilling: asyncio.Task[None] | None = None
        self._landed = False
        self._n_tokens = 0

    @property
    def finish_is_here(self) -> bool:
        """Whether :meth:`next` would return a :class:`Finish` without waiting."""
        return self._decode is not None and self._decode.next_kind == "finish"

    async def start(self) -> None:
        """Reserve on the decode node, start the prefill.

        Raises:
            PrfaasError: the decode node could not be reached or refused.
        """
        request, services = self._request, self._services
        self.side = Side.DECODE
        sampling = SamplingModel.model_construct(**vars(request.sampling))
        decode = services.fleet.find(self.decision.decode_node)
        assert decode.info is not None
        reserve = DecodeCall.model_construct(
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
            layout=decode.info.layout,
            chunk_tokens=self.decision.chunk_tokens,
            source_cluster=self.decision.prefill_cluster,
            deadline_s=self._remaining_s(),
            prompt_token_set=sorted(set(request.token_ids)) if request.sampling.counts_prompt else [],
            prefix_keys=self._keys.hex(),
            sampling=sampling,
        )
        self._decode = await services.client.open(decode.name, decode.url, "/v1/decode", reserve)
        reserved = await self._decode.next()
        if reserved["event"] != "reserved" or not isinstance(reserved.get("ticket"), dict):
            raise self._unexpected(reserved, "a ticket")
        self.reached("reserved")
        self.side = Side.PREFILL
        prefill = services.fleet.find(self.decision.prefill_node)
        self.side = None
        call = PrefillCall.model_construct(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            ticket=reserved["ticket"],
            deadline_s=self._remaining_s(),
            cache_salt=request.cache_salt,
            sampling=sampling,
        )
        # In a task of its own from the first byte on: a prefill node may let us wait in its queue, and meanwhile
        # the decode node must be listened to.
        self._prefilling = asyncio.create_task(
            self._follow_prefill(prefill.name, prefill.url, call), name=f"prefill {request.request_id}"
        )

    async def next(self) -> Token | Finish:
        """The next token, or the end.

        Raises:
            PrfaasError: the attempt failed; :attr:`side` says whose fault it is.
        """
        while True:
            event = await self._decode_event()
            match event["event"]:
                case "token":
                    return self._token(event)
                case "landed":
                    self._landed = True
                    self.reached("landed")
                    self._services.observe(TransferLanded(self._request.request_id))
                case "finish":
                    return self._finish(event)

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
        for stream in (self._decode, self._prefill):
            if stream is not None:
                stream.close()

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
            self._failure, self.side = error, side
            if self._waiting is not None:
                self._waiting.reschedule(asyncio.get_running_loop().time())

    # -- the decode call ------------------------------------------------------------------------------------------

    async def _decode_event(self) -> dict[str, Any]:
        stream = self._decode
        assert stream is not None
        try:
            if self._failure is None:
                async with asyncio.timeout(None) as self._waiting:
                    return await stream.next()
        except TimeoutError:
            if self._failure is None:
                raise
        except PrfaasError as error:
            self._waiting = None
            if isinstance(error, CancelledByPeer) and self._prefilling is not None:
                # If the prefill side has the cause, its task aborts this attempt while we wait here.
                await asyncio.wait({self._prefilling}, timeout=ROOT_CAUSE_WAIT_S)
            broken_stream = not self._landed and not stream.broken and isinstance(error, BROKEN_STREAM)
            self._abort(error, Side.LINK if broken_stream else Side.DECODE)
        finally:
            self._waiting = None
        assert self._failure is not None
        raise self._failure

    def _token(self, event: dict[str, Any]) -> Token:
        token, index, finish = event.get("token"), event.get("index"), event.get("finish")
        if finish not in (None, *FINISH_REASONS):
            raise self._unexpected(event, "a finish reason that is known")
        if type(token) is not int or token < 0 or index != self._n_tokens:
            raise self._unexpected(event, f"token {self._n_tokens} of the answer")
        if index == 0 and not self._found_cached(event):
            raise self._unexpected(event, f"cached_tokens from 0 to {len(self._request.token_ids) - 1}")
        self._n_tokens += 1
        return Token(token, index, finish, self._logprobs(event))

    def _logprobs(self, event: dict[str, Any]) -> LogprobsModel | None:
        if self._request.sampling.logprobs is None:
            return None
        try:
            return LogprobsModel.model_validate(event.get("logprobs"))
        except ValidationError:
            raise self._unexpected(event, "logprobs") from None

    def _finish(self, event: dict[str, Any]) -> Finish:
        if event.get("reason") not in FINISH_REASONS or self._n_tokens == 0:
            raise self._unexpected(event, "a finish reason, after at least one token")
        # The request is complete: what the prefill side still says can no longer spoil it.
        self._landed = True
        return Finish(str(event["reason"]), self._n_tokens)

    def _unexpected(self, event: dict[str, Any], expected: str, side: Side = Side.DECODE) -> ProtocolError:
        self.side = side
        node = self.decision.decode_node if side is Side.DECODE else self.decision.prefill_node
        return ProtocolError(
            "a node sent something out of order", expected=expected, found=repr(event)[:120], node=node
        )

    def _found_cached(self, event: dict[str, Any]) -> bool:
        """What the prefill node really found in its cache; the router only knew what was told of it."""
        cached = event.get("cached_tokens", 0)
        if type(cached) is not int or not 0 <= cached < len(self._request.token_ids):
            return False
        if not self.resumed:
            self._record.note_cached(cached)
        return True

    # -- the prefill call -----------------------------------------------------------------------------------------

    async def _follow_prefill(self, node_id: str, url: str, call: PrefillCall) -> None:
        """Start the prefill and read its events to their end; on failure, end the attempt."""
        stream = None
        try:
            stream = self._prefill = await self._services.client.open(node_id, url, "/v1/prefill", call)
            while (event := await stream.next())["event"] != "done":
                self._prefill_event(event)
            self.reached("transferred")
            self._record.note_report(TransferReport.model_validate(event.get("report")), resumed=self.resumed)
        except ValidationError:
            self._record.reasons.append("the prefill node's report could not be read")
        except PrfaasError as error:
            if isinstance(error, CancelledByPeer):
                # The decode side has the cause: let it speak first.
                await asyncio.sleep(ROOT_CAUSE_WAIT_S)
            if self._landed:
                # Decoding needs nothing more from it.
                self._record.reasons.append(f"after landing, the prefill call failed: {error.line()}")
            else:
                over_link = stream is not None and not stream.broken and isinstance(error, LinkError)
                self._abort(error, Side.LINK if over_link else Side.PREFILL)
        except Exception as error:
            log.exception("request %s: following the prefill failed", self._request.request_id)
            self._abort(InternalError("following the prefill failed", found=repr(error)), None)

    def _prefill_event(self, event: dict[str, Any]) -> None:
        """Events of kinds that are not known are from a newer node, and ignored."""
        match event:
            case {"event": "started"}:
                if not self._found_cached(event):
                    raise self._unexpected(event, "cached_tokens of the prompt", Side.PREFILL)
                self.reached("prefill_started")
            case {"event": "progress", "tokens": int(tokens)}:
                self._record.prefilled_tokens = min(tokens, self._record.prompt_tokens)
            case {"event": "prefilled"}:
                self._record.prefilled_tokens = self._record.prompt_tokens
                self.reached("prefilled")
                self._services.observe(PrefillEnded(self._request.request_id))
