"""Where a vLLM or SGLang server publishes what it caches, as a configuration describes it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from prfaas_net.cache.engine_events_mirror import EngineGroup
from prfaas_net.config import Duration, Section
from prfaas_net.errors import ConfigError
from prfaas_net.kv import KvKind

__all__ = ["KvEventsSection", "KvGroupSection", "endpoint_alone"]

MAX_DP_RANKS = 1024


class KvGroupSection(Section):
    """One group of layers of a hybrid model, by the number that vLLM gives it.

    Attributes:
        kind: ``full``, ``window`` or ``linear``.
        window_tokens: for ``window``.
    """

    group: int = Field(ge=0)
    kind: KvKind
    window_tokens: int = Field(0, ge=0)


def endpoint_alone(raw: Any) -> Any:
    """An endpoint alone stands for a table with nothing else in it."""
    return {"endpoint": raw} if isinstance(raw, str) else raw


class KvEventsSection(Section):
    """Where a server publishes what it caches (docs/kv_events.md).

    Attributes:
        endpoint: of its PUB socket; of rank 0 where there are several.
        replay_endpoint: of its ROUTER socket; without one a gap costs everything that is known of the server.
        topic: what its topics begin with.
        block_tokens: the server's own block size, or a multiple of it; the same for all servers of a gateway.
        dp_ranks: data-parallel ranks behind this address; each publishes on a port of its own, counted up.
        groups: of a hybrid model, all of them; by default one of full attention.
        reply: seconds that connecting, and each answer of a replay, may take.
        silence: seconds without a batch after which the buffer is asked for more.
    """

    endpoint: str = Field(min_length=1)
    replay_endpoint: str = ""
    topic: str = ""
    block_tokens: int = Field(16, ge=1, le=1 << 16)
    dp_ranks: int = Field(1, ge=1, le=MAX_DP_RANKS)
    groups: tuple[KvGroupSection, ...] = ()
    reply: Duration = Field(5.0, gt=0)
    silence: Duration = Field(5.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> KvEventsSection:
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint and not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
                raise ConfigError(f"kv_events.{name}: not an address", expected="tcp://HOST:PORT", found=repr(endpoint))
            if endpoint and self.dp_ranks > 1 and _port_of(endpoint) is None:
                raise ConfigError(
                    f"kv_events.{name}: has no port to count up from",
                    expected="tcp://HOST:PORT, of rank 0",
                    found=repr(endpoint),
                )
        return self

    def endpoints_of(self, rank: int) -> tuple[str, str]:
        """Where one rank publishes and replays: vLLM and SGLang add the rank to both ports."""
        return _counted_up(self.endpoint, rank), _counted_up(self.replay_endpoint, rank)

    def engine_groups(self) -> dict[int, EngineGroup]:
        """For the mirror."""
        if not self.groups:
            return {0: EngineGroup(KvKind.FULL)}
        return {section.group: EngineGroup(section.kind, section.window_tokens) for section in self.groups}


def _port_of(endpoint: str) -> int | None:
    try:
        return urlsplit(endpoint).port if endpoint.startswith("tcp://") else None
    except ValueError:
        return None


def _counted_up(endpoint: str, rank: int) -> str:
    port = _port_of(endpoint)
    return endpoint if port is None or rank == 0 else f"{endpoint.rpartition(':')[0]}:{port + rank}"
