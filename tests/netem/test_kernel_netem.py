"""The backend that is the running kernel's own netem, where that kernel has none: inside a guest that does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.netem.test_truth import CHOSEN
from tools.netlab.backends.uml_wire import UML

GUEST = Path(__file__).with_name("uml_guest.sh")
ROOT = Path(__file__).parent.parent.parent
# One of each kind: delay, rate and queue, loss, marks are what the lines for tc are about. Python is slow in there.
TESTS = ("delay_is", "queue_takes", "loss_loses", "black_hole", "in_place")


# Where the kernel has netem, every other test here has used it already.
if CHOSEN == "uml":

    @pytest.mark.netem
    @pytest.mark.timeout(170)
    def test_the_kernels_own_netem_tells_the_truth_too() -> None:
        """veth pairs and a namespace between them, on a kernel that has sch_netem."""
        with tempfile.TemporaryDirectory(prefix="prfaas-guest-") as directory:
            arguments = [
                UML, "mem=1G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", "ipv6.disable=1",
                f"init={GUEST}", "con=null", "con0=null,fd:1", "ssl=null", f"uml_dir={directory}/",
                f"guest_root={ROOT}", f"guest_python={sys.executable}", f"guest_tests={'|'.join(TESTS)}",
            ]  # fmt: skip
            guest = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # Its memory is a file there; /dev/shm may be small, or not for execution.
                env={**os.environ, "TMPDIR": directory},
                start_new_session=True,
            )
            try:
                said, _ = guest.communicate(timeout=160)
            finally:
                # All of it: alone, it would leave the children that it traces.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(guest.pid, signal.SIGKILL)
                guest.wait()
        assert "RESULT 0" in said, said
        assert f"{len(TESTS)} passed" in said
