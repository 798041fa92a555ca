"""Runs the peers that are installed, each in a process pair of its own, in turn with our own transport."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prfaas_net.bench.figures import Case, Sample, middle
from prfaas_net.bench.pair import Pair, Place
from prfaas_net.bench.plan import Plan
from prfaas_net.bench.processes import Child
from prfaas_net.errors import CorruptionError, PrfaasError
from prfaas_net.units import GiB, MiB

__all__ = ["PEERS", "installed", "measure", "rows"]

# Name: what has to be importable.
PEERS = {"mooncake": "mooncake.engine", "nixl": "nixl._api", "gloo": "torch.distributed", "pyzmq": "zmq"}
START_S, RUN_S = 60.0, 90.0


def installed(python: str) -> list[str]:
    """Peers that this interpreter can import."""

    def has(module: str) -> bool:
        command = [python, "-c", f"import {module}"]
        return subprocess.run(command, capture_output=True, check=False, timeout=START_S).returncode == 0

    return [name for name, module in PEERS.items() if has(module)]


def measure(
    name: str,
    python: str,
    total_bytes: int,
    *,
    place: Place | None = None,
    here: str = "127.0.0.1",
    warm_bytes: int = 0,
) -> Sample:
    """One run of a peer, after so many bytes on the same connections that do not count.

    Raises:
        PrfaasError: it failed, does not answer, or delivered something else.
    """
    place = place or Place()
    module = f"prfaas_net.bench.peers.{name}"
    env = {"PRFAAS_BENCH_DEVICE": place.device}
    with (
        Child(
            module, "receive", place.host, place.host, prefix=place.receiver_prefix, python=python, env=env
        ) as receiver,
        Child(module, "send", place.host, here, prefix=place.sender_prefix, python=python, env=env) as sender,
    ):
        offer = receiver.ask("offer", timeout_s=START_S)
        receiver.tell("join", offer=offer)
        sender.ask("join", offer=offer, timeout_s=START_S)
        receiver.answer(timeout_s=START_S)
        for n_bytes in filter(None, (warm_bytes, total_bytes)):
            receiver.ask("receive", n_bytes=n_bytes, timeout_s=START_S)
            sent = sender.ask("send", n_bytes=n_bytes, timeout_s=RUN_S)
            receiver.answer(timeout_s=RUN_S)
            landed = receiver.ask("landed", n_bytes=n_bytes, timeout_s=START_S)
            if landed["digest"] != sent["digest"]:
                raise CorruptionError(f"{name} delivered something else")
    gib = total_bytes / GiB
    return Sample(total_bytes * 8 / sent["took_s"], sent["cpu_s"] / gib, landed["cpu_s"] / gib)


@dataclass
class _Rounds:
    name: str
    theirs: list[Sample] = field(default_factory=list)
    ours: list[Sample] = field(default_factory=list)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        ratios = [o.goodput_bps / t.goodput_bps for o, t in zip(self.ours, self.theirs, strict=True)]
        cpu = [o.cpu_s_per_gib / t.cpu_s_per_gib for o, t in zip(self.ours, self.theirs, strict=True)]
        return {
            "name": self.name,
            "goodput_bps": middle([s.goodput_bps for s in self.theirs], 0),
            "ours_over_peer": middle(ratios),
            "ours_over_peer_range": [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None,
            "cpu_s_per_gib": middle([s.cpu_s_per_gib for s in self.theirs]),
            "our_cpu_over_peer": middle(cpu),
            "rounds": len(ratios),
            "note": self.note,
        }


def rows(
    pair: Pair, plan: Plan, python: str | None, progress: Callable[[str], None], notes: list[str]
) -> list[dict[str, Any]]:
    """Each peer right after a run of ours: one connection, 1 MiB chunks, checksums on."""
    python = python or sys.executable
    found = installed(python)
    for name in PEERS.keys() - found:
        notes.append(f"peer {name} is not installed for {python}")
    rounds = [_Rounds(name) for name in found]
    for number in range(plan.peer_rounds):
        for each in rounds:
            progress(f"peer {each.name}, round {number + 1} of {plan.peer_rounds}")
            ours = pair.run(Case(1, MiB, True), plan.peer_bytes)
            try:
                theirs = measure(each.name, python, plan.peer_bytes)
            except PrfaasError as error:
                each.note = error.line()
                continue
            each.ours.append(ours)
            each.theirs.append(theirs)
    return [each.to_json() for each in rounds]
