"""What gateways and nodes say to each other over HTTP.

Both node calls are one POST whose answer is a stream of JSON lines, and *the open response owns the work*: whoever
closes it cancels the request and frees everything that it held. No call leaves state behind that somebody has to
remember to clean up.

``POST /v1/decode`` (a :class:`DecodeCall`) answers with

    {"event": "reserved", "ticket": {...}}                    memory is reserved; here is the ticket
    {"event": "token", "token": 17, "index": 0}               index 0 comes from the prefill node, with the seal
    {"event": "landed", "at_s": 0.41}                         the whole KVCache is here; decoding starts
    {"event": "token", "token": 4, "index": 1} ...
    {"event": "token", "token": 9, "index": 2, "finish": "stop"}     the last one may say that it is, and why
                                                   with logprobs asked for: "logprobs": {...}, a :class:`LogprobsModel`
    {"event": "finish", "reason": "stop" | "length", "output_tokens": 3}

``POST /v1/prefill`` (a :class:`PrefillCall`) answers with

    {"event": "started", "queued_s": 0.0}
    {"event": "progress", "tokens": 512} ...                  prompt tokens that have passed every layer
    {"event": "prefilled", "prefill_s": 1.2}                  the first token is on its way
    {"event": "done", "report": {...}}                        a :class:`TransferReport`: all of it has landed

Either may instead end with ``{"event": "error", "error": {...}}``, the body of
:meth:`prfaas_net.errors.PrfaasError.to_wire`. A refusal before anything was begun is an HTTP status with that body.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from prfaas_net.nodes.engine_api import Sampling

__all__ = [
    "MAX_BIASES",
    "MAX_LOGPROBS",
    "DecodeCall",
    "LogprobsModel",
    "NodeInfo",
    "PrefillCall",
    "SamplingModel",
    "TransferReport",
]

# Far above any model's context; bounds what a body can make us allocate.
MAX_PROMPT_TOKENS = 1 << 24
MAX_VOCAB = 1 << 22
MAX_BIASES = 4096
MAX_LOGPROBS = 20


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SamplingModel(Message):
    """JSON form of :class:`~prfaas_net.nodes.engine_api.Sampling`."""

    temperature: float = Field(0.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int = Field(0, ge=0, lt=1 << 64)
    max_tokens: int = Field(16, ge=1, le=MAX_PROMPT_TOKENS)
    min_tokens: int = Field(0, ge=0, le=MAX_PROMPT_TOKENS)
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    logit_bias: tuple[tuple[int, float], ...] = Field((), max_length=MAX_BIASES)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def sampling(self) -> Sampling:
        return Sampling(**self.model_dump())


class LogprobsModel(Message):
    """JSON form of :class:`~prfaas_net.nodes.engine_api.TokenLogprobs`; in the seal and in token events."""

    logprob: float
    top: tuple[tuple[int, float], ...] = Field((), max_length=MAX_LOGPROBS)


class DecodeCall(Message):
    """Reserve room for a prompt's KVCache, receive it, decode.

    Attributes:
        source_cluster: where the prefill will run; decides which of the node's addresses the ticket names.
        deadline_s: from now; the reservation, the landing and the decoding all fall under it.
        prompt_token_set: the tokens that occur in the prompt, where the sampling counts them (repetition penalty).
    """

    request_id: str = Field(min_length=1, max_length=128)
    prompt_tokens: int = Field(ge=1, le=MAX_PROMPT_TOKENS)
    layout: str = Field(max_length=64)
    chunk_tokens: int = Field(ge=1, le=MAX_PROMPT_TOKENS)
    source_cluster: str = Field(max_length=128)
    deadline_s: float = Field(gt=0, le=86400)
    prompt_token_set: list[int] = Field(default_factory=list, max_length=MAX_VOCAB)
    sampling: SamplingModel = SamplingModel.model_construct()


class PrefillCall(Message):
    """Run a prompt and stream its KVCache to whoever issued the ticket."""

    request_id: str = Field(min_length=1, max_length=128)
    token_ids: list[int] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    ticket: dict[str, Any]
    deadline_s: float = Field(gt=0, le=86400)
    sampling: SamplingModel = SamplingModel.model_construct()


class NodeInfo(Message):
    """``GET /v1/node``: what a node is. A new ``boot_id`` means that it restarted and forgot everything."""

    node_id: str
    boot_id: str
    cluster: str
    role: Literal["prefill", "decode"]
    model: str
    layout: str
    max_model_tokens: int
    vocab_size: int
    prefill_chunk_tokens: int


class TransferReport(Message):
    """What a finished transfer cost, measured by the sender.

    Attributes:
        kv_bytes: by kind of state.
        connections: data connections that carried at least one chunk.
        transfer_s: first chunk handed to a socket until the receiver confirmed the whole.
        exposed_s: end of prefill until that confirmation: what pipelining could not hide.
    """

    request_id: str
    prompt_tokens: int
    kv_bytes: dict[str, int]
    connections: int
    resent_chunks: int
    queued_s: float
    prefill_s: float
    transfer_s: float
    exposed_s: float
