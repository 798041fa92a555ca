"""One file for a whole fleet: what each daemon reads out of it, and what is wrong with it, in words."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prfaas_net.cli.configured import read_gateway, read_node
from prfaas_net.config import merge
from prfaas_net.errors import ConfigError
from prfaas_net.fleetfile import findings, summary
from prfaas_net.fleetfile.reading import parse_fleet
from prfaas_net.fleetfile.schema import FleetFile
from prfaas_net.units import MiB

ROOT = Path(__file__).parents[2]
FLEET = """
model = "/models/kimi-linear"
node_key = "0123456789abcdef"

[gateway]
policy = "threshold"
threshold_tokens = 19400
[gateway.http]
port = 8081

[node.kv]
arena = "64MiB"
shared_key = "fedcba9876543210"
connections = 2

[[clusters]]
name = "prfaas"
kind = "prfaas"

[[links]]
from = "prfaas"
to = "pd"
budget = "40Gbps"
congestion_control = "bbr"
dscp = 10
connections = 8

[[nodes]]
node_id = "far-0"
role = "prefill"
cluster = "prfaas"
listen = "10.8.0.2:9000"

[[nodes]]
node_id = "far-1"
role = "prefill"
cluster = "prfaas"
listen = "10.8.0.3:9000"
kv.arena = "32MiB"

[[nodes]]
node_id = "near-0"
role = "prefill"
cluster = "pd"
listen = "10.0.0.2:9000"

[[nodes]]
node_id = "decode-0"
role = "decode"
cluster = "pd"
listen = "0.0.0.0:9000"
url = "http://decode-0.example:9000/"
kv.listen = "10.0.0.4:9100"

[[nodes]]
node_id = "either-0"
role = "decode"
convertible = true
cluster = "pd"
listen = "10.0.0.5:9000"
kv.listen = "10.0.0.5:9100"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    file.chmod(0o600)
    return file


def fleet(changes: str = "", **over: Any) -> FleetFile:
    """The file above, with more at its end, or with other values at its top."""
    return parse_fleet(merge(tomllib.loads(FLEET + changes), over), Path("fleet.toml"))


def test_a_gateway_reads_itself_and_where_everybody_is(path: Path) -> None:
    """Nothing of it is said twice: nodes, clusters, key and model come from the rest of the file."""
    config, whole = read_gateway(path, {})
    assert whole is not None
    assert (config.model, config.threshold_tokens, config.http.port) == ("kimi-linear", 19400, 8081)
    assert [node.url for node in config.nodes] == [
        "http://10.8.0.2:9000", "http://10.8.0.3:9000", "http://10.0.0.2:9000", "http://decode-0.example:9000",
        "http://10.0.0.5:9000",
    ]  # fmt: skip
    assert [(link.source, link.destination, link.budget) for link in config.links] == [("prfaas", "pd", 40_000_000_000)]
    assert config.node_key is not None and config.node_key.get_secret_value() == "0123456789abcdef"
    assert [(cluster.name, cluster.kind.value) for cluster in config.clusters] == [("prfaas", "prfaas")]


def test_a_node_reads_itself_and_its_links(path: Path) -> None:
    """Over what all share; a link's budget in equal shares for every pair of nodes on it."""
    config, _ = read_node("prefill", path, "far-1", {})
    assert (config.node_id, config.cluster, config.model) == ("far-1", "prfaas", "/models/kimi-linear")
    assert (config.kv.arena, config.kv.connections) == (32 * MiB, 2)
    near, far = config.kv.options("elsewhere"), config.kv.options("pd")
    assert (near.connections, near.budget_bps, near.dscp, near.congestion_control) == (2, None, 0, None)
    # Two that send, two that may receive.
    assert (far.connections, far.budget_bps, far.dscp, far.congestion_control) == (8, 10_000_000_000, 10, "bbr")
    assert read_node("prefill", path, "near-0", {})[0].kv.links == {}


def test_a_node_that_is_the_only_one_of_its_role_need_not_be_named(path: Path) -> None:
    assert read_node("decode", path, None, {})[0].node_id == "decode-0"
    assert read_node("pd", path, None, {})[0].convertible
    with pytest.raises(ConfigError, match="one of far-0, far-1, near-0"):
        read_node("prefill", path, None, {})


def test_flags_and_environment_go_over_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this daemon alone."""
    monkeypatch.setenv("PRFAAS_DECODE__KV__ARENA", "2MiB")
    monkeypatch.setenv("PRFAAS_GATEWAY__THRESHOLD_TOKENS", "7")
    assert read_node("decode", path, None, {"cluster": "other"})[0].cluster == "other"
    assert read_node("decode", path, None, {})[0].kv.arena == 2 * MiB
    assert read_gateway(path, {})[0].threshold_tokens == 7
    assert read_gateway(path, {"threshold_tokens": 8})[0].threshold_tokens == 8


def test_a_file_of_one_daemon_goes_on_working(tmp_path: Path) -> None:
    """And has no nodes to choose from."""
    file = tmp_path / "node.toml"
    file.write_text('role = "decode"\ncluster = "pd"\n')
    config, whole = read_node("decode", file, None, {})
    assert (config.cluster, whole) == ("pd", None)
    with pytest.raises(ConfigError, match="give that file"):
        read_node("decode", file, "decode-0", {})


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("decode", "decode-9", "no node 'decode-9'.*one of far-0"),
        ("decode", "far-0", "prfaas prefill --node far-0"),
        ("decode", "either-0", "prfaas pd --node either-0"),
    ],
)
def test_another_node_is_said_to_be_another_one(path: Path, command: str, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_node(command, path, name, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("[[link]]\n", "unknown key link; did you mean 'links'"),
        ('[[links]]\nfrom = "prfaas"\nto = "pd2"\n', "no node is in cluster 'pd2'; expected one of pd, prfaas"),
        ('[[links]]\nfrom = "prfaas"\nto = "pd"\n', "links: listed twice; found prfaas > pd"),
        ('[[links]]\nfrom = "pd"\nto = "prfaas"\nbudgets = 1\n', "unknown key links.1.budgets; did you mean 'budget'"),
        ('[[links]]\nform = "pd"\n', "unknown key links.1.form; did you mean 'from'|links.1.from"),
        ('[[links]]\nfrom = "pd"\nto = "prfaas"\nbudget = "fast"\n', "links.1.budget"),
        ('[[links]]\nfrom = "pd"\nto = "pd"\ntls = true\n', "asks for TLS; found no kv.tls on decode-0"),
        ('[[nodes]]\nrole = "decode"\n', "nodes.5: a node has a name"),
        ('[[nodes]]\nnode_id = "far-0"\nrole = "decode"\n', "nodes: listed twice; found far-0"),
        ('[[nodes]]\nnode_id = "x"\nrole = "king"\n', "nodes.x.role"),
        ('[[nodes]]\nnode_id = "x"\nrole = "decode"\nkv.arenas = 1\n', "nodes.x.kv.arenas; did you mean 'arena'"),
        ('[[nodes]]\nnode_id = "x"\nrole = "decode"\n', "gateways do not know where it is"),
        ('[[nodes]]\nurl = "http://x:1"\nkind = "vllms"\n', "nodes.5.kind"),
        ("[node.cach]\n", "unknown key node.cach; did you mean 'cache'"),
        ('[node.cache]\nblock_tokens = "many"\n', "node.cache.block_tokens"),
        ("[gateway.fleet]\npoll_intervals = 1\n", "gateway.fleet.poll_intervals; did you mean 'poll_interval'"),
        ('[[gateway.nodes]]\nurl = "http://x:1"\n', "gateway.nodes stands at the top"),
    ],
)
def test_bad_files_are_one_clear_line(changes: str, words: str) -> None:
    """The place, what was found there, and the name that was meant."""
    with pytest.raises(ConfigError, match=re.compile(words)) as caught:
        fleet(changes)
    assert caught.value.line().startswith("fleet.toml: ")
    assert "0123456789abcdef" not in caught.value.line() and "fedcba9876543210" not in caught.value.line()


def test_names_of_a_node_cannot_be_shared() -> None:
    for key, value in (("node_id", "x"), ("listen", "127.0.0.1:1")):
        with pytest.raises(ConfigError, match=f"node.{key} is another one on every node"):
            fleet(node={key: value})


def test_nodes_that_join_need_not_be_listed_by_address() -> None:
    """A port of the kernel's choice is enough where the node itself says which."""
    joining = '[[nodes]]\nnode_id = "x"\nrole = "decode"\n[nodes.join]\ngateways = ["http://g:1"]\ntoken = "%s"\n' % (
        "t" * 16
    )
    assert len(fleet(joining).gateway["nodes"]) == 5


def test_servers_of_other_kinds_stand_beside() -> None:
    """They are told to the gateway as they are; a gateway has nodes of one kind."""
    server = '[[nodes]]\nurl = "http://v:8000"\nkind = "vllm"\nrole = "both"\ncluster = "pd"\n'
    with pytest.raises(ConfigError, match="of one kind"):
        fleet(server)
    alone = parse_fleet(tomllib.loads("[gateway]\n" + server), Path("fleet.toml"))
    assert [engine.url for engine in alone.engines] == ["http://v:8000"]
    assert "vllm" in "\n".join(summary.describe_fleet(alone))


def texts(found: FleetFile, *, errors: bool) -> str:
    return "\n".join(finding.text for finding in findings.of_fleet(found) if finding.error is errors)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ('[[clusters]]\nname = "pd9"\nkind = "pd"\n', False, "no node is in cluster pd9"),
        ('[[links]]\nfrom = "pd"\nto = "prfaas"\n', False, "pd > prfaas: nobody sends over it"),
        (
            '[[nodes]]\nnode_id = "x"\nrole = "prefill"\ncluster = "third"\nlisten = "10.1.0.1:1"\n',
            False,
            "third > pd is not",
        ),
        (
            '[[nodes]]\nnode_id = "x"\nrole = "decode"\nlisten = "10.1.0.1:1"\nkv.listen = "10.0.0.5:9100"\n',
            True,
            "either-0 and x both listen on",
        ),
        ('[[nodes]]\nnode_id = "x"\nrole = "decode"\nlisten = "10.1.0.1:1"\nkv_dtype = "bfloat16"\n', True, "kv_dtype"),
    ],
)
def test_what_is_left_open_is_said(changes: str, error: bool, words: str) -> None:
    assert words not in texts(fleet(), errors=error)
    assert words in texts(fleet(changes), errors=error)


def test_ports_that_nothing_guards_are_errors_before_anybody_starts() -> None:
    """Those of every node, with its name."""
    told = texts(
        parse_fleet(tomllib.loads(FLEET.replace("node_key = ", "# ").replace("shared_key", "# x")), Path("f")),
        errors=True,
    )
    assert "far-0: will not listen on 10.8.0.2 without node_key" in told
    assert "decode-0: will not take KVCache at 10.0.0.4 without kv.shared_key or kv.tls" in told
    assert not texts(fleet(), errors=True)


def test_the_summary_says_who_talks_to_whom(path: Path) -> None:
    """And over what; and no secret."""
    config, whole = read_gateway(path, {})
    assert whole is not None
    lines = [*summary.describe_fleet(whole), *summary.describe_gateway(config)]
    for name in ("far-1", "decode-0", "either-0"):
        node = whole.nodes[name]
        lines += summary.describe_node(node)
    text = "\n".join(lines)
    for words in (
        "fleet of 5 nodes in 2 clusters", "prfaas (prfaas)", "http://decode-0.example:9000",
        "link prfaas > pd: 2 nodes send to 2, paced to 40.0 Gbps, 8 connections, bbr, DSCP 10",
        "for each of 4 pairs", "policy threshold, t = 19,400 tokens",
        "takes KVCache at 10.0.0.4:9100, with the shared key",
        "to pd: paced to 10.0 Gbps", "pd node either-0", "everybody on this host",
    ):  # fmt: skip
        assert words in text, words
    assert "0123456789abcdef" not in text and "fedcba9876543210" not in text
