"""docs/configure.md: what is printed there is what the program does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from prfaas_net.config import validate
from prfaas_net.fleetfile import findings, summary
from prfaas_net.fleetfile.reading import node_tree, parse_fleet
from prfaas_net.fleetfile.schema import FleetFile
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.reloading import HOT
from prfaas_net.nodes.config import JoinSection, NodeConfig

PAGE = (Path(__file__).parents[2] / "docs" / "configure.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def fleet() -> FleetFile:
    return parse_fleet(tomllib.loads(BLOCKS[0]), Path("fleet.toml"))


def test_the_example_is_a_fleet_without_errors(fleet: FleetFile) -> None:
    """Gateway and every node load from it; nothing in it is even doubtful."""
    gateway = validate(GatewayConfig, fleet.gateway, "fleet.toml")
    assert [key.name for key in gateway.holders] == ["operator", "team-a"] and gateway.join is not None
    for name, node in fleet.nodes.items():
        command = "pd" if node.convertible else node.role
        loaded = validate(NodeConfig, node_tree(fleet, command, name), "fleet.toml")
        assert loaded.kv.shared_key is not None and loaded.kv.tls is not None and loaded.node_key is not None
    assert [finding.text for finding in findings.of_fleet(fleet)] == []


def test_the_printed_check_is_what_is_printed(fleet: FleetFile) -> None:
    """Line by line."""
    lines = [*summary.describe_fleet(fleet), *summary.describe_node(fleet.nodes["prfaas-0"])]
    assert "\n".join(lines) in PAGE


def test_the_other_tables_load_too() -> None:
    joining = tomllib.loads(BLOCKS[1])["join"]
    assert len(validate(JoinSection, {**joining, "token": "t" * 20}, "page").gateways) == 2
    assert len(BLOCKS) == 2


def test_what_is_hot_is_told(fleet: FleetFile) -> None:
    """All of it, and nothing else."""
    row = re.search(r"^\| gateway \| (.*) \|$", PAGE, re.MULTILINE)
    assert row is not None
    assert tuple(re.findall(r"`(\w+)`", row[1])) == HOT
