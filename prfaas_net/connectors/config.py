"""Configuration of a connector: ``kv_connector_extra_config`` of the engine."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from pydantic import Field, SecretStr

from prfaas_net.config import Address, Bytes, Duration, Section, load_config
from prfaas_net.errors import ConfigError
from prfaas_net.nodes.config import KvSection
from prfaas_net.units import MiB

__all__ = ["ConnectorConfig", "check_engine", "read_config"]

# Addresses to listen on that are nobody's to dial.
WILDCARDS = ("0.0.0.0", "::")


class ConnectorConfig(Section):
    """
    Attributes:
        listen: where a prefill server takes tickets (HTTP); each tensor-parallel rank adds its number to the port.
        advertise: what its answers name instead, behind a NAT or a relay.
        node_key: shared by all servers of a deployment; needed to listen on other than loopback addresses.
        cluster: the site, for ``kv.advertise`` and ``kv.dial`` of the other side.
        deadline: of a load, and of a finished prompt that nobody takes.
        pairing: how long a ticket may wait for its prompt to reach the prefill server.
        chunk_tokens: a chunk has at most so many tokens of one layer,
        chunk: and so many bytes.
        weights: names the checkpoint, instead of a digest of its files.
        kv: the KV stream, as of a node; see docs/operate.md. ``kv.arena`` is the memory that KVCache passes through on
            its way out and in; it bounds what is under way at a time.
    """

    listen: Address = ("127.0.0.1", 14579)
    advertise: Address | None = None
    node_id: str = Field(default_factory=platform.node, min_length=1, max_length=128)
    node_key: SecretStr | None = Field(None, min_length=16)
    cluster: str = Field("pd", min_length=1, max_length=128)
    deadline: Duration = Field(60.0, gt=0)
    pairing: Duration = Field(10.0, gt=0)
    chunk_tokens: int = Field(512, ge=1)
    chunk: Bytes = Field(MiB, gt=0, le=16 * MiB)
    weights: str | None = None
    kv: KvSection = KvSection()


def read_config(extra: Mapping[str, Any], *, default_port: int) -> ConnectorConfig:
    """
    Args:
        default_port: the engine's own setting for a connector's port.

    Raises:
        ConfigError: a key is unknown or a value does not fit; names it.
    """
    try:
        flags = {"listen": ("127.0.0.1", default_port), **extra}
        return load_config(ConnectorConfig, flags=flags, env_prefix="PRFAAS_VLLM__")
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error.line()}") from error


def check_engine(
    config: ConnectorConfig, role: str, *, pipeline_ranks: int, context_ranks: int, state_mode: str
) -> None:
    """Settings of the engine that cannot work, found at its start and not at the first request.

    Args:
        role: the engine's ``kv_role``.
        state_mode: how it keeps recurrent state (vLLM's ``mamba_cache_mode``).

    Raises:
        ConfigError: names the setting and what to change.
    """
    for name, ranks in (("pipeline-parallel-size", pipeline_ranks), ("decode-context-parallel-size", context_ranks)):
        if ranks > 1:
            raise ConfigError(f"PrfaasConnector does not know --{name}", expected=1, found=ranks, do="leave it at 1")
    if state_mode == "all":
        raise ConfigError(
            "PrfaasConnector carries one recurrent state a request", expected="--mamba-cache-mode none or align",
            found="all", do="start with --mamba-cache-mode align",
        )  # fmt: skip
    if role != "kv_consumer" and config.listen[0] in WILDCARDS and config.advertise is None:
        raise ConfigError(
            "listen is a wildcard, which no decode server can be told to dial", found=config.listen[0],
            do="set advertise to HOST:PORT of this server as the other site sees it",
        )  # fmt: skip
