"""Making the congestion bench's recordings: a few paths side by side, one recording after the other on each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from prfaas_net.bench.congestion_cases import CongestionPlan, Spot, cases_of
from prfaas_net.bench.emulation import emulate
from prfaas_net.bench.processes import Child
from prfaas_net.units import MiB

__all__ = ["record_all"]

FLOWS = "prfaas_net.bench.congestion_flows"
# Four queues of the longest path, so that no buffer is the limit.
BUFFER_BYTES = 64 * MiB
# Side by side: what a path of 200 Mbps takes of a core is a tenth.
AT_ONCE = 3
RUN_LIMIT_S = 60.0


def record_all(
    plan: CongestionPlan, directory: Path, progress: Callable[[str], None], *, at_once: int = AT_ONCE
) -> None:
    """Record every case of the plan that the directory does not have yet, as ``NAME.jsonl.gz``.

    Raises:
        PrfaasError: the host does not allow an emulated path, or a recording failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(_record_spot, plan, spot, directory, progress) for spot in plan.spots]:
            done.result()


def _record_spot(plan: CongestionPlan, spot: Spot, directory: Path, progress: Callable[[str], None]) -> None:
    missing = [(name, case) for name, case in cases_of(plan, spot) if not (directory / f"{name}.jsonl.gz").exists()]
    if not missing:
        return
    with emulate(spot.path, buffer_bytes=BUFFER_BYTES, queue_bytes=spot.queue_bytes) as place:
        receiver = Child(FLOWS, "receive", prefix=place.receiver_prefix)
        try:
            endpoint = receiver.ask("listen", host=place.host)["endpoint"]
            with Child(FLOWS, "send", prefix=place.sender_prefix) as sender:
                for name, case in missing:
                    progress(name)
                    unfinished = directory / f"{name}.part"
                    sender.ask(
                        "record", case=asdict(case), endpoint=endpoint, path=str(unfinished), timeout_s=RUN_LIMIT_S
                    )
                    unfinished.rename(directory / f"{name}.jsonl.gz")
        finally:
            receiver.close()
