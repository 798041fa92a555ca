"""What would go wrong, or is left open, in a configuration that can be read: errors and warnings, in one line each."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prfaas_net.config import is_loopback
from prfaas_net.errors import PrfaasError
from prfaas_net.fleetfile.schema import FleetFile, FleetNode
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.nodes.config import NodeConfig

__all__ = ["Finding", "of_file", "of_fleet", "of_gateway", "of_node"]


@dataclass(frozen=True)
class Finding:
    """One line for whoever wrote the configuration.

    Attributes:
        error: it cannot work like this; else it works, but perhaps not as meant.
    """

    error: bool
    text: str


def _warn(text: str) -> Finding:
    return Finding(False, text)


def of_file(path: Path, *, holds_secrets: bool) -> Iterator[Finding]:
    """Who else may read it."""
    mode = path.stat().st_mode
    if holds_secrets and mode & (stat.S_IRGRP | stat.S_IROTH):
        yield _warn(f"{path} holds secrets and others may read it: chmod 600, or give them by the environment")


def of_gateway(config: GatewayConfig) -> Iterator[Finding]:
    """Of one gateway, on this host."""
    serving = None if config.http.tls is None else config.http.tls.context
    yield from _tries(serving, config.fleet.tls.context)
    outside = not is_loopback(config.http.host)
    if outside and config.http.tls is None:
        yield _warn(
            f"API keys and prompts reach {config.http.host} in clear: set http.tls, or put a TLS proxy in front"
        )
    if any(section.key is not None for section in config.api_keys):
        yield _warn("an API key stands in the file itself: keep its hash instead (prfaas key new)")
    if config.api_keys and not any(section.admin for section in config.api_keys):
        yield _warn("no API key is an admin's: the configuration cannot be reloaded (admin = true)")
    for node in config.nodes:
        far = not is_loopback(_host(node.url))
        if far and node.url.startswith("http:"):
            yield _warn(f"prompts reach {node.url} in clear: set tls on the node, or use an encrypted network")


def of_node(config: NodeConfig) -> Iterator[Finding]:
    """Of one node, on this host."""
    security = config.kv.security()
    serving = None if config.tls is None else config.tls.context
    yield from _tries(serving, config.join.tls.context, lambda: (security.server, security.client))
    if config.profile is not None and not config.profile.exists():
        yield Finding(True, f"there is no profile {config.profile}")
    yield from _open_ports(config)
    if config.kv.gate is not None and config.role != "prefill" and not config.convertible:
        yield _warn("kv.gate is for nodes that prefill")
    if config.kv.dial and config.role != "decode" and not config.convertible:
        yield _warn("kv.dial is for nodes that decode")


def of_fleet(fleet: FleetFile) -> Iterator[Finding]:
    """Of all nodes together."""
    nodes = list(fleet.nodes.values())
    for node in nodes:
        yield from _open_ports(node, f"{node.node_id}: ")
    yield from _differing(nodes)
    yield from _places(nodes)
    clusters = {node.cluster for node in nodes} | {server.cluster for server in fleet.engines}
    for cluster in fleet.clusters:
        if cluster.name not in clusters and nodes:
            yield _warn(f"no node is in cluster {cluster.name}")
    if nodes and not fleet.engines and not fleet.gateway.get("join"):
        for role, some in (("prefill", any(n.prefills for n in nodes)), ("decode", any(n.decodes for n in nodes))):
            if not some:
                yield Finding(True, f"there is no {role} node, and none may join")
    yield from _links(fleet)


def _tries(*makers: Callable[[], object] | None) -> Iterator[Finding]:
    """Files that cannot be used."""
    for make in makers:
        if make is not None:
            try:
                make()
            except PrfaasError as error:
                yield Finding(True, error.line())


def _open_ports(node: NodeConfig, who: str = "") -> Iterator[Finding]:
    host = node.listen[0]
    if not is_loopback(host) and node.node_key is None:
        yield Finding(True, f"{who}will not listen on {host} without node_key")
    ports = [node.kv.listen] if node.role == "decode" or node.convertible else []
    for address in (*ports, *([node.kv.gate] if node.kv.gate else [])):
        if not is_loopback(address[0]) and not node.kv.security().authenticates:
            yield Finding(True, f"{who}will not take KVCache at {address[0]} without kv.shared_key or kv.tls")


def _differing(nodes: Sequence[FleetNode]) -> Iterator[Finding]:
    """What must be the same on all nodes."""
    same: dict[str, dict[str, object]] = {
        "model": {node.node_id: node.model for node in nodes},
        "kv_dtype": {node.node_id: node.kv_dtype for node in nodes},
        "cache.block_tokens": {node.node_id: node.cache.block_tokens for node in nodes},
    }
    for what, found in same.items():
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name}: {value}" for name, value in found.items())
            yield Finding(True, f"{what} is to be the same on every node ({told})")


def _places(nodes: Iterable[FleetNode]) -> Iterator[Finding]:
    """Ports that two nodes want."""
    taken: dict[tuple[str, int], str] = {}
    for node in nodes:
        for address in (node.listen, node.kv.listen, *([node.kv.gate] if node.kv.gate else [])):
            if not address[1]:
                continue
            other = taken.setdefault(address, node.node_id)
            if other != node.node_id and not is_loopback(address[0]):
                yield Finding(True, f"{other} and {node.node_id} both listen on {address[0]}:{address[1]}")


def _links(fleet: FleetFile) -> Iterator[Finding]:
    described = {(link.source, link.destination) for link in fleet.links}
    for link in fleet.links:
        if not fleet.pairs(link):
            yield _warn(f"link {link.name}: nobody sends over it (no node prefills there, or none decodes here)")
        elif link.budget is None:
            yield _warn(f"link {link.name} has no budget: it is not paced, and may crowd out what else uses it")
    used = {
        (sender.cluster, receiver.cluster)
        for sender in fleet.nodes.values()
        for receiver in fleet.nodes.values()
        if sender.prefills and receiver.decodes and sender.cluster != receiver.cluster
    }
    for source, destination in sorted(used - described):
        yield _warn(f"link {source} > {destination} is not described: it has no budget and is not paced ([[links]])")


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""
