"""A link comes, is used by processes, and goes without a trace; also when whoever made it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from prfaas_net.bench.namespaces import SPACES
from prfaas_net.bench.pair import Pair
from prfaas_net.errors import ConfigError
from prfaas_net.units import MiB
from tests.netem.test_truth import BACKENDS
from tools import netlab
from tools.netlab import Link
from tools.netlab.fixture import LinkFactory, need_laboratory
from tools.netlab.names import PREFIX, sweep

pytestmark = [pytest.mark.netem, pytest.mark.timeout(90)]
ROOT = Path(__file__).parent.parent.parent
# Makes a link with a process on it, says where, and waits to be killed.
VICTIM = """
import sys, time
from tools import netlab
with netlab.link(backend=sys.argv[1], delay_ms=1) as link:
    process = link.start_in("b", ["sleep", "300"])
    print(link.a.space, process.pid, flush=True)
    time.sleep(300)
"""


def commands_with(text: str) -> list[int]:
    """Processes whose command line has this in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


def left_of(pid: int) -> list[str]:
    """Namespaces and directories with a process's mark."""
    places = (SPACES, Path(tempfile.gettempdir()))
    return [str(path) for place in places for path in place.glob(f"{PREFIX}{pid}-s*")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_killed_laboratory_leaves_is_swept(backend: str) -> None:
    """Namespaces, directories, what it started there, and the machinery of the backend."""
    need_laboratory()
    victim = subprocess.Popen([sys.executable, "-c", VICTIM, backend], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert victim.stdout is not None
    try:
        space, started = victim.stdout.readline().split()
        assert left_of(victim.pid)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        victim.stdout.close()
    assert (SPACES / space).exists()
    assert space in sweep()
    assert left_of(victim.pid) == []
    give_up_s = time.monotonic() + 5.0
    while commands_with(f"{PREFIX}{victim.pid}-s") and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert commands_with(f"{PREFIX}{victim.pid}-s") == []
    assert int(started) not in commands_with("sleep")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_link_leaves_nothing_behind(backend: str) -> None:
    """Not after an error inside, either; and a sweep leaves the living alone."""
    need_laboratory()
    before = left_of(os.getpid())
    processes = []

    def interrupted() -> None:
        with netlab.link(backend=backend) as link:
            processes.append(link.start_in("a", ["sleep", "300"]))
            assert sweep() == []
            assert (SPACES / link.a.space).exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert processes[0].poll() is not None
    assert left_of(os.getpid()) == before


def test_a_link_that_cannot_be_made_leaves_nothing_behind() -> None:
    """A setting that the kernel refuses."""
    need_laboratory()
    before = left_of(os.getpid())
    with pytest.raises(FileNotFoundError), netlab.link(backend="tun", sysctls={"no_such_setting": "1"}):
        raise AssertionError("there is a link")
    assert left_of(os.getpid()) == before


def test_two_links_stand_side_by_side(make_link: LinkFactory) -> None:
    """With the same addresses, in namespaces of their own."""
    slow, fast = (make_link(backend="tun", delay_ms=delay_ms) for delay_ms in (30, 1))
    for link, least_ms in ((slow, 60), (fast, 2)):
        said = link.run_in("a", ["ping", "-c", "3", "-i", "0.1", "-q", link.b.address]).stdout
        assert float(said.rpartition("= ")[2].split("/")[0]) >= least_ms


def test_commands_run_on_the_side_that_they_should(netlab_link: Link) -> None:
    """Each side has its own address; there is no third side."""
    for side in ("a", "b"):
        addresses = netlab_link.run_in(side, ["ip", "-4", "-o", "addr", "show", "dev", "lnk0"]).stdout
        assert netlab_link.end(side).address in addresses
    with pytest.raises(ConfigError, match="a or b"):
        netlab_link.run_in("c", ["true"])


def test_a_kv_stream_crosses_the_link(netlab_link: Link) -> None:
    """A real sender and receiver of the product, verified bytes, and a loss on the way that does not matter."""
    netlab_link.set(rate_bps=200e6, delay_ms=5, queue_bytes=MiB)
    netlab_link.set("ab", loss=0.002)
    before = netlab_link.counters()["ab"].bytes
    with Pair(netlab_link.place()) as pair:
        pair.connect(2)
        assert pair.send(8 * MiB, MiB)["took_s"] > 8 * MiB * 8 / 200e6
        pair.hang_up()
    assert netlab_link.counters()["ab"].bytes - before > 8 * MiB
