"""Between two processes of one machine: rows beside iperf3, loop lateness, first byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from prfaas_net.bench import iperf3
from prfaas_net.bench.figures import Case, Comparison, Sample, mean_sample, middle
from prfaas_net.bench.meters import percentile
from prfaas_net.bench.pair import ENDS, Pair
from prfaas_net.bench.plan import Plan
from prfaas_net.bench.processes import Child
from prfaas_net.units import KiB, MiB

__all__ = ["first_byte", "loop_lateness", "rows"]

Progress = Callable[[str], None]
FIRST_BYTES = 64 * KiB
# Runs between two references: few, so that a machine whose speed changes from second to second changes for both.
RUNS_PER_REFERENCE = 2
# How long an idle process is watched while nothing else of the bench runs.
ALONE_S = 0.5


def _rotated(cases: Sequence[Case], by: int) -> Iterator[Case]:
    """Another first case every round, so that none always follows the same one."""
    by %= len(cases)
    yield from cases[by:]
    yield from cases[:by]


def _reference(connections: int, total_bytes: int, control: str | None = None) -> list[Sample]:
    if not iperf3.available():
        return []
    return [iperf3.measure(connections=connections, total_bytes=total_bytes, congestion_control=control)]


def rows(pair: Pair, plan: Plan, progress: Progress) -> list[dict[str, Any]]:
    """Every case, every round between two iperf3 runs with as many streams; and one a round with the congestion
    control that ours chose."""
    all_cases = [case for case in plan.cases if pair.has_tls or not case.tls]
    results = {case: Comparison(case) for case in all_cases}
    for round_number in range(plan.rounds):
        for connections, group in groupby(all_cases, key=lambda case: case.connections):
            cases = list(_rotated(list(group), round_number))
            before = _reference(connections, plan.run_bytes)
            for start in range(0, len(cases), RUNS_PER_REFERENCE):
                progress(f"loopback, round {round_number + 1} of {plan.rounds}, {connections} connections")
                some = cases[start : start + RUNS_PER_REFERENCE]
                samples = [pair.run(case, plan.run_bytes) for case in some]
                after = _reference(connections, plan.run_bytes)
                for case, sample in zip(some, samples, strict=True):
                    results[case].add(sample, mean_sample([*before, *after]))
                before = after
            alike = _reference(connections, plan.run_bytes, pair.congestion_control)
            for case in cases:
                results[case].alike += alike
    return [comparison.to_json() for comparison in results.values()]


def loop_lateness(pair: Pair, plan: Plan, progress: Progress) -> dict[str, Any]:
    """p99 of the ends' loops while bulk runs, of an idle process beside it, and of one on the machine alone."""
    for child in (pair.receiver, pair.sender):
        child.ask("checksums", on=True)
    bulk, idle, alone = [], [], []
    with Child(ENDS, "idle") as bystander:
        for number in range(plan.lateness_runs):
            progress(f"loop lateness, {number + 1} of {plan.lateness_runs}")
            bystander.ask("watch_loop")
            time.sleep(ALONE_S)
            alone.append(bystander.ask("loop_lateness")["p99_s"])
            pair.connect(2)
            watched = (bystander, pair.receiver, pair.sender)
            for child in watched:
                child.ask("watch_loop")
            pair.send(2 * plan.run_bytes, MiB)
            late = [child.ask("loop_lateness")["p99_s"] for child in watched]
            pair.hang_up()
            idle.append(late[0])
            bulk.append(max(late[1:]))
    return {
        "idle": middle([s * 1e3 for s in idle]),
        "bulk": middle([s * 1e3 for s in bulk]),
        "alone": middle([s * 1e3 for s in alone]),
    }


def first_byte(pair: Pair, plan: Plan, progress: Progress) -> dict[str, Any]:
    """64 KiB on a warm link, beside bare TCP round trips of as much."""
    progress("first byte")
    endpoint = pair.receiver.ask("echo", host=pair.place.host)["endpoint"]
    bare = pair.sender.ask("echo", endpoint=endpoint, block_bytes=FIRST_BYTES, n=plan.first_byte_runs)
    pair.connect(1)
    tickets = pair.receiver.ask("reserve_many", n=plan.first_byte_runs, n_bytes=FIRST_BYTES)["tickets"]
    sent = pair.sender.ask("send_many", tickets=tickets)
    landed = pair.receiver.ask("landed_many", transfers=[ticket["transfer_id"] for ticket in tickets])
    pair.hang_up()
    landed_s = [there - here for there, here in zip(landed["at_s"], sent["began_at_s"], strict=True)]
    took_s = sent["took_s"]

    def us(seconds: float) -> float:
        return round(seconds * 1e6, 1)

    return {
        "bytes": FIRST_BYTES,
        "landed_p50_us": us(percentile(landed_s, 0.5)),
        "landed_p99_us": us(percentile(landed_s, 0.99)),
        "confirmed_p50_us": us(percentile(took_s, 0.5)),
        "confirmed_p99_us": us(percentile(took_s, 0.99)),
        "tcp_p50_us": us(bare["p50_s"]),
        "tcp_p99_us": us(bare["p99_s"]),
        "tcp_from_loop_p50_us": us(bare["loop_p50_s"]),
        "landed_over_tcp": round(percentile(landed_s, 0.5) / bare["p50_s"], 2),
        "landed_over_tcp_from_loop": round(percentile(landed_s, 0.5) / bare["loop_p50_s"], 2),
    }
