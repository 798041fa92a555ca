"""A gateway's configuration."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from prfaas_net.config import Bytes, Duration, Rate, Section, is_loopback, split_list
from prfaas_net.errors import ConfigError
from prfaas_net.gateway.engines.settings import EngineFields, check_together
from prfaas_net.gateway.keys import Key, KeyHash
from prfaas_net.gateway.planning_config import PlannerField, PlannerSection
from prfaas_net.logs import LogSection
from prfaas_net.nodes.http_site import HttpLimits
from prfaas_net.nodes.http_tls import ClientTlsSection, HttpTlsSection
from prfaas_net.nodes.urls import base_url
from prfaas_net.scheduling import DEFAULT_POLICY, ClusterKind, policy_names
from prfaas_net.tracing.tracer import TracingSection

__all__ = [
    "ApiKeySection",
    "ClusterSection",
    "FleetSection",
    "GatewayConfig",
    "HttpSection",
    "JoinSection",
    "LinkSection",
    "NodeSection",
]


def _api_key(raw: object) -> object:
    """A plain string is a key; one that looks like a hash is one."""
    if isinstance(raw, str):
        return {"hash" if raw.startswith(f"{KeyHash.SCHEME}:") else "key": raw}
    return raw


class ApiKeySection(Section):
    """``[[api_keys]]``: one client, or all who share a key. ``prfaas key new`` makes one.

    Attributes:
        name: shown in logs and in the records of requests; by default ``key-1`` and so on.
        hash: of the key.
        key: the key itself instead, for a first try: whoever reads the file has it.
        max_concurrent_requests: more than these with this key are answered 429.
        admin: it may also reload the configuration (``POST /v1/reload``).
    """

    name: str = Field("", max_length=64)
    hash: str | None = None
    key: SecretStr | None = None
    max_concurrent_requests: int | None = Field(None, ge=1)
    admin: bool = False

    @model_validator(mode="after")
    def _check(self) -> ApiKeySection:
        if (self.key is None) == (self.hash is None):
            raise ConfigError("api_keys: each has a hash, or else a key", do="make a key and its hash: prfaas key new")
        if self.key is not None and len(self.key.get_secret_value()) < 8:
            raise ConfigError("api_keys: a key is too short", expected="at least 8 characters")
        if self.hash is not None:
            KeyHash.parse(self.hash)
        return self

    def holder(self, number: int) -> Key:
        """The key as it is checked; ``number`` is its place in the list."""
        stored = KeyHash.parse(self.hash) if self.hash else KeyHash.of(self.key.get_secret_value() if self.key else "")
        return Key(self.name or f"key-{number}", stored, self.max_concurrent_requests, self.admin)


_ApiKey = Annotated[ApiKeySection, BeforeValidator(_api_key)]


class HttpSection(Section):
    """Where the gateway listens.

    Attributes:
        port: 0 takes any free one.
        body_timeout: seconds that a client may take to send its body.
        header_timeout: seconds from connecting, or from the last answer, in which a client must have sent the headers
            of a request; then its connection is closed.
        max_header: bytes of one header, or of the request line.
        tls: certificates with which HTTPS is served.
    """

    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)
    body_timeout: Duration = Field(30.0, gt=0)
    header_timeout: Duration = Field(75.0, gt=0)
    max_header: Bytes = Field(8190, ge=256, le=1 << 20)
    tls: HttpTlsSection | None = None

    @property
    def limits(self) -> HttpLimits:
        return HttpLimits(self.max_header, self.header_timeout)


class NodeSection(EngineFields):
    """A prefill or decode node, or a vLLM or SGLang server, by the address of its HTTP endpoint."""

    url: Annotated[str, AfterValidator(base_url)]


class ClusterSection(Section):
    """What a cluster is for. Without it, a cluster is a PD cluster if one of its nodes decodes."""

    name: str
    kind: ClusterKind


class LinkSection(Section):
    """``[[links]]``: what KVCache may use of all that is sent from one cluster to another.

    Nodes of ours tell more of their links, once they have some; servers of other kinds tell nothing.
    """

    source: str = Field(alias="from", min_length=1)
    destination: str = Field(alias="to", min_length=1)
    budget: Rate = Field(gt=0)


class FleetSection(Section):
    """How nodes are watched.

    Attributes:
        poll_interval: seconds between two questions to a node that is up; a node that is down is asked four
            times as often.
        poll_timeout: seconds that an answer may take.
        down_after: failures in a row until a node gets no new work.
        up_after: answers in a row until a node that was down gets work again.
        follow_state: whether the nodes' queues and links are followed; without it the router knows of a queue only what
            it gave to it, and of a link only how late what crossed it was.
        tls: for nodes whose url is https: who signed their certificates, and what is shown to them.
    """

    poll_interval: Duration = 1.0
    poll_timeout: Duration = 2.0
    down_after: int = Field(3, ge=1)
    up_after: int = Field(2, ge=1)
    follow_state: bool = True
    tls: ClientTlsSection = ClientTlsSection()


class JoinSection(Section):
    """``[join]``: nodes may join by themselves.

    Attributes:
        token_hash: of the token that they must send; ``prfaas key new --join`` makes one.
        lease: seconds that a node belongs to the fleet without asking again.
        max_nodes: that may have joined at a time.
    """

    token_hash: str
    lease: Duration = Field(15.0, ge=0.1, le=3600)
    max_nodes: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _check(self) -> JoinSection:
        KeyHash.parse(self.token_hash)
        return self


class GatewayConfig(Section):
    """Everything that a gateway is told at its start.

    Attributes:
        model: the name under which clients ask for the model.
        policy: how requests are routed; see :func:`prfaas_net.scheduling.policy_names`. Where ``threshold_tokens`` is
            set and this is not, ``threshold``.
        threshold_tokens: ``t``: a longer incremental prefill goes to a PrfaaS cluster (policy ``threshold``).
        policy_seed: seeds policy ``random``.
        link_patience: seconds that a KVCache may take longer over a link than its prompt at home, before the link is
            refused (policy ``earliest-finish``, which otherwise bears 20 s).
        request_deadline: seconds from arrival in which a request ends, in an answer or in an error.
        ttft_limit: seconds; a request whose first token is predicted later is answered 429 at once. Without it,
            requests wait until their deadline.
        drain_timeout: seconds that requests have to end when the gateway is told to leave (SIGTERM).
        max_body: bytes of a request body.
        max_prompt_tokens: longer prompts are refused, however long the nodes would take; None: only those.
        max_concurrent_requests: more than these are answered 429.
        chat_max_tokens: what a chat request that names no bound may generate.
        api_keys: clients must send one of these as a bearer token; required off loopback. As text they are separated by
            commas.
        node_key: secret shared with the nodes.
        join: whether nodes may join by themselves, beside those that are listed.
        planner: what the long-timescale planner may do: ``"off"``, ``"advise"``, ``"act"``, or a table.
    """

    http: HttpSection = HttpSection()
    model: str = Field(min_length=1)
    policy: str = DEFAULT_POLICY
    threshold_tokens: int = Field(2048, ge=0)
    policy_seed: int = 0
    link_patience: Duration | None = Field(None, ge=0)
    request_deadline: Duration = Field(600.0, gt=0, le=86400)
    ttft_limit: Duration | None = Field(None, gt=0)
    drain_timeout: Duration = Field(30.0, ge=0, le=86400)
    max_body: Bytes = Field(32 << 20, ge=1)
    max_prompt_tokens: int | None = Field(None, ge=1)
    max_concurrent_requests: int = Field(1024, ge=1)
    chat_max_tokens: int = Field(256, ge=1)
    api_keys: Annotated[tuple[_ApiKey, ...], BeforeValidator(split_list)] = ()
    node_key: SecretStr | None = None
    nodes: tuple[NodeSection, ...] = ()
    clusters: tuple[ClusterSection, ...] = ()
    links: tuple[LinkSection, ...] = ()
    join: JoinSection | None = None
    planner: PlannerField = PlannerSection()
    fleet: FleetSection = FleetSection()
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()

    @model_validator(mode="before")
    @classmethod
    def _threshold_is_meant(cls, raw: Any) -> Any:
        named = isinstance(raw, dict) and "threshold_tokens" in raw and "policy" not in raw
        return {**raw, "policy": "threshold"} if named else raw

    @model_validator(mode="after")
    def _check(self) -> GatewayConfig:
        # ConfigError passes through pydantic as it is; a ValueError would be reported with the whole table,
        # keys included.
        if not is_loopback(self.http.host) and not self.api_keys:
            raise ConfigError(
                f"refusing to serve {self.http.host} without api_keys",
                expected="a loopback address, or at least one key that clients must send",
                do="set api_keys, or http.host to 127.0.0.1",
            )
        if self.node_key is not None and len(self.node_key.get_secret_value()) < 8:
            raise ConfigError("node_key is too short", expected="at least 8 characters")
        if self.policy not in policy_names():
            raise ConfigError("unknown policy", expected=f"one of {', '.join(policy_names())}", found=repr(self.policy))
        urls = [node.url for node in self.nodes]
        if not urls and self.join is None:
            raise ConfigError(
                "a gateway needs nodes", do='add [[nodes]] with url = "http://HOST:PORT", or let them join: [join]'
            )
        check_together([(urlsplit(node.url).netloc, node) for node in self.nodes])
        names: dict[str, list[str]] = {"nodes": urls, "clusters": [cluster.name for cluster in self.clusters]}
        names["api_keys"] = [key.name for key in self.holders]
        for kind, listed in names.items():
            twice = sorted({name for name in listed if listed.count(name) > 1})
            if twice:
                raise ConfigError(f"{kind}: listed twice", found=", ".join(twice))
        return self

    @property
    def holders(self) -> tuple[Key, ...]:
        """The API keys, as they are checked."""
        return tuple(section.holder(number) for number, section in enumerate(self.api_keys, start=1))
