"""Our own nodes: a reservation on the decode node, its ticket to the prefill node, and the events of both."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from prfaas_net.errors import CancelledByPeer, CorruptionError, LinkError, PrfaasError, ProtocolError
from prfaas_net.gateway.attempt import Attempt, Side
from prfaas_net.gateway.calls import NodeStream
from prfaas_net.gateway.request import Finish, Token
from prfaas_net.nodes.messages import DecodeCall, LogprobsModel, PrefillCall, SamplingModel, TransferReport

__all__ = ["PrfaasAttempt"]

FINISH_REASONS = ("stop", "length")
# What a decode node says of a KV stream that broke before it was whole: not its own fault.
BROKEN_STREAM = (LinkError, CorruptionError, CancelledByPeer, ProtocolError)


class PrfaasAttempt(Attempt):
    """The protocol of :mod:`prfaas_net.nodes.messages`."""

    _decode: NodeStream | None = None
    _prefill: NodeStream | None = None

    @property
    def next_is_here(self) -> bool:
        return self._decode is not None and self._decode.next_kind is not None and self._failure is None

    @property
    def finish_is_here(self) -> bool:
        return self._decode is not None and self._decode.next_kind == "finish"

    async def start(self) -> None:
        """Reserve on the decode node, start the prefill."""
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
            again=bool(self._record.fallbacks),
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
            destination_cluster=self.decision.decode_cluster,
            deadline_s=self._remaining_s(),
            cache_salt=request.cache_salt,
            sampling=sampling,
        )
        self._follow_prefill(lambda: self._read_prefill(prefill.name, prefill.url, call), self._blame_prefill)

    async def next(self) -> Token | Finish:
        stream = self._decode
        assert stream is not None
        while True:
            event = await (stream.next() if self.next_is_here else self._unless_aborted(stream.next))
            match event["event"]:
                case "token":
                    return self._token(event)
                case "landed":
                    self._note_landed()
                case "finish":
                    return self._finish(event)

    def _hang_up(self) -> None:
        for stream in (self._decode, self._prefill):
            if stream is not None:
                stream.close()

    # -- the decode call ------------------------------------------------------------------------------------------

    def _blame_decode(self, error: PrfaasError) -> Side:
        stream = self._decode
        told = stream is not None and not stream.broken
        return Side.LINK if told and not self._landed and isinstance(error, BROKEN_STREAM) else Side.DECODE

    def _token(self, event: dict[str, Any]) -> Token:
        token, index, finish = event.get("token"), event.get("index"), event.get("finish")
        if finish not in (None, *FINISH_REASONS):
            raise self._unexpected(event, "a finish reason that is known")
        if type(token) is not int or token < 0 or index != self._n_tokens:
            raise self._unexpected(event, f"token {self._n_tokens} of the answer")
        if index == 0 and not self._note_cached(event.get("cached_tokens", 0)):
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

    # -- the prefill call -----------------------------------------------------------------------------------------

    def _blame_prefill(self, error: PrfaasError) -> Side:
        told = self._prefill is not None and not self._prefill.broken
        return Side.LINK if told and isinstance(error, LinkError) else Side.PREFILL

    async def _read_prefill(self, node_id: str, url: str, call: PrefillCall) -> None:
        """Start the prefill and read its events to their end."""
        try:
            stream = self._prefill = await self._services.client.open(node_id, url, "/v1/prefill", call)
            while (event := await stream.next())["event"] != "done":
                self._prefill_event(event)
            self.reached("transferred")
            self._record.note_report(TransferReport.model_validate(event.get("report")), resumed=self.resumed)
        except ValidationError:
            self._record.reasons.append("the prefill node's report could not be read")

    def _prefill_event(self, event: dict[str, Any]) -> None:
        """Events of kinds that are not known are from a newer node, and ignored."""
        match event:
            case {"event": "started"}:
                if not self._note_cached(event.get("cached_tokens", 0)):
                    raise self._unexpected(event, "cached_tokens of the prompt", Side.PREFILL)
                self.reached("prefill_started")
            case {"event": "progress", "tokens": int(tokens)}:
                self._record.prefilled_tokens = min(tokens, self._record.prompt_tokens)
            case {"event": "prefilled"}:
                self._note_prefilled()
