"""What differs between engines that are not ours: their paths, their fields, their chunks. No I/O here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from prfaas_net.errors import PeerError, PrfaasError, ProtocolError
from prfaas_net.gateway.engines.scrape import MetricNames
from prfaas_net.gateway.engines.settings import EngineFields, EngineRole
from prfaas_net.gateway.request import ServingRequest
from prfaas_net.nodes.messages import LogprobsModel
from prfaas_net.scheduling import Alone

__all__ = ["Call", "Chunk", "Dialect", "Handover"]

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Call:
    """One POST.

    Attributes:
        streamed: whether the answer is server-sent events; else one JSON body.
        cancel: path and body of a call that ends this one; None where closing the connection does.
    """

    path: str
    body: dict[str, Any]
    streamed: bool = True
    cancel: tuple[str, dict[str, Any]] | None = None


@dataclass(frozen=True)
class Handover:
    """How a pair of servers serves a request.

    Attributes:
        prefill: what the prefill server is asked.
        decode: what the decode server is asked at the same time; None where it is asked with what the prefill's answer
            says (:meth:`Dialect.decode_after`).
    """

    prefill: Call
    decode: Call | None


@dataclass
class Chunk:
    """What one event of a stream says.

    Attributes:
        tokens: new ones, each with its log-probabilities where there are any.
        finish: why the last of them was the last.
        cached_tokens: of the prompt, found in the engine's cache; None where it does not say.
    """

    tokens: deque[tuple[int, LogprobsModel | None]] = field(default_factory=deque)
    finish: str | None = None
    cached_tokens: int | None = None


class Dialect(ABC):
    """One kind of engine.

    Attributes:
        metrics: its names for load.
        decodes_alone: whether a decode server computes prompts itself where it is not told of another.
        max_line_bytes: of one event.
        client_fields: fields of a client's body that are handed on as they are.
        role_path: where a server says what it was started for; empty where it does not.
    """

    metrics: ClassVar[MetricNames]
    decodes_alone: ClassVar[Alone]
    max_line_bytes: ClassVar[int] = 1 << 20
    role_path: ClassVar[str] = ""
    client_fields: ClassVar[frozenset[str]]

    def role_in(self, body: bytes) -> EngineRole | None:
        """What a server at :attr:`role_path` says; None if that cannot be read."""
        return None

    @abstractmethod
    def whole(self, request: ServingRequest, model: str) -> Call:
        """The request, served end to end."""

    @abstractmethod
    def pair(self, request: ServingRequest, model: str, prefill: EngineFields, deadline_s: float) -> Handover:
        """The request, its prompt computed on ``prefill``."""

    def decode_after(self, request: ServingRequest, model: str, answer: dict[str, Any]) -> Call:
        """What the decode server is asked after the prefill server has answered.

        Raises:
            ProtocolError: the answer lacks what that needs.
        """
        raise NotImplementedError

    @abstractmethod
    def chunk(self, event: dict[str, Any], request: ServingRequest, n_tokens: int) -> Chunk:
        """Read one event of a stream of which ``n_tokens`` tokens are known.

        Raises:
            PrfaasError: the engine reports a failure, or what cannot be read.
        """

    def check(self, answer: dict[str, Any], node: str) -> None:  # noqa: B027
        """Whether a prefill server that is asked at the same time as a decode server has done its part.

        Raises:
            PrfaasError: it has not, and says so.
        """

    def cached_in(self, answer: dict[str, Any]) -> int | None:
        """Prompt tokens found in the cache, as an answer's ``usage`` says; None where it does not."""
        usage = answer.get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if type(cached) is int and cached >= 0 else None


def finish_of(reason: object, node: str) -> str | None:
    """A finish reason that is one.

    Raises:
        PeerError: the engine gave the request up.
    """
    if reason is None or reason in FINISH_REASONS:
        return None if reason is None else str(reason)
    raise PeerError("the engine gave the request up", expected="stop or length", found=repr(reason)[:80], node=node)


def token_list(raw: object, what: str) -> Sequence[int]:
    """Token ids.

    Raises:
        ProtocolError: it is not a list of them.
    """
    if not isinstance(raw, list) or not all(type(token) is int and token >= 0 for token in raw):
        raise unreadable(what, raw)
    return raw


def unreadable(what: str, found: object) -> PrfaasError:
    """The error for what an engine should not have sent."""
    return ProtocolError("an engine sent what cannot be read", expected=what, found=repr(found)[:120])
