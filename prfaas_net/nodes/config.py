"""Configuration of a node: ``prfaas prefill --config node.toml``."""

from __future__ import annotations

import platform
from typing import Literal

from pydantic import Field, SecretStr

from prfaas_net.config import Address, Bytes, Duration, Rate, Section
from prfaas_net.transport.options import LinkOptions
from prfaas_net.units import KiB, MiB

__all__ = ["KvSection", "NodeConfig"]


class KvSection(Section):
    """``[kv]``: the KV stream.

    Attributes:
        listen: where a decode node takes KVCache; port 0 picks one.
        advertise: what tickets name instead, by the cluster of the sender (``"*"``: any); for NAT, proxies and
            links that must be crossed at a certain place.
        arena: host memory for KVCache: landing on a decode node, being made on a prefill node.
        shared_key: authenticates senders and receivers to each other; at least 16 characters.
        budget: egress budget of each link; without it the link is not paced.
    """

    listen: Address = ("127.0.0.1", 0)
    advertise: dict[str, Address] = Field(default_factory=dict)
    arena: Bytes = Field(256 * MiB, gt=0)
    shared_key: SecretStr | None = Field(None, min_length=16)
    connections: int = Field(4, ge=1, le=64)
    congestion_control: str | None = None
    budget: Rate | None = Field(None, gt=0)
    notsent_lowat: Bytes = Field(256 * KiB, gt=0)
    dscp: int = Field(0, ge=0, le=63)
    sndbuf: Bytes | None = Field(None, gt=0)
    connect_timeout: Duration = Field(5.0, gt=0)
    max_chunk: Bytes = Field(4 * MiB, gt=0, le=16 * MiB)

    def key(self) -> bytes | None:
        return None if self.shared_key is None else self.shared_key.get_secret_value().encode()

    def options(self) -> LinkOptions:
        return LinkOptions(
            connections=self.connections,
            congestion_control=self.congestion_control,
            budget_bps=self.budget,
            notsent_lowat_bytes=self.notsent_lowat,
            dscp=self.dscp,
            sndbuf_bytes=self.sndbuf,
            connect_timeout_s=self.connect_timeout,
        )


class NodeConfig(Section):
    """A prefill or decode node.

    Attributes:
        node_id: a name, unique in the fleet.
        cluster: ``prfaas`` or ``pd`` by convention; links are between clusters.
        listen: the control port, for gateways.
        node_key: shared with the gateways; needed to listen on other than loopback addresses.
        model: a Hugging Face directory.
    """

    role: Literal["prefill", "decode"]
    node_id: str = Field(default_factory=platform.node, min_length=1, max_length=128)
    cluster: str = Field("pd", min_length=1, max_length=128)
    listen: Address = ("127.0.0.1", 0)
    node_key: SecretStr | None = Field(None, min_length=16)
    model: str | None = None
    prefill_chunk_tokens: int = Field(512, ge=1)
    kv: KvSection = KvSection()
