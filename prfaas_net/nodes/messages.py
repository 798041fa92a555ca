"""What gateways and nodes say to each other over HTTP.

Both node calls are one POST whose answer is a stream of JSON lines, and *the open response owns the work*: whoever
closes it cancels the request and frees everything that it held. No call leaves state behind that somebody has to
remember to clean up.

``POST /v1/decode`` (a :class:`DecodeCall`) answers with

    {"event": "reserved", "ticket": {...}}                    memory is reserved; here is the ticket
    {"event": "token", "token": 17, "index": 0, "cached_tokens": 0}
                                                              index 0 comes from the prefill node, with the seal, and
                                                              says how many prompt tokens it found in its cache
    {"event": "landed", "at_s": 0.41}                         the whole KVCache is here; decoding starts
    {"event": "token", "token": 4, "index": 1} ...
    {"event": "token", "token": 9, "index": 2, "finish": "stop"}     the last one may say that it is, and why
                                                   with logprobs asked for: "logprobs": {...}, a :class:`LogprobsModel`
    {"event": "finish", "reason": "stop" | "length", "output_tokens": 3}

``POST /v1/prefill`` (a :class:`PrefillCall`) answers with

    {"event": "started", "queued_s": 0.0, "cached_tokens": 0}
    {"event": "progress", "tokens": 512} ...                  prompt tokens that have passed every layer
    {"event": "prefilled", "prefill_s": 1.2}                  the first token is on its way
    {"event": "done", "report": {...}}                        a :class:`TransferReport`: all of it has landed

``GET /v1/cache/events`` answers, without end, with what the node's prefix cache holds and how that changes:
:mod:`prfaas_net.cache.events`.

Either call may instead end with ``{"event": "error", "error": {...}}``, the body of
:meth:`prfaas_net.errors.PrfaasError.to_wire`. A refusal before anything was begun is an HTTP status with that body.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from prfaas_net.cache.keys import KEY_BYTES
from prfaas_net.kv import KvKind
from prfaas_net.nodes.engine_api import Sampling

__all__ = [
    "MAX_BIASES",
    "MAX_LOGPROBS",
    "MAX_SALT_CHARS",
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
MAX_SALT_CHARS = 256


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
        prefix_keys: hex of :func:`prfaas_net.cache.prefix_keys` for the prompt: rows that the node holds under them
            are not sent again, and rows that land are kept under them. Empty: neither.
        again: an earlier call of this request has just been given up: what had landed of it may be used.
    """

    request_id: str = Field(min_length=1, max_length=128)
    prompt_tokens: int = Field(ge=1, le=MAX_PROMPT_TOKENS)
    layout: str = Field(max_length=64)
    chunk_tokens: int = Field(ge=1, le=MAX_PROMPT_TOKENS)
    source_cluster: str = Field(max_length=128)
    deadline_s: float = Field(gt=0, le=86400)
    prompt_token_set: list[int] = Field(default_factory=list, max_length=MAX_VOCAB)
    prefix_keys: str = Field("", max_length=2 * KEY_BYTES * MAX_PROMPT_TOKENS, pattern="^(?:[0-9a-f]{32})*$")
    again: bool = False
    sampling: SamplingModel = SamplingModel.model_construct()


class PrefillCall(Message):
    """Run a prompt and stream its KVCache to whoever issued the ticket.

    Attributes:
        cache_salt: prompts with different salts share no cached state.
        destination_cluster: of whoever issued the ticket; decides how a new link to it behaves.
        use_cache: whether to start from a cached prefix and to keep what is computed.
    """

    request_id: str = Field(min_length=1, max_length=128)
    token_ids: list[int] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    ticket: dict[str, Any]
    deadline_s: float = Field(gt=0, le=86400)
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS)
    destination_cluster: str = Field("", max_length=128)
    use_cache: bool = True
    sampling: SamplingModel = SamplingModel.model_construct()


class ProfileModel(Message):
    """How fast a node is, for those who predict.

    Attributes:
        prefill: pairs of tokens and seconds, rising.
        decode_step_s: of a batch of ``max_batch``.
    """

    prefill: tuple[tuple[int, float], ...] = Field(min_length=2, max_length=256)
    decode_step_s: float = Field(gt=0)
    max_batch: int = Field(ge=1)

    @field_validator("prefill")
    @classmethod
    def _rises(cls, knots: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(b[0] <= a[0] for a, b in pairwise(knots)) or any(seconds < 0 for _, seconds in knots):
            raise ValueError("tokens must rise and seconds cannot be negative")
        return knots


class KvSizeModel(Message):
    """S_kv(l) of the paper: bytes of a sequence's state as a function of its length.

    Attributes:
        constant_bytes: linear state.
        bytes_per_token: rows of full attention.
        window_bytes_per_token: rows of windows, for the last ``window_tokens`` tokens at most.
    """

    constant_bytes: int = Field(ge=0)
    bytes_per_token: int = Field(ge=0)
    window_bytes_per_token: int = Field(0, ge=0)
    window_tokens: int = Field(0, ge=0)


class NodeInfo(Message):
    """``GET /v1/node``: what a node is. A new ``boot_id`` means that it restarted and forgot everything.

    Attributes:
        block_tokens: of its prefix cache; 0 if it keeps none.
        groups: the kinds of state that the model has, which a usable prefix must all have.
        kv_size: how large its KVCache is.
        profile: how fast it is, if that was measured.
        takes_prefixes: cached prefixes can be brought to it and from it (:mod:`prfaas_net.nodes.cache_messages`).
        convertible: it can take the other role while it serves (``POST /v1/role``).
        next_role: the role that it is about to take: it ends what it has, and meanwhile takes nothing new.
        draining: it ends what it has, takes nothing new, and leaves.
    """

    node_id: str
    boot_id: str
    cluster: str
    role: Literal["prefill", "decode"]
    model: str
    layout: str
    max_model_tokens: int
    vocab_size: int
    prefill_chunk_tokens: int
    block_tokens: int = Field(0, ge=0)
    groups: tuple[KvKind, ...] = ()
    kv_size: KvSizeModel | None = None
    profile: ProfileModel | None = None
    convertible: bool = False
    next_role: Literal["prefill", "decode"] | None = None
    draining: bool = False
    takes_prefixes: bool = False


class TransferReport(Message):
    """What a finished transfer cost, measured by the sender.

    Attributes:
        cached_tokens: of the prompt, found in the sender's prefix cache: not computed.
        held_tokens: of the prompt, whose rows the receiver held already: not sent.
        kv_bytes: what was sent, by kind of state.
        connections: data connections that carried at least one chunk.
        transfer_s: first chunk handed to a socket until the receiver confirmed the whole.
        exposed_s: end of prefill until that confirmation: what pipelining could not hide.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int = 0
    held_tokens: int = 0
    kv_bytes: dict[str, int]
    connections: int
    resent_chunks: int
    queued_s: float
    prefill_s: float
    transfer_s: float
    exposed_s: float
