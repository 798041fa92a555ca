"""``prfaas up`` with its two clusters at the two ends of an impaired link."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas_net.config import is_loopback
from prfaas_net.errors import ConfigError
from prfaas_net.localfleet.fleet import ClusterPlace, FleetPlan
from prfaas_net.localfleet.processes import Process
from tests.netem.test_truth import CHOSEN
from tools.netlab import Link
from tools.netlab.fixture import LinkFactory, need_laboratory
from tools.netlab.fleet import Console, arguments

ROOT = Path(__file__).parent.parent.parent
DELAY_MS = 25


@pytest.mark.netem
@pytest.mark.timeout(170)
def test_two_clusters_work_across_an_impaired_link(tmp_path: Path) -> None:
    """Every output is that of a single process, the long prompt's KVCache has crossed the link, no shaper runs, and
    what is typed meanwhile is done."""
    need_laboratory()
    output = tmp_path / "demo.json"
    command = [
        sys.executable, "-m", "tools.netlab", "up", "--rate", "200Mbps", "--delay", f"{DELAY_MS}ms",
        "--loss", "0.001", "--demo", "--output", str(output),
    ]  # fmt: skip
    typed = "ab loss 0.002\nfaster\ncounters\n"
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=160, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"backend {CHOSEN}" in done.stderr
    assert all(word in done.stderr for word in ("ab: loss 0.002", "not understood", "packets="))
    report = json.loads(output.read_text())
    assert report["processes"] == 4
    short, long = report["requests"]
    assert (short["prefilled_in"], long["prefilled_in"]) == ("pd", "prfaas")
    assert all(row["identical"] for row in report["requests"])
    # The last byte has one way to go, and its confirmation the other.
    assert long["exposed_s"] >= 2 * DELAY_MS / 1e3 > short["exposed_s"]


@pytest.mark.netem
@pytest.mark.timeout(60)
def test_what_is_typed_changes_the_link(make_link: LinkFactory) -> None:
    """Settings with units, competitors, counters; a mistake is answered with what could have been."""
    said: list[str] = []
    link: Link = make_link(backend="tun", rate_bps=100e6)
    console = Console(link, said.append)
    for line in (
        "rate 50Mbps delay 10ms",
        "ba loss 0.1",
        "cross 2",
        "cross 0",
        "counters",
        "",
        "ab speed 3",
        "rate slow",
    ):
        console.obey(line)
    assert [(way.rate_bps, way.delay_ms, way.loss) for way in link.ways.values()] == [(50e6, 10, 0), (50e6, 10, 0.1)]
    assert said[2:4] == ["2 competing flows", "0 competing flows"]
    assert "unknown key speed" in said[-2] and "not a rate" in said[-1]


@pytest.mark.netem
@pytest.mark.timeout(60)
def test_this_host_reaches_a_side_by_a_door(make_link: LinkFactory) -> None:
    """Past the link: a delay there is not felt here. Two doors have two addresses."""
    links = [make_link(backend="tun", delay_ms=200) for _ in range(2)]
    doors = [link.door("b") for link in links]
    assert doors[0] != doors[1]
    for door in doors:
        said = subprocess.run(["ping", "-c", "2", "-i", "0.1", "-q", door], capture_output=True, text=True, check=True)
        assert float(said.stdout.rpartition("= ")[2].split("/")[0]) < 200
    words = arguments(links[0], ["--demo"])
    assert words[words.index("--pd-netns") + 1] == links[0].b.space
    assert words[-1] == "--demo"


def test_clusters_in_one_network_have_a_shaper_between_them_and_no_keys() -> None:
    """On loopback; elsewhere strangers could knock."""
    plan = FleetPlan()
    assert plan.shaped and not plan.open and is_loopback(plan.pd.address)
    apart = FleetPlan(prfaas=ClusterPlace("far", "10.0.0.1"), pd=ClusterPlace("near", "10.0.0.2"))
    assert apart.open and not apart.shaped
    assert FleetPlan(host="10.0.0.3").open


async def test_a_namespace_that_is_not_there_is_named() -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=r"no such network namespace.*'nowhere'.*ip netns add nowhere"):
        await Process.start("node", ["decode"], netns="nowhere")
