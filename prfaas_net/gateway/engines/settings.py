"""``[[nodes]]`` that are not ours: vLLM and SGLang servers, as a configuration describes them.

Such a server does not say what it is for, in which cluster it stands and what it is called; the configuration does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from prfaas_net.config import Address, Duration, Section
from prfaas_net.errors import ConfigError
from prfaas_net.gateway.engines.event_settings import KvEventsSection, endpoint_alone

__all__ = ["EngineFields", "EngineKind", "EngineRole", "check_together"]


class EngineKind(StrEnum):
    """What answers at a node's address."""

    PRFAAS = "prfaas"  # prfaas prefill, prfaas decode
    VLLM = "vllm"
    SGLANG = "sglang"


class EngineRole(StrEnum):
    """What a server was started for."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"  # serves requests end to end


class EngineFields(Section):
    """What only servers that are not ours need to be told.

    Attributes:
        kind: ``prfaas`` (our own nodes, which say all of this themselves), ``vllm`` or ``sglang``.
        role: ``prefill``, ``decode``, or ``both``: serves requests end to end.
        cluster: where it stands.
        name: in logs, metrics and records; by default host and port.
        model: its name there; by default the only one that it serves.
        max_model_tokens: longest prompt plus output; by default what the server says.
        api_key: that the server asks for.
        connector: vLLM prefill servers with our KV connector: where that takes tickets (its ``listen`` or
            ``advertise``). Prefill and decode then begin in the same moment. Without it the decode server is asked
            after the prefill server, with what that answers.
        bootstrap: SGLang prefill servers: where their bootstrap server listens.
        computes_prompts: vLLM decode servers: whether they compute prompts themselves where their cluster has no
            prefill server: short ones, and any where nobody else can. Without it such a request is refused.
        stall_timeout: seconds without a token, after the first one, until a server counts as hung.
        kv_events: where it publishes what it caches.
    """

    kind: EngineKind = EngineKind.PRFAAS
    role: EngineRole | None = None
    cluster: str = ""
    name: str = ""
    model: str = ""
    max_model_tokens: int | None = Field(None, ge=1)
    api_key: SecretStr | None = None
    connector: Address | None = None
    bootstrap: Address | None = None
    computes_prompts: bool = True
    stall_timeout: Duration = Field(60.0, gt=0)
    kv_events: Annotated[KvEventsSection | None, BeforeValidator(endpoint_alone)] = None

    @model_validator(mode="after")
    def _check_engine(self) -> EngineFields:
        if self.kind is EngineKind.PRFAAS:
            told = sorted(self.model_fields_set & set(EngineFields.model_fields) - {"kind"})
            if told:
                raise ConfigError(
                    f"nodes: {', '.join(told)} cannot be told of a node of kind prfaas",
                    expected="a node says itself what it is",
                    do='leave it out, or set kind = "vllm" or "sglang"',
                )
            return self
        if self.role is None or not self.cluster:
            raise ConfigError(
                f"nodes: a {self.kind.value} server does not say what it is for",
                expected='role = "prefill", "decode" or "both", and cluster = "NAME"',
                found=f"role {self.role.value if self.role else 'missing'}, cluster {self.cluster or 'missing'}",
            )
        if "#" in self.name:
            raise ConfigError("nodes: a name has no '#'", found=repr(self.name))
        prefills = self.role is EngineRole.PREFILL
        for name, kind in (("connector", EngineKind.VLLM), ("bootstrap", EngineKind.SGLANG)):
            if getattr(self, name) is not None and not (prefills and self.kind is kind):
                raise ConfigError(f"nodes: {name} is for {kind.value} servers of role prefill alone")
        if not self.computes_prompts and not (self.role is EngineRole.DECODE and self.kind is EngineKind.VLLM):
            raise ConfigError("nodes: computes_prompts is for vllm servers of role decode alone")
        if prefills and self.kind is EngineKind.SGLANG and self.bootstrap is None:
            raise ConfigError(
                "nodes: decode servers find an SGLang prefill server by its bootstrap server",
                expected='bootstrap = "HOST:PORT"',
                do="set it to the server's --disaggregation-bootstrap-port (8998 by default)",
            )
        return self


def check_together(nodes: Sequence[tuple[str, EngineFields]]) -> None:
    """Whether these can share a gateway.

    Args:
        nodes: each with the name that it has without one of its own.

    Raises:
        ConfigError: they cannot.
    """
    kinds = sorted({node.kind.value for _, node in nodes})
    if len(kinds) > 1:
        raise ConfigError(
            "nodes: all nodes of a gateway are of one kind, or they could not exchange KVCache",
            found=", ".join(kinds),
            do="run a gateway for each kind",
        )
    names = [node.name or place for place, node in nodes if node.kind is not EngineKind.PRFAAS]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("nodes: two servers have one name", found=", ".join(twice), do="give each its own name")
    events = [node.kv_events for _, node in nodes if node.kv_events is not None]
    if len({(one.block_tokens, frozenset(group.kind for group in one.groups)) for one in events}) > 1:
        raise ConfigError(
            "nodes: kv_events differ from one server to another",
            expected="the same block_tokens and the same kinds of groups for all servers of a gateway",
        )
