"""One request being served: reserve on the decode node, prefill, read the tokens, notice what breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from prfaas_net.cache.manager import Match
from prfaas_net.clock import Clock
from prfaas_net.errors import CancelledByPeer, InternalError, PrfaasError, ProtocolError
from prfaas_net.gateway.cache_desk import CacheDesk
from prfaas_net.gateway.calls import NodeClient, NodeStream
from prfaas_net.gateway.fleet import Fleet
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.nodes.engine_api import Sampling
from prfaas_net.nodes.messages import DecodeCall, LogprobsModel, PrefillCall, SamplingModel, TransferReport
from prfaas_net.scheduling import Arrival, Decision, PrefillEnded, RequestEnded, Role, Router, TransferLanded

__all__ = ["Finish", "Run", "Services", "ServingRequest", "Token"]

log = logging.getLogger(__name__)

# When one node says "the other side cancelled", the cause is on the other side and arrives within a round trip or
# two. So long it may take to be preferred.
ROOT_CAUSE_WAIT_S = 0.25
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Services:
    """What a request needs of the gateway.

    Attributes:
        clock: for the router and for the times in records.
        ttft_limit_s: requests whose first token is predicted later than this are refused at once; None: none is.
    """

    router: Router
    fleet: Fleet
    client: NodeClient
    desk: CacheDesk
    clock: Clock
    ttft_limit_s: float | None = None

    def decide(self, request: ServingRequest, cached: Match) -> Decision:
        """Ask the router.

        Args:
            cached: by node, how long a prefix of the prompt a prefill there could start from. (A node uses only what
                it holds itself.)
        """
        arrival = Arrival(
            request.request_id,
            len(request.token_ids),
            request.sampling.max_tokens,
            node_cached_tokens={node.node_id: node.usable_tokens for node in cached.nodes},
            ttft_limit_s=self.ttft_limit_s,
        )
        return self.router.decide(arrival, now=self.clock.now())

    def cached_on(self, request: ServingRequest, keys: bytes) -> Match:
        """What the prefill nodes hold of the prompt."""
        nodes = self.desk.caches.match(keys, len(request.token_ids)).nodes
        return Match(tuple(node for node in nodes if self.fleet.role_of(node.node_id) is Role.PREFILL))

    def observe(self, event: PrefillEnded | TransferLanded | RequestEnded) -> None:
        """Tell the router."""
        self.router.observe(event, now=self.clock.now())


@dataclass(frozen=True)
class ServingRequest:
    """A request that was understood and tokenized.

    Attributes:
        arrived_s: when it came, on the clock of the gateway.
        deadline_at: when it must have ended, on the event loop's clock.
        cache_salt: only requests with the same one may share cached state with it.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    arrived_s: float
    deadline_at: float
    cache_salt: str = ""


@dataclass(frozen=True)
class Token:
    """One token of the answer.

    Attributes:
        index: counts from 0.
        finish: why it is the last one, where the node said so along with it.
        logprobs: where the request asked for them.
    """

    token: int
    index: int
    finish: str | None = None
    logprobs: LogprobsModel | None = None


@dataclass(frozen=True)
class Finish:
    """The answer is complete."""

    reason: str
    output_tokens: int


class Run:
    """A request being served. Made by the lifecycle; read by one task with :meth:`next`."""

    def __init__(self, request: ServingRequest, services: Services, record: RequestRecord) -> None:
        self.request = request
        self.record = record
        self.failure: PrfaasError | None = None
        self._services = services
        self._scope: asyncio.Timeout | None = None
        self._decision: Decision | None = None
        self._decode: NodeStream | None = None
        self._prefill: NodeStream | None = None
        self._prefilling: asyncio.Task[None] | None = None
        self._landed = False

    def enter(self, scope: asyncio.Timeout) -> None:
        """The scope that ends with this run, or ends it."""
        self._scope = scope

    @property
    def decision(self) -> Decision | None:
        """Where it is served; None before that was decided."""
        return self._decision

    @property
    def finish_is_here(self) -> bool:
        """Whether :meth:`next` would return a :class:`Finish` without waiting."""
        return self._decode is not None and self._decode.next_kind == "finish"

    async def next(self) -> Token | Finish:
        """The next token, or the end of the answer.

        Raises:
            PrfaasError: the request failed; both calls are closed when the scope of the run ends.
        """
        assert self._decode is not None
        while True:
            event = await self._decode_event(self._decode)
            match event["event"]:
                case "token":
                    return self._token(event)
                case "landed":
                    self._landed = True
                    self.reached("landed")
                    self._services.observe(TransferLanded(self.request.request_id))
                case "finish":
                    return self._finish(event)

    async def settle(self, wait_s: float) -> None:
        """After the last token: wait for the transfer's report, so that the record is whole.

        A request of few tokens can end before its last KV byte has landed.
        """
        if self._prefilling is not None:
            # Never so long that the deadline spoils an answer that is complete.
            await asyncio.wait({self._prefilling}, timeout=min(wait_s, self._remaining_s() / 2))

    def stop(self) -> None:
        """No more tokens are wanted: both nodes stop at once."""
        self._close_calls()

    def abort(self, error: PrfaasError) -> None:
        """End the run with this error, whatever it is waiting for. The first error counts."""
        if self._scope is not None and self.failure is None and not self._scope.expired():
            self.failure = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    def reached(self, stage: str) -> None:
        """Note when a stage was reached, once."""
        self.record.stages_s.setdefault(stage, self._services.clock.now() - self.request.arrived_s)

    def _remaining_s(self) -> float:
        """Seconds left for a stage that starts now; a node cannot be given less than some."""
        return max(0.001, self.request.deadline_at - asyncio.get_running_loop().time())

    async def _decode_event(self, stream: NodeStream) -> dict[str, Any]:
        try:
            return await stream.next()
        except CancelledByPeer:
            if self._prefilling is not None:
                # If the prefill side has the cause, its task aborts this run while we wait here.
                await asyncio.wait({self._prefilling}, timeout=ROOT_CAUSE_WAIT_S)
            raise

    async def start(self) -> None:
        """Decide, reserve on the decode node, start the prefill."""
        request, services = self.request, self._services
        keys = await services.desk.caches.keys_of(request.token_ids, request.cache_salt)
        cached = services.cached_on(request, keys)
        self.record.cached_in = {name: held.usable_tokens for name, held in cached.by_cluster().items()}
        self._decision = services.decide(request, cached)
        services.desk.used(keys, cached, self._decision, private=bool(request.cache_salt))
        self.record.note_decision(self._decision)
        self.reached("decided")
        sampling = SamplingModel.model_construct(**vars(request.sampling))
        decode = services.fleet.find(self._decision.decode_node)
        prefill = services.fleet.find(self._decision.prefill_node)
        assert decode.info is not None
        reserve = DecodeCall.model_construct(
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
            layout=decode.info.layout,
            chunk_tokens=self._decision.chunk_tokens,
            source_cluster=self._decision.prefill_cluster,
            deadline_s=self._remaining_s(),
            prompt_token_set=sorted(set(request.token_ids)) if request.sampling.counts_prompt else [],
            prefix_keys=keys.hex(),
            sampling=sampling,
        )
        self._decode = await services.client.open(decode.name, decode.url, "/v1/decode", reserve)
        reserved = await self._decode.next()
        if reserved["event"] != "reserved" or not isinstance(reserved.get("ticket"), dict):
            raise self._unexpected(reserved, "a ticket", decode.name)
        self.reached("reserved")
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

    async def _follow_prefill(self, node_id: str, url: str, call: PrefillCall) -> None:
        """Start the prefill and read its events to their end; on failure, end the run."""
        try:
            stream = self._prefill = await self._services.client.open(node_id, url, "/v1/prefill", call)
            while (event := await stream.next())["event"] != "done":
                self._prefill_event(event)
            self.reached("transferred")
            self.record.note_report(TransferReport.model_validate(event.get("report")))
        except ValidationError:
            self.record.reasons.append("the prefill node's report could not be read")
        except PrfaasError as error:
            if isinstance(error, CancelledByPeer):
                # The decode side has the cause: let it speak first.
                await asyncio.sleep(ROOT_CAUSE_WAIT_S)
            if self._landed:
                # Decoding needs nothing more from it.
                self.record.reasons.append(f"after landing, the prefill call failed: {error.line()}")
            else:
                self.abort(error)
        except Exception as error:
            log.exception("request %s: following the prefill failed", self.request.request_id)
            self.abort(InternalError("following the prefill failed", found=repr(error)))

    def _prefill_event(self, event: dict[str, Any]) -> None:
        """Events of kinds that are not known are from a newer node, and ignored."""
        match event:
            case {"event": "started"}:
                self._found_cached(event)
                self.reached("prefill_started")
            case {"event": "progress", "tokens": int(tokens)}:
                self.record.prefilled_tokens = tokens
            case {"event": "prefilled"}:
                self.record.prefilled_tokens = self.record.prompt_tokens
                self.reached("prefilled")
                self._services.observe(PrefillEnded(self.request.request_id))

    def _token(self, event: dict[str, Any]) -> Token:
        token, index, finish = event.get("token"), event.get("index"), event.get("finish")
        if finish not in (None, *FINISH_REASONS):
            raise self._unexpected(event, "a finish reason that is known")
        if type(token) is not int or token < 0 or index != self.record.output_tokens:
            raise self._unexpected(event, f"token {self.record.output_tokens} of the answer")
        if index == 0:
            self._found_cached(event)
            self.reached("first_token")
            self.record.ttft_s = self.record.stages_s["first_token"]
        self.record.output_tokens += 1
        return Token(token, index, finish, self._logprobs(event))

    def _found_cached(self, event: dict[str, Any]) -> None:
        """What the prefill node really found in its cache; the router only knew what was told of it."""
        cached = event.get("cached_tokens", 0)
        if type(cached) is not int or not 0 <= cached < self.record.prompt_tokens:
            raise self._unexpected(event, f"cached_tokens from 0 to {self.record.prompt_tokens - 1}")
        self.record.note_cached(cached)

    def _logprobs(self, event: dict[str, Any]) -> LogprobsModel | None:
        if self.request.sampling.logprobs is None:
            return None
        try:
            return LogprobsModel.model_validate(event.get("logprobs"))
        except ValidationError:
            raise self._unexpected(event, "logprobs") from None

    def _finish(self, event: dict[str, Any]) -> Finish:
        if event.get("reason") not in FINISH_REASONS or self.record.output_tokens == 0:
            raise self._unexpected(event, "a finish reason, after at least one token")
        self.record.finish_reason = str(event["reason"])
        self.reached("finished")
        # The request is complete: what the prefill side still says can no longer spoil it.
        self._landed = True
        return Finish(self.record.finish_reason, self.record.output_tokens)

    def _unexpected(self, event: dict[str, Any], expected: str, node: str | None = None) -> ProtocolError:
        node = node or (self._decision.decode_node if self._decision else None)
        return ProtocolError(
            "a node sent something out of order", expected=expected, found=repr(event)[:120], node=node
        )

    async def close(self) -> None:
        """Close both calls. Safe at any time, in any state."""
        self._scope = None
        self._close_calls()
        if self._prefilling is not None:
            await asyncio.gather(self._prefilling, return_exceptions=True)

    def _close_calls(self) -> None:
        # The reader first: it must not take our own closing for a failure of the node.
        if self._prefilling is not None:
            self._prefilling.cancel()
        for stream in (self._decode, self._prefill):
            if stream is not None:
                stream.close()
