"""What a daemon is told, by a file of its own or by the fleet's; and ``--check``, which only says what that means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from prfaas_net.config import load_config, read_toml
from prfaas_net.errors import ConfigError
from prfaas_net.fleetfile import findings, summary
from prfaas_net.fleetfile.reading import gateway_tree, is_fleet_file, node_tree, parse_fleet
from prfaas_net.fleetfile.schema import FleetFile
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.nodes.config import NodeConfig

__all__ = ["Check", "NodeName", "read_gateway", "read_node", "show_gateway", "show_node"]

EXIT_WRONG = 2

Check = Annotated[
    bool, typer.Option("--check", help="Say what the configuration means and what is wrong with it; start nothing.")
]
NodeName = Annotated[
    str | None, typer.Option("--node", help="Which node of a fleet's file this is; default: the only one of its role.")
]


def _reader(pick: Callable[[FleetFile], dict[str, Any]], seen: list[FleetFile]) -> Callable[[Path], dict[str, Any]]:
    """Reads a file of one daemon as it is, and takes one daemon out of a fleet's file, which is put into ``seen``."""

    def read(path: Path) -> dict[str, Any]:
        tree = read_toml(path)
        if not is_fleet_file(tree):
            return tree
        seen.append(parse_fleet(tree, path))
        return pick(seen[-1])

    return read


def read_gateway(config: Path | None, flags: dict[str, Any]) -> tuple[GatewayConfig, FleetFile | None]:
    """
    Raises:
        ConfigError: something does not fit.
    """
    seen: list[FleetFile] = []
    read = _reader(gateway_tree, seen)
    settings = load_config(GatewayConfig, config, flags=flags, env_prefix="PRFAAS_GATEWAY__", read=read)
    return settings, seen[0] if seen else None


def read_node(
    command: str, config: Path | None, name: str | None, flags: dict[str, Any]
) -> tuple[NodeConfig, FleetFile | None]:
    """
    Args:
        command: ``prefill``, ``decode`` or ``pd``.
        name: the node of a fleet's file.

    Raises:
        ConfigError: something does not fit.
    """
    seen: list[FleetFile] = []
    read = _reader(lambda fleet: _overruled(node_tree(fleet, command, name), flags), seen)
    settings = load_config(NodeConfig, config, flags=flags, env_prefix=f"PRFAAS_{command.upper()}__", read=read)
    if name is not None and not seen:
        raise ConfigError("--node names a node of a fleet's file", do="give that file: --config fleet.toml")
    return settings, seen[0] if seen else None


def _overruled(tree: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """A flag for all links of a node goes over what the file says of one."""
    given = [key for key, value in flags.get("kv", {}).items() if value is not None]
    for link in tree.get("kv", {}).get("links", {}).values():
        for key in given:
            link.pop(key, None)
    return tree


def show_gateway(config: GatewayConfig, fleet: FleetFile | None, path: Path | None) -> None:
    """Explain, and end the process: with 0 if it could start."""
    secrets = config.node_key is not None or any(section.key is not None for section in config.api_keys)
    _show(fleet, path, summary.describe_gateway(config), findings.of_gateway(config), secrets=secrets)


def show_node(config: NodeConfig, fleet: FleetFile | None, path: Path | None) -> None:
    """Explain, and end the process: with 0 if it could start."""
    secrets = any((config.node_key, config.kv.shared_key, config.join.token))
    _show(fleet, path, summary.describe_node(config), findings.of_node(config), secrets=secrets)


def _show(
    fleet: FleetFile | None,
    path: Path | None,
    own: Iterator[str],
    of_own: Iterable[findings.Finding],
    *,
    secrets: bool,
) -> None:
    if fleet is not None:
        _say(summary.describe_fleet(fleet))
    _say(own)
    # What is wrong with a node may be found in its own settings and in the fleet's; it is told once.
    found = {
        finding.text.rpartition(": ")[2]: finding
        for finding in (
            *(findings.of_fleet(fleet) if fleet is not None else ()),
            *of_own,
            *(findings.of_file(path, holds_secrets=secrets) if path is not None else ()),
        )
    }
    _say(summary.verdict(found.values()))
    raise typer.Exit(EXIT_WRONG if any(finding.error for finding in found.values()) else 0)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)
