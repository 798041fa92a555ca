"""A configuration in words: what will listen where, who talks to whom, over which links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prfaas_net.fleetfile.findings import Finding
from prfaas_net.fleetfile.schema import FleetFile, FleetLink
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.nodes.config import LinkSection, NodeConfig
from prfaas_net.units import format_bytes, format_duration, format_rate

__all__ = ["describe_fleet", "describe_gateway", "describe_node", "verdict"]


def describe_gateway(config: GatewayConfig) -> Iterator[str]:
    """One gateway."""
    scheme = "http" if config.http.tls is None else "https"
    yield "gateway"
    yield f"  listens      {scheme}://{config.http.host}:{config.http.port}, model {config.model!r}"
    keys = [f"{key.name}{' (admin)' if key.admin else ''}" for key in config.holders]
    yield f"  lets in      {'whoever has a key of ' + ', '.join(keys) if keys else 'everybody on this host'}"
    threshold = f", t = {config.threshold_tokens:,} tokens" if config.policy == "threshold" else ""
    yield f"  routes       policy {config.policy}{threshold}"
    longest = "" if config.max_prompt_tokens is None else f", prompts of {config.max_prompt_tokens:,} tokens"
    yield (
        f"  at most      {config.max_concurrent_requests:,} requests at a time, "
        f"bodies of {format_bytes(config.max_body)}{longest}, {format_duration(config.request_deadline)} each"
    )
    yield f"  asks         {len(config.nodes)} nodes, every {format_duration(config.fleet.poll_interval)}:"
    yield from (f"    {node.url}" for node in config.nodes)
    if config.join is not None:
        lease = format_duration(config.join.lease)
        yield f"  lets join    up to {config.join.max_nodes:,} nodes with the token, for {lease} at a time"


def describe_node(config: NodeConfig) -> Iterator[str]:
    """One node."""
    yield f"{'pd' if config.convertible else config.role} node {config.node_id} of cluster {config.cluster}"
    scheme = "http" if config.tls is None else "https"
    guard = "with the node key" if config.node_key is not None else "to everybody on this host"
    yield f"  listens      {scheme}://{config.listen[0]}:{config.listen[1]}, open {guard}"
    if config.role == "decode" or config.convertible:
        yield f"  takes KVCache at {config.kv.listen[0]}:{config.kv.listen[1]}, {_secured(config)}"
        yield from (f"    from {name}: {host}:{port}" for name, (host, port) in config.kv.advertise.items())
        for name, gates in config.kv.dial.items():
            yield f"  dials        {name} at {', '.join(f'{host}:{port}' for host, port in gates)}"
    if config.role == "prefill" or config.convertible:
        yield f"  sends KVCache {_secured(config)}, {_paced(config.kv)}"
        yield from (f"    to {name}: {_paced(config.kv.towards(name))}" for name in config.kv.links)
        if config.kv.gate is not None:
            yield f"  lets dial in {config.kv.gate[0]}:{config.kv.gate[1]}"
    yield f"  keeps        {format_bytes(config.kv.arena)} of KVCache in memory, as {config.kv_dtype}"
    if config.cache.tier is not None:
        yield f"               {format_bytes(config.cache.tier_size)} in {config.cache.tier}"
    if config.join.gateways:
        yield f"  joins        {', '.join(config.join.gateways)}"


def describe_fleet(fleet: FleetFile) -> Iterator[str]:
    """The whole fleet, in short; the daemon that is checked is described by itself."""
    clusters = sorted({node.cluster for node in fleet.nodes.values()} | {server.cluster for server in fleet.engines})
    kinds = {cluster.name: cluster.kind.value for cluster in fleet.clusters}
    yield f"fleet of {len(fleet.nodes) + len(fleet.engines)} nodes in {len(clusters)} clusters"
    for cluster in clusters:
        kind = f" ({kinds[cluster]})" if cluster in kinds else ""
        yield f"  {cluster}{kind}"
        for node in fleet.nodes.values():
            if node.cluster == cluster:
                role = "pd" if node.convertible else node.role
                yield f"    {node.node_id:<20} {role:<8} {node.url or node.url_at(node.listen)}"
        for server in fleet.engines:
            if server.cluster == cluster:
                does = server.role.value if server.role else ""
                yield f"    {server.name or server.url:<20} {does:<8} {server.url} ({server.kind.value})"
    for link in fleet.links:
        yield f"  link {link.name}: {_link(fleet, link)}"


def verdict(findings: Iterable[Finding]) -> Iterator[str]:
    """Errors and warnings, and what they come to."""
    found = list(findings)
    for finding in found:
        yield f"{'error' if finding.error else 'warning'}: {finding.text}"
    errors = sum(finding.error for finding in found)
    yield f"{errors} errors, {len(found) - errors} warnings"


def _link(fleet: FleetFile, link: FleetLink) -> str:
    pairs = fleet.pairs(link)
    senders, receivers = {s.node_id for s, _ in pairs}, {r.node_id for _, r in pairs}
    who = f"{len(senders)} nodes send to {len(receivers)}"
    if link.budget is None:
        return f"{who}, {_paced(link)}{', TLS' if link.tls else ''}"
    share = f", {format_rate(link.budget // len(pairs))} for each of {len(pairs)} pairs" if len(pairs) > 1 else ""
    return f"{who}, {_paced(link)}{share}{', TLS' if link.tls else ''}"


def _paced(link: LinkSection) -> str:
    parts = ["not paced" if link.budget is None else f"paced to {format_rate(link.budget)}"]
    most = f" to {link.max_connections}" if link.max_connections else ""
    parts.append(f"{link.connections}{most} connections")
    if link.congestion_control:
        parts.append(link.congestion_control)
    if link.dscp:
        parts.append(f"DSCP {link.dscp}")
    return ", ".join(parts)


def _secured(config: NodeConfig) -> str:
    means = [name for name, there in (("TLS", config.kv.tls), ("the shared key", config.kv.shared_key)) if there]
    return f"with {' and '.join(means)}" if means else "unguarded, on this host alone"
