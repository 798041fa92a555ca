"""Configuration of a node: ``prfaas prefill --config node.toml``."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from prfaas_net.config import Address, Bytes, Duration, Rate, Section, is_loopback, split_list
from prfaas_net.errors import ConfigError
from prfaas_net.logs import LogSection
from prfaas_net.nodes.http_tls import ClientTlsSection, HttpTlsSection
from prfaas_net.nodes.urls import base_url
from prfaas_net.tracing.tracer import TracingSection
from prfaas_net.transport import LinkOptions, Security, TlsFiles
from prfaas_net.units import GiB, KiB, MiB

__all__ = ["CacheSection", "JoinSection", "KvSection", "NodeConfig", "TlsSection"]


class TlsSection(Section):
    """``[kv.tls]``: PEM files; with them every connection of the KV stream runs inside TLS 1.3.

    Attributes:
        certificate: this node's chain; ``key`` the private key to it.
        ca: the authority that signed the peers' certificates.
        server_name: what a dialled peer's certificate is made out to, if not the host that is dialled.
    """

    certificate: Path
    key: Path
    ca: Path
    server_name: str | None = None


class LinkSection(Section):
    """How links behave: all of a node's (``[kv]``), or those to one cluster (``[kv.links.NAME]``).

    Attributes:
        connections: data connections of a link.
        max_connections: a link may find out by itself how many carry most, up to this many.
        congestion_control: if left out, bbr between hosts where the host allows it.
        budget: egress budget of each link; without it the link is not paced.
        dscp: differentiated services code point.
        resume_window: how long a link that lost every connection may take to come back with its transfers.
        encode: let links compress KVCache where that is sooner than sending it as it is (thin links only).
    """

    connections: int = Field(4, ge=1, le=64)
    max_connections: int | None = Field(None, ge=1, le=64)
    congestion_control: str | None = None
    budget: Rate | None = Field(None, gt=0)
    notsent_lowat: Bytes = Field(256 * KiB, gt=0)
    dscp: int = Field(0, ge=0, le=63)
    sndbuf: Bytes | None = Field(None, gt=0)
    connect_timeout: Duration = Field(5.0, gt=0)
    resume_window: Duration = Field(5.0, ge=0)
    encode: bool = False


class KvSection(LinkSection):
    """``[kv]``: the KV stream.

    Attributes:
        listen: where a decode node takes KVCache, and a prefill node cached prefixes; port 0 picks one.
        advertise: what tickets name instead, by the cluster of the sender (``"*"``: any); for NAT, proxies and
            links that must be crossed at a certain place.
        gate: where a prefill node lets decode nodes dial in that it cannot dial itself.
        dial: the other end of that: gates that a decode node dials, by the cluster of the sender.
        arena: host memory for KVCache: landing on a decode node, being made on a prefill node.
        shared_key: authenticates senders and receivers to each other; at least 16 characters.
        tls: certificates, for authentication and secrecy.
        links: what is different on links to one cluster, by its name.
        local_addresses: to dial from in turn, on a host with several network cards.
        telemetry_log: a directory in which every link records what its sockets said (128 MiB a link at most).
    """

    listen: Address = ("127.0.0.1", 0)
    advertise: dict[str, Address] = Field(default_factory=dict)
    gate: Address | None = None
    dial: dict[str, tuple[Address, ...]] = Field(default_factory=dict)
    arena: Bytes = Field(256 * MiB, gt=0)
    shared_key: SecretStr | None = Field(None, min_length=16)
    tls: TlsSection | None = None
    links: dict[str, LinkSection] = Field(default_factory=dict)
    local_addresses: tuple[str, ...] = ()
    telemetry_log: Path | None = None
    max_chunk: Bytes = Field(4 * MiB, gt=0, le=16 * MiB)

    def security(self) -> Security:
        key = None if self.shared_key is None else self.shared_key.get_secret_value().encode()
        return Security(key, None if self.tls is None else TlsFiles(**dict(self.tls)))

    def endpoints(self, source_cluster: str, own: tuple[str, int]) -> list[tuple[str, int]]:
        """What tickets for senders of a cluster name; none where the link is dialled from here.

        Args:
            own: where this node listens.
        """
        if source_cluster in self.dial:
            return []
        return [self.advertise.get(source_cluster) or self.advertise.get("*") or own]

    def towards(self, cluster: str) -> KvSection:
        """As it is for links to one cluster."""
        own = self.links.get(cluster)
        changed = {} if own is None else {name: getattr(own, name) for name in own.model_fields_set}
        return self.model_copy(update=changed)

    def options(self, towards: str = "") -> LinkOptions:
        """Of links to a cluster, or to any that has no settings of its own."""
        link = self.towards(towards)
        return LinkOptions(
            connections=link.connections,
            max_connections=link.max_connections,
            congestion_control=link.congestion_control,
            budget_bps=link.budget,
            notsent_lowat_bytes=link.notsent_lowat,
            dscp=link.dscp,
            sndbuf_bytes=link.sndbuf,
            connect_timeout_s=link.connect_timeout,
            resume_window_s=link.resume_window,
            encode=link.encode,
            local_addresses=self.local_addresses,
            telemetry_log=self.telemetry_log,
        )


class CacheSection(Section):
    """``[cache]``: what is kept of prompts that were run; see docs/cache.md. It lives in ``kv.arena``.

    Attributes:
        enabled: without it every prompt is computed and sent whole.
        block_tokens: full-attention rows are kept in blocks of so many tokens; the same on every node.
        state_interval_tokens: window and linear state is kept at every so many tokens, besides at the ends of
            prompts and where they part; a multiple of ``block_tokens``; None: chosen from the model and the arena.
        share: whether cached prefixes are sent to and taken from other nodes. A node that serves beyond loopback takes
            part only where ``kv.listen`` is set.
        tier: a directory for a second copy that survives a restart.
        tier_size: how much of it may be used.
    """

    enabled: bool = True
    block_tokens: int = Field(256, ge=1, le=1 << 20)
    state_interval_tokens: int | None = Field(None, ge=1)
    share: bool = True
    tier: Path | None = None
    tier_size: Bytes = Field(4 * GiB, gt=0)

    @model_validator(mode="after")
    def _check(self) -> CacheSection:
        interval = self.state_interval_tokens
        if interval is not None and interval % self.block_tokens:
            raise ConfigError(
                "cache.state_interval_tokens is a whole number of blocks",
                expected=f"a multiple of {self.block_tokens}",
                found=interval,
            )
        return self


_Url = Annotated[str, AfterValidator(base_url)]


class JoinSection(Section):
    """``[join]``: gateways that the node makes itself known to.

    Attributes:
        gateways: their addresses; as text they are separated by commas.
        token: the same for all of them; ``prfaas key new --join`` makes one.
        url: of this node's control port as gateways can reach it; by default made from ``listen``.
        tls: for gateways whose url is https.
    """

    gateways: Annotated[tuple[_Url, ...], BeforeValidator(split_list)] = ()
    token: SecretStr | None = Field(None, min_length=16)
    url: _Url | None = None
    tls: ClientTlsSection = ClientTlsSection()

    @model_validator(mode="after")
    def _check(self) -> JoinSection:
        if self.gateways and self.token is None:
            raise ConfigError("join: gateways ask for a token", do="set join.token; prfaas key new --join makes one")
        return self


class NodeConfig(Section):
    """A prefill or decode node.

    Attributes:
        role: what it does; of a convertible node, what it does at first.
        convertible: it can take the other role while it serves (``prfaas pd``).
        node_id: a name, unique in the fleet.
        cluster: ``prfaas`` or ``pd`` by convention; links are between clusters.
        listen: the control port, for gateways.
        node_key: shared with the gateways; needed to listen on other than loopback addresses.
        model: a Hugging Face directory.
        profile: what ``python -m engine profile`` wrote: how fast this node is, for policies that predict. Without it
            they learn its pace from what it serves.
        prefill_pace: tokens a second that a prefill of the own engine runs at most: to rehearse slower hardware.
        kv_dtype: in which keys and values are kept and sent; the same on every node of a deployment.
        tls: certificates with which the control port is served.
        join: gateways to join, for those that do not list this node.
        drain_timeout: seconds that calls have to end when the node is told to leave (SIGTERM).
    """

    role: Literal["prefill", "decode"]
    convertible: bool = False
    node_id: str = Field(default_factory=platform.node, min_length=1, max_length=128)
    cluster: str = Field("pd", min_length=1, max_length=128)
    listen: Address = ("127.0.0.1", 0)
    node_key: SecretStr | None = Field(None, min_length=16)
    tls: HttpTlsSection | None = None
    join: JoinSection = JoinSection()
    model: str | None = None
    profile: Path | None = None
    prefill_chunk_tokens: int = Field(512, ge=1)
    prefill_pace: float | None = Field(None, gt=0)
    kv_dtype: Literal["float32", "bfloat16"] = "float32"
    drain_timeout: Duration = Field(30.0, ge=0)
    kv: KvSection = KvSection()
    cache: CacheSection = CacheSection()
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()

    @model_validator(mode="after")
    def _check(self) -> NodeConfig:
        host = self.listen[0]
        if self.join.gateways and self.join.url is None and host in ("0.0.0.0", "::"):
            raise ConfigError(
                "join: gateways cannot reach a node at the address that means all of them",
                found=host,
                do="set join.url to http://HOST:PORT as they can reach it",
            )
        return self

    @property
    def takes_prefixes(self) -> bool:
        """Whether cached prefixes can be brought here and from here: it prefills, and others can reach it."""
        reached = self.convertible or "listen" in self.kv.model_fields_set or is_loopback(self.listen[0])
        return self.cache.enabled and self.cache.share and reached and (self.role == "prefill" or self.convertible)

    def url_at(self, address: tuple[str, int]) -> str:
        """What gateways call this node by; ``address`` is where it listens."""
        if self.join.url is not None:
            return self.join.url
        host, port = address
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
