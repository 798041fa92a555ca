"""Reading the fleet file, once, for whoever starts from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from prfaas_net.config import merge, read_toml, validate
from prfaas_net.errors import ConfigError
from prfaas_net.fleetfile.schema import FleetFile, FleetLink, FleetNode, FleetTable, pairs_of
from prfaas_net.gateway.config import GatewayConfig, NodeSection

__all__ = ["gateway_tree", "is_fleet_file", "node_tree", "parse_fleet", "read_fleet"]

# What a gateway takes from the rest of the file.
_FROM_ELSEWHERE = ("nodes", "clusters", "links", "node_key")
# Keys of a node's table that are not the node's own settings.
_OF_THE_FILE = ("url", "kind")


def is_fleet_file(tree: dict[str, Any]) -> bool:
    """Whether a file describes a fleet, or one daemon: only the former has a table ``[gateway]``."""
    return "gateway" in tree


def read_fleet(path: Path) -> FleetFile:
    """
    Raises:
        ConfigError: the file cannot be read, or something in it does not fit.
    """
    return parse_fleet(read_toml(path), path)


def parse_fleet(tree: dict[str, Any], path: Path) -> FleetFile:
    """What ``read_fleet`` makes of a file.

    Raises:
        ConfigError: as there.
    """
    source = str(path)
    table = validate(FleetTable, tree, source)
    _check_shared(table, source)
    trees, engines = _node_trees(table, source)
    nodes = {name: validate(FleetNode, node, source, f"nodes.{name}") for name, node in trees.items()}
    for link in table.links:
        _write_link(link, nodes, trees, source)
    # Once more, with the links in them.
    nodes = {name: validate(FleetNode, node, source, f"nodes.{name}") for name, node in trees.items()}
    gateway = {"model": _served_name(table.model), **deepcopy(table.gateway)}
    gateway["clusters"] = [cluster.model_dump(mode="json") for cluster in table.clusters]
    gateway["nodes"] = [*_reachable(nodes.values(), source), *(dict(row) for row in engines)]
    gateway["links"] = [
        {"from": link.source, "to": link.destination, "budget": link.budget}
        for link in table.links
        if link.budget is not None
    ]
    if table.node_key is not None:
        gateway["node_key"] = table.node_key.get_secret_value()
    validate(GatewayConfig, gateway, source, "gateway")
    servers = tuple(validate(NodeSection, row, source, "nodes") for row in engines)
    return FleetFile(path, table.model, table.clusters, table.links, nodes, servers, gateway, trees)


def gateway_tree(fleet: FleetFile) -> dict[str, Any]:
    """What a gateway is told."""
    return deepcopy(fleet.gateway)


def node_tree(fleet: FleetFile, role: str, name: str | None) -> dict[str, Any]:
    """What a node is told.

    Args:
        role: that it is started in: ``prefill``, ``decode``, or ``pd`` for one that can change.
        name: which one; None: the only one of that role.

    Raises:
        ConfigError: there is no such node, or it is another kind.
    """
    fitting = [node.node_id for node in fleet.nodes.values() if _started_as(node) == role]
    if name is None and len(fitting) == 1:
        name = fitting[0]
    if name is None:
        raise ConfigError(
            f"{fleet.path}: which {role} node?", expected=f"--node, one of {', '.join(fitting) or 'none'}"
        )
    node = fleet.nodes.get(name)
    if node is None:
        raise ConfigError(f"{fleet.path}: no node {name!r}", expected=f"one of {', '.join(fleet.nodes) or 'none'}")
    if _started_as(node) != role:
        raise ConfigError(
            f"{fleet.path}: node {name} is not started so",
            expected=f"prfaas {_started_as(node)} --node {name}",
            found=f"prfaas {role}",
        )
    tree = deepcopy(fleet.node_trees[name])
    return {key: value for key, value in tree.items() if key not in _OF_THE_FILE}


def _started_as(node: FleetNode) -> str:
    return "pd" if node.convertible else node.role


def _served_name(model: str | None) -> str:
    return Path(model).name if model else "demo_model"


def _check_shared(table: FleetTable, source: str) -> None:
    """
    Raises:
        ConfigError: something stands where it would be said twice, or a name is used twice.
    """
    for key in _FROM_ELSEWHERE:
        if key in table.gateway:
            raise ConfigError(
                f"{source}: gateway.{key} stands at the top of a fleet file", do="move it out of [gateway]"
            )
    for key in ("node_id", "listen", "url"):
        if key in table.node:
            raise ConfigError(f"{source}: node.{key} is another one on every node", do="move it into [[nodes]]")
    # Whatever role: only the names are looked at here.
    validate(FleetNode, {"role": "prefill", "node_id": "any", **table.node}, source, "node")
    _once((cluster.name for cluster in table.clusters), f"{source}: clusters")
    _once((link.name for link in table.links), f"{source}: links")


def _once(names: Iterable[str], what: str) -> None:
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ConfigError(f"{what}: listed twice", found=", ".join(twice))


def _node_trees(table: FleetTable, source: str) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Tables of our nodes, by name, each over what all share; and those of vLLM and SGLang servers."""
    trees: dict[str, dict[str, Any]] = {}
    engines = []
    shared: dict[str, Any] = {"model": table.model} if table.model else {}
    if table.node_key is not None:
        shared["node_key"] = table.node_key.get_secret_value()
    _once((str(row.get("node_id", row.get("url"))) for row in table.nodes), f"{source}: nodes")
    for number, row in enumerate(table.nodes):
        if row.get("kind", "prfaas") != "prfaas":
            engines.append(row)
            continue
        if "node_id" not in row:
            raise ConfigError(f"{source}: nodes.{number}: a node has a name", do='set node_id = "NAME"')
        trees[str(row["node_id"])] = merge(merge(deepcopy(shared), deepcopy(table.node)), row)
    return trees, engines


def _write_link(link: FleetLink, nodes: dict[str, FleetNode], trees: dict[str, dict[str, Any]], source: str) -> None:
    """A link's settings, into the tables of those who send over it; the budget in equal shares.

    Raises:
        ConfigError: it has no end, or an end without certificates that should have some.
    """
    known = sorted({node.cluster for node in nodes.values()})
    for cluster in (link.source, link.destination):
        if cluster not in known:
            raise ConfigError(
                f"{source}: links: no node is in cluster {cluster!r}", expected=f"one of {', '.join(known) or 'none'}"
            )
    pairs = pairs_of(link, tuple(nodes.values()))
    settings = link.model_dump(mode="json", include=link.model_fields_set - {"source", "destination", "tls"})
    if link.budget is not None and pairs:
        settings["budget"] = max(1, link.budget // len(pairs))
    for sender in {sender.node_id for sender, _ in pairs}:
        links = trees[sender].setdefault("kv", {}).setdefault("links", {})
        links[link.destination] = settings
    if link.tls:
        bare = sorted({node.node_id for pair in pairs for node in pair if node.kv.tls is None})
        if bare:
            raise ConfigError(
                f"{source}: links: {link.name} asks for TLS",
                found=f"no kv.tls on {', '.join(bare)}",
                do="set [node.kv.tls]",
            )


def _reachable(nodes: Iterable[FleetNode], source: str) -> list[dict[str, str]]:
    """How gateways reach the nodes; those that join by themselves need not be listed.

    Raises:
        ConfigError: there is no way to one of them.
    """
    rows = []
    for node in nodes:
        host, port = node.listen
        if node.url is not None:
            rows.append({"url": node.url})
        elif port and host not in ("0.0.0.0", "::"):
            rows.append({"url": node.url_at(node.listen)})
        elif not node.join.gateways:
            raise ConfigError(
                f"{source}: nodes.{node.node_id}: gateways do not know where it is",
                expected="listen with an address and a port of its own, or url, or join.gateways",
                found=f"listen {host}:{port}",
            )
    return rows
