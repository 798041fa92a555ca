"""What clients send: bodies of ``/v1/completions`` and ``/v1/chat/completions``, checked and made one.

Fields that are not known pass. Fields that are known and would change the answer in a way that is not there yet are
refused by name: an answer never looks as if it had honoured what it ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prfaas_net.gateway.api_errors import ApiError
from prfaas_net.nodes.engine_api import Sampling
from prfaas_net.nodes.messages import MAX_BIASES, MAX_LOGPROBS, MAX_SALT_CHARS

__all__ = [
    "ChatBody",
    "CompletionBody",
    "Options",
    "StreamOptions",
    "fields_of",
    "messages_of",
    "parse_body",
    "prompt_of",
]

# Each choice is a run of its own on the decode nodes.
MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
# What OpenAI gives a completion that names no bound.
COMPLETION_MAX_TOKENS = 16
# OpenAI's bound on a bias; it closes a token, or forces it.
MAX_BIAS = 100.0
# Far above any model's context; keeps sums of token counts in machine integers.
MAX_TOKENS = 1 << 24
ROLES = ("system", "developer", "user", "assistant", "tool")

# Values with which an unsupported field means nothing. Clients send many of these as they are.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Options(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Any = None
    stop: Any = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    explain: bool | None = None
    return_token_ids: bool | None = None
    # vLLM's: prompts with different salts share no cached state.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @property
    def token_bound(self) -> int | None:
        """Most tokens to generate, as the client asked."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def stop_strings(self) -> tuple[str, ...]:
        """``stop``, as a tuple.

        Raises:
            ApiError: it is neither a string nor a short list of strings.
        """
        if self.stop is None:
            return ()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        fits = isinstance(stops, list) and len(stops) <= MAX_STOP_STRINGS
        if not fits or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stops):
            raise ApiError(
                "stop does not fit",
                param="stop",
                expected=f"a string or up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters",
                found=repr(self.stop)[:80],
            )
        return tuple(stops)

    @property
    def n_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each chosen one; None tells nothing."""
        raise NotImplementedError

    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias``, as pairs.

        Raises:
            ApiError: it is not an object of biases by token id.
        """
        raw = {} if self.logit_bias is None else self.logit_bias
        fits = isinstance(raw, dict) and len(raw) <= MAX_BIASES
        for token, bias in raw.items() if fits else ():
            number = isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= MAX_BIAS
            fits = fits and number and token.isascii() and token.isdecimal() and len(token) < 10
        if not fits:
            raise ApiError(
                "logit_bias does not fit",
                param="logit_bias",
                expected=f"up to {MAX_BIASES} numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}, by token id",
                found=repr(self.logit_bias)[:80],
            )
        return tuple((int(token), float(bias)) for token, bias in raw.items())

    def sampling(self, max_tokens: int, random_seed: int) -> Sampling:
        """How tokens are chosen; ``random_seed`` is taken where the client gave none."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=(random_seed if self.seed is None else self.seed) % (1 << 64),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens or 0, max_tokens),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.biases(),
            logprobs=self.n_logprobs,
        )


class CompletionBody(Options):
    """Body of ``POST /v1/completions``."""

    prompt: Any = None
    logprobs: TopLogprobs | None = None

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        """Chat's way to want none."""
        return None if value is False else value

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Options):
    """Body of ``POST /v1/chat/completions``."""

    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def n_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


_Body = TypeVar("_Body", bound=Options)


def parse_body(raw: bytes, model: type[_Body]) -> _Body:
    """Bytes to a checked body.

    Raises:
        ApiError: malformed JSON, a field of the wrong type or out of range, or one that is not supported.
    """
    try:
        tree = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError("the body is not valid JSON", found=str(error), api_code="malformed_json") from error
    if not isinstance(tree, dict):
        raise ApiError("the body is not a JSON object", expected="an object", found=type(tree).__name__)
    for name, neutral in _NEUTRAL.items():
        value = tree.get(name)
        if value is not None and value not in neutral:
            raise ApiError(
                f"{name} is not supported yet",
                param=name,
                api_code="unsupported_parameter",
                found=repr(value)[:80],
                do=f"leave {name} out",
            )
    try:
        body = model.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise ApiError(
            f"{field}: {first['msg']}", param=field, api_code="invalid_value", found=repr(first["input"])[:80]
        ) from error
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    return body


def fields_of(raw: bytes, names: frozenset[str]) -> dict[str, Any]:
    """Of a body that was parsed before, the fields of these names that say something."""
    if not names:
        return {}
    tree = orjson.loads(raw)
    return {name: tree[name] for name in sorted(names & tree.keys()) if tree[name] is not None}


def prompt_of(raw: Any) -> str | list[int]:
    """``prompt`` of a completion: text or token ids, alone or in a list of one.

    Raises:
        ApiError: it is empty, of another type, or more than one prompt.
    """
    if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], (str, list)):
        raw = raw[0]
    if isinstance(raw, list) and raw and isinstance(raw[0], (str, list)):
        raise ApiError("one prompt at a time", param="prompt", expected="one prompt", found=f"{len(raw)} prompts")
    if raw is None or raw in ("", []):
        raise ApiError("the prompt is empty", param="prompt", expected="at least one token", api_code="empty_prompt")
    if isinstance(raw, str):
        return raw
    # bool is an int to isinstance; a set of types over the list is also the fastest check.
    if not isinstance(raw, list) or set(map(type, raw)) != {int}:
        found = "a list of mixed types" if isinstance(raw, list) else type(raw).__name__
        raise ApiError("prompt does not fit", param="prompt", expected="a string or a list of token ids", found=found)
    return raw


def messages_of(raw: Any) -> list[dict[str, str]]:
    """``messages`` of a chat, each with plain text content.

    Raises:
        ApiError: a message is not as expected; ``param`` names the place.
    """
    if not isinstance(raw, list) or not raw:
        raise ApiError("messages does not fit", param="messages", expected="at least one message", found=repr(raw)[:80])
    messages = []
    for index, message in enumerate(raw):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ApiError(f"{place} does not fit", param=place, expected="an object", found=repr(message)[:80])
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(
                f"{place}.role does not fit",
                param=f"{place}.role",
                expected=f"one of {', '.join(ROLES)}",
                found=repr(role)[:80],
            )
        # Chat templates know "system"; "developer" is its newer name.
        name = "system" if role == "developer" else role
        messages.append({"role": name, "content": _content(message.get("content"), f"{place}.content")})
    if not any(message["content"] for message in messages):
        raise ApiError("the prompt is empty", param="messages", expected="some text", api_code="empty_prompt")
    return messages


def _content(raw: Any, place: str) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise ApiError(
            f"{place} does not fit", param=place, expected="a string or a list of parts", found=type(raw).__name__
        )
    texts = []
    for index, part in enumerate(raw):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ApiError(
                f"{place}[{index}] does not fit",
                param=f"{place}[{index}]",
                expected='{"type": "text", "text": ...}',
                found=repr(part)[:80],
            )
        texts.append(text)
    return "".join(texts)
