"""docs/deploy: the manifests, units and images name only what there really is, and leave time to leave."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer
import yaml

from prfaas_net.cli.main import app
from prfaas_net.config import load_config
from prfaas_net.doctor.examine import examine
from prfaas_net.doctor.facts import HostFacts, Interface
from prfaas_net.doctor.findings import LinkNeeds
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.gateway.keys import KeyHash
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.server import ControlServer
from prfaas_net.units import parse_duration

from .gateway.conftest import open_bench

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "docs" / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CONFIGS: dict[str, Any] = {"gateway": GatewayConfig, "prefill": NodeConfig, "decode": NodeConfig, "pd": NodeConfig}
# What a secret or a pod would hold.
VALUES = {
    "api-keys": str(KeyHash.of("a-key-of-a-client")), "join-hash": str(KeyHash.of("t" * 32)), "join-token": "t" * 32,
    "node-key": "n" * 32, "kv-key": "k" * 32, "status.podIP": "10.1.2.3", "metadata.name": "pod-x",
}  # fmt: skip


def command_of(words: list[str]) -> None:
    """``prfaas`` would take these words.

    Raises:
        AssertionError: there is no such command, or no such flag of it.
    """
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    assert not [word for word in words[1:] if word.startswith("-") and word.split("=")[0] not in known], words


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def pods() -> dict[str, dict[str, Any]]:
    """Pod templates, by the name of what starts them."""
    found = {}
    for _, document in documents():
        if "template" in document.get("spec", {}):
            found[document["metadata"]["name"]] = document["spec"]["template"]
    return found


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def environ_of(pod: dict[str, Any]) -> dict[str, str]:
    """As the kubelet would make it."""
    environ: dict[str, str] = {}
    for entry in container(pod)["env"]:
        source = entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["name"] == "prfaas-keys"
            value = VALUES[source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            value = VALUES[source["fieldRef"]["fieldPath"]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], entry["value"])
        environ[entry["name"]] = value
    return environ


def config_of(name: str) -> GatewayConfig | NodeConfig:
    """What a pod's daemon would be told, checked as it would check it."""
    pod = pods()[name]
    command, *flags = container(pod)["args"]
    command_of([command, *flags])
    path = None
    if "--config" in flags:
        path = Path(flags[flags.index("--config") + 1])
    given: dict[str, Any] = {} if command == "gateway" else {"role": command}
    if "--cluster" in flags:
        given["cluster"] = flags[flags.index("--cluster") + 1]
    config: GatewayConfig | NodeConfig = load_config(
        CONFIGS[command], path, flags=given, env_prefix=f"PRFAAS_{command.upper()}__", environ=environ_of(pod),
        read=lambda path: mounted(pod, path),
    )  # fmt: skip
    return config


def mounted(pod: dict[str, Any], path: Path) -> dict[str, Any]:
    """A file that a pod sees."""
    mounts = {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}
    volumes = {volume["name"]: volume["configMap"]["name"] for volume in pod["spec"]["volumes"]}
    maps = {d["metadata"]["name"]: d["data"] for _, d in documents() if d["kind"] == "ConfigMap"}
    return tomllib.loads(maps[volumes[mounts[str(path.parent)]]][path.name])


@pytest.mark.parametrize("name", sorted(pods()))
def test_a_pod_is_told_what_its_daemon_takes(name: str) -> None:
    """Command, flags, variables and files are read as the daemon reads them, which knows no others; it may listen."""
    config = config_of(name)
    host = config.http.host if isinstance(config, GatewayConfig) else config.listen[0]
    assert host in ("0.0.0.0", VALUES["status.podIP"])
    assert config.node_key is not None
    if isinstance(config, NodeConfig):
        assert config.kv.shared_key is not None and config.join.token is not None and len(config.join.gateways) == 2


@pytest.mark.parametrize("name", sorted(pods()))
def test_a_pods_ports_are_those_that_its_daemon_listens_on(name: str) -> None:
    """And probes, scrapers and services ask one of them."""
    pod, config = pods()[name], config_of(name)
    ports = {port["name"]: port["containerPort"] for port in container(pod)["ports"]}
    if isinstance(config, GatewayConfig):
        expected = {"http": config.http.port}
    else:
        expected = {"control": config.listen[1]} | ({"kv": config.kv.listen[1]} if config.role == "decode" else {})
    assert ports == expected
    assert int(pod["metadata"]["annotations"]["prometheus.io/port"]) == next(iter(ports.values()))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(pod)[probe]["httpGet"]["port"] in ports
    assert pod["spec"].get("hostNetwork", False) == any("hostPort" in port for port in container(pod)["ports"])


def test_services_lead_to_pods() -> None:
    """Selectors match labels, and ports are theirs; the names that nodes join by are those of the gateways."""
    services = {d["metadata"]["name"]: d["spec"] for _, d in documents() if d["kind"] == "Service"}
    for spec in services.values():
        chosen = [pod for pod in pods().values() if spec["selector"].items() <= pod["metadata"]["labels"].items()]
        assert chosen
        named = {port["name"] for pod in chosen for port in container(pod)["ports"]}
        assert {port["targetPort"] for port in spec["ports"]} <= named
    (gateways,) = [d for _, d in documents() if d["kind"] == "StatefulSet"]
    name, service = gateways["metadata"]["name"], gateways["spec"]["serviceName"]
    (port,) = services[service]["ports"]
    expected = {f"http://{name}-{i}.{service}:{port['port']}" for i in range(gateways["spec"]["replicas"])}
    for node in ("prfaas-prefill", "prfaas-decode"):
        config = config_of(node)
        assert isinstance(config, NodeConfig) and set(config.join.gateways) == expected


async def test_probes_ask_what_is_answered_without_a_key() -> None:
    """Each path is a route of the daemon, and open."""
    asked: dict[str, set[str]] = {"gateway": set(), "node": set()}
    for name, pod in pods().items():
        probes = [
            container(pod)[kind]["httpGet"]["path"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")
        ]
        kind = "gateway" if name == "prfaas-gateway" else "node"
        asked[kind] |= {*probes, pod["metadata"]["annotations"]["prometheus.io/path"]}
    async with open_bench(api_keys=["a-key-of-the-test"]) as bench:
        for path in asked["gateway"]:
            async with bench.http.get(f"{bench.gateway.url}{path}") as answer:
                assert answer.status == 200, path
    node = ControlServer(lambda: pytest.fail("not asked for"), Metrics(), node_key="n" * 16)
    await node.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for path in asked["node"]:
                async with session.get("http://{}:{}{}".format(*node.address, path)) as answer:
                    assert answer.status == 200, path
    finally:
        await node.close()


@pytest.mark.parametrize("name", sorted(pods()))
def test_a_pod_has_time_to_leave(name: str) -> None:
    """Longer than what comes before the signal, and what its daemon may take after it."""
    pod = pods()[name]
    *_, slept = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= float(slept) + config_of(name).drain_timeout + 10


def test_the_kustomization_names_every_manifest() -> None:
    """And the image that the pods have."""
    (kustomization,) = [d for name, d in documents() if name == "kustomization.yaml"]
    assert {*kustomization["resources"], "kustomization.yaml"} == {path.name for path in MANIFESTS}
    assert {container(pod)["image"] for pod in pods().values()} == {image["name"] for image in kustomization["images"]}


def unit(path: Path) -> dict[str, str]:
    """A unit's ``[Service]``."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(path.read_text())
    return dict(parser["Service"])


def roles_of(path: Path) -> tuple[str, ...]:
    return ("prefill", "decode", "pd") if "@" in path.name else ("gateway",)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_what_there_is_and_leaves_it_time_to_leave(path: Path) -> None:
    """Its command, its variables, its signal and its patience; and it has few rights."""
    service = unit(path)
    for role in roles_of(path):
        _, *words = shlex.split(service["ExecStart"].replace("%i", role))
        command_of(words)
    for entry in shlex.split(service["Environment"]):
        name, _, value = entry.partition("=")
        role = name.removeprefix("PRFAAS_").partition("__")[0].lower()
        assert role in roles_of(path)
        given: dict[str, Any] = (
            {"model": "m", "nodes": [{"url": "http://h:1"}]} if role == "gateway" else {"role": "decode"}
        )
        load_config(CONFIGS[role], flags=given, env_prefix=f"PRFAAS_{role.upper()}__", environ={name: value})
    assert service["KillSignal"] == "SIGTERM"
    longest_s = max(CONFIGS[role].model_fields["drain_timeout"].default for role in roles_of(path))
    assert parse_duration(service["TimeoutStopSec"]) >= longest_s + 10
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes" and int(service["LimitNOFILE"]) >= 8192
    secret, _, source = service["LoadCredential"].partition(":")
    assert f"%d/{secret}" in service["ExecStart"] and source.startswith("/etc/prfaas/")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_reads_the_units(path: Path, tmp_path: Path) -> None:
    """It finds nothing to complain of, with an executable that is there."""
    here = tmp_path / path.name.replace("@", "@decode")
    here.write_text(path.read_text().replace("/opt/prfaas/bin/prfaas", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(here)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, [line for line in result.stderr.splitlines() if path.stem in line]) == (0, [])


def test_the_sysctl_file_is_what_the_doctor_asks_for() -> None:
    """Every line is one of its fixes on a host where nothing is set, for the link that the file names."""
    bare = HostFacts(
        congestion_available=("reno", "cubic", "bbr"), congestion_allowed=("reno", "cubic"), congestion_default="cubic",
        tcp_wmem_max_bytes=1, tcp_rmem_max_bytes=1, slow_start_after_idle=True, mtu_probing=0,
        interfaces=(Interface("wg0", 1420),), first_port=1, last_port=2,
    )  # fmt: skip
    asked = {}
    for finding in examine(bare, LinkNeeds(10 * 10**9, 0.05)):
        match = re.fullmatch(r"sysctl -w ([\w.]+)=\"?([^\"]*)\"?", finding.fix)
        if match is not None:
            asked[match[1]] = match[2]
    lines = (DEPLOY / "sysctl" / "90-prfaas.conf").read_text().splitlines()
    told = dict(line.split(" = ") for line in lines if line and not line.startswith("#"))
    assert told == asked


def test_the_image_has_what_the_project_has() -> None:
    """Extras, files and ports; and it does not run as root."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(lines)
    extras = re.search(r"/src\[([\w,]+)\]", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert extras is not None and set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])
    assert (ROOT / "constraints.txt").exists() and "/src/constraints.txt" in text
    exposed = next(line for line in lines if line.startswith("EXPOSE")).split()[1:]
    assert {int(port) for port in exposed} == {
        p["containerPort"] for pod in pods().values() for p in container(pod)["ports"]
    }
    assert "USER 10001" in lines and {pod["spec"]["securityContext"]["runAsUser"] for pod in pods().values()} == {10001}
    assert "prfaas" in project["project"]["scripts"] and 'ENTRYPOINT ["prfaas"]' in lines
