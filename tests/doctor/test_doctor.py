"""The doctor: recorded facts in, findings out; each finding with its fix."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas_net.doctor.collect import collect
from prfaas_net.doctor.examine import examine, worst
from prfaas_net.doctor.facts import HostFacts, Interface
from prfaas_net.doctor.findings import Finding, Level, LinkNeeds, parse_needs
from prfaas_net.errors import ConfigError
from prfaas_net.units import MiB

GOOD = HostFacts(
    kernel="6.1.0", cpus=16, congestion_available=("reno", "cubic", "bbr"), congestion_allowed=("reno", "bbr"),
    congestion_default="bbr", tcp_wmem_max_bytes=512 * MiB, tcp_rmem_max_bytes=512 * MiB, notsent_lowat_bytes=1 << 32,
    slow_start_after_idle=False, window_scaling=True, sack=True, mtu_probing=1, huge_pages="madvise",
    interfaces=(Interface("eth0", 9000, 25 * 10**9),), clock_source="tsc", clock_synchronized=True,
    open_files_soft=65536, open_files_hard=65536, first_port=32768, last_port=60999,
)  # fmt: skip
NEEDS = LinkNeeds(10 * 10**9, 0.04)


def finding(facts: HostFacts, check: str, needs: LinkNeeds = NEEDS) -> Finding:
    return next(each for each in examine(facts, needs) if each.check == check)


def test_a_well_set_host_is_ok() -> None:
    """And nothing is to be fixed."""
    findings = examine(GOOD, NEEDS)
    assert worst(findings) is Level.OK
    assert not [each for each in findings if each.fix]


@pytest.mark.parametrize(
    ("changed", "check", "level", "fix"),
    [
        ({"congestion_available": ("reno", "cubic")}, "congestion control", Level.WARN, "modprobe tcp_bbr"),
        (
            {"congestion_allowed": ("reno",), "congestion_default": "cubic"}, "congestion control", Level.WARN,
            'tcp_allowed_congestion_control="reno bbr"',
        ),
        ({"tcp_wmem_max_bytes": 16 * MiB}, "send buffer", Level.WARN, 'tcp_wmem="4096 65536 268435456"'),
        ({"tcp_wmem_max_bytes": MiB}, "send buffer", Level.FAIL, "tcp_wmem"),
        ({"tcp_rmem_max_bytes": MiB}, "receive buffer", Level.FAIL, "tcp_rmem"),
        ({"tcp_wmem_max_bytes": None}, "send buffer", Level.WARN, "tcp_wmem"),
        ({"slow_start_after_idle": True}, "idle restart", Level.WARN, "tcp_slow_start_after_idle=0"),
        ({"notsent_lowat_bytes": None}, "unsent bytes", Level.WARN, "Linux"),
        ({"window_scaling": False}, "TCP features", Level.FAIL, "tcp_window_scaling=1"),
        ({"sack": False}, "TCP features", Level.WARN, "tcp_sack=1"),
        ({"interfaces": (Interface("wg0", 1420),), "mtu_probing": 0}, "MTU", Level.WARN, "tcp_mtu_probing=1"),
        ({"huge_pages": "never"}, "huge pages", Level.WARN, "madvise"),
        ({"cpus": 1}, "CPUs", Level.WARN, "CPUs"),
        ({"clock_source": "hpet"}, "clock source", Level.WARN, "clocksource"),
        ({"clock_synchronized": False}, "time", Level.WARN, "chronyd"),
        ({"open_files_soft": 1024}, "open files", Level.WARN, "LimitNOFILE"),
        ({"open_files_soft": 256}, "open files", Level.FAIL, "LimitNOFILE"),
        ({"last_port": 33000}, "local ports", Level.WARN, "ip_local_port_range"),
    ],
)  # fmt: skip
def test_each_fault_is_found_with_its_fix(changed: dict[str, object], check: str, level: Level, fix: str) -> None:
    """One fact worse, one finding more, and it says what to type."""
    facts = replace(GOOD, **changed)  # type: ignore[arg-type]
    found = finding(facts, check)
    assert found.level is level
    assert fix in found.fix
    assert found.found and found.expected and found.why
    assert [each.check for each in examine(facts, NEEDS) if each.level is not Level.OK] == [check]


def test_a_send_buffer_is_judged_by_the_link() -> None:
    """4 MiB is plenty next door and a tenth of what is needed across an ocean."""
    facts = replace(GOOD, tcp_wmem_max_bytes=4 * MiB)
    assert finding(facts, "send buffer", LinkNeeds(10**10, 0.0005)).level is Level.OK
    assert finding(facts, "send buffer", LinkNeeds(10**9, 0.04)).level is Level.OK  # four connections do it
    assert finding(facts, "send buffer", LinkNeeds(10**9, 0.08)).level is Level.WARN
    assert finding(facts, "send buffer", LinkNeeds(10**10, 0.08)).level is Level.FAIL


def test_root_may_use_what_is_not_allowed_to_all() -> None:
    """The list of allowed congestion controls binds the others only."""
    facts = replace(GOOD, congestion_allowed=("reno",), congestion_default="cubic", privileged=True)
    assert finding(facts, "congestion control").level is Level.OK


def test_nothing_known_is_no_failure() -> None:
    """A host that tells nothing gets warnings: exit code 1 is for what is known to be wrong."""
    assert worst(examine(HostFacts(), NEEDS)) is Level.WARN


def test_facts_survive_a_recording() -> None:
    """What one host wrote down, another can examine."""
    assert HostFacts.from_json(json.loads(json.dumps(GOOD.to_json()))) == GOOD


def test_facts_are_read_from_proc_and_sys(tmp_path: Path) -> None:
    """From a tree that looks like a host; what is not there stays unknown."""
    files = {
        "proc/sys/net/ipv4/tcp_wmem": "4096\t16384\t4194304\n",
        "proc/sys/net/ipv4/tcp_available_congestion_control": "reno bbr\n",
        "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
        "proc/sys/net/ipv4/tcp_sack": "1\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/class/net/lo/mtu": "65536\n",
        "sys/class/net/eth0/mtu": "1400\n",
        "sys/class/net/eth0/speed": "-1\n",
        "sys/class/net/eth1/mtu": "1500\n",
        "sys/class/net/eth1/operstate": "down\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    facts = collect(tmp_path)
    assert facts.tcp_wmem_max_bytes == 4 * MiB
    assert facts.congestion_available == ("reno", "bbr")
    assert facts.huge_pages == "madvise"
    assert facts.interfaces == (Interface("eth0", 1400),)
    assert (facts.first_port, facts.last_port) == (32768, 60999)
    assert facts.sack is True
    assert facts.tcp_rmem_max_bytes is None


@pytest.mark.parametrize("text", ["10Gbps", "0bps,20ms", "10Gbps,20ms,1%"])
def test_a_link_that_cannot_be_read_is_refused(text: str) -> None:
    """With what a link looks like."""
    with pytest.raises(ConfigError):
        parse_needs(text)


def test_the_command_exits_with_1_only_on_failures() -> None:
    """Warnings are for reading; and --json is one object with the facts in it."""
    command = [sys.executable, "-m", "prfaas_net.cli", "doctor", "--json", "--link"]
    near = subprocess.run([*command, "1Mbps,1ms"], capture_output=True, text=True, check=False)
    report = json.loads(near.stdout)
    assert near.returncode == (1 if report["level"] == "fail" else 0)
    assert {each["level"] for each in report["findings"]} <= {"ok", "warn", "fail"}
    assert HostFacts.from_json(report["facts"]).cpus >= 1
    far = subprocess.run([*command, "10Tbps,300ms"], capture_output=True, text=True, check=False)
    assert far.returncode == 1
