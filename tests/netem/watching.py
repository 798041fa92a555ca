"""A sender on an impaired link, watched as a link watches its own sockets."""

from __future__ import annotations

import gzip
import os
import random
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from prfaas_net.congestion.looking import LOOK_S
from prfaas_net.congestion.path import PathDetector
from prfaas_net.congestion.samples import LinkSample, LogHead, Mark, write_head, write_mark, write_sample
from prfaas_net.congestion.signals import SignalTracker
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.congestion.verdict import LinkState, Verdict
from tools.netlab import Link, Load

__all__ = ["RECORD", "Watched", "states"]

# Names a directory in which every scenario leaves its recording; tests/congestion/data was made with it.
RECORD = "NETEM_RECORD"


class Watched:
    """Four paced flows from ``a`` to ``b``, a detector, and all that was seen. A context manager.

    Args:
        pace_bps: of all flows together; None: they are not paced.
        load: anything else that each flow does.
        receiver: options of the receiving side.
    """

    FLOWS = 4

    def __init__(
        self,
        link: Link,
        *,
        cc: str = "cubic",
        pace_bps: float | None,
        receiver: dict[str, Any] | None = None,
        **load: Any,
    ) -> None:
        each = Load(cc=cc, rate_bps=None if pace_bps is None else pace_bps / self.FLOWS, **load)
        self._traffic = link.traffic("ab", each, flows=self.FLOWS, **(receiver or {}))
        self._detector = PathDetector(cc)
        self._random = random.Random(7)
        self._cc = cc
        self._marks: list[Mark] = []
        self.samples: list[LinkSample] = []
        self.verdicts: list[Verdict] = []

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._traffic.close()
        directory = os.environ.get(RECORD)
        if directory:
            name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].split(" ")[0].removeprefix("test_")
            self._save(Path(directory) / f"{name}.jsonl.gz", name)

    def _save(self, path: Path, name: str) -> None:
        entries: list[LinkSample | Mark] = [*self.samples, *self._marks]
        entries.sort(key=lambda entry: entry.at_s)
        with gzip.GzipFile(path, "wb", mtime=0) as file:
            file.write(write_head(LogHead(self._cc, {"scenario": name})))
            file.writelines(write_mark(e) if isinstance(e, Mark) else write_sample(e) for e in entries)

    def mark(self, what: str) -> None:
        """Say in the recording what happens now."""
        self._marks.append(Mark(time.monotonic(), what))

    def watch(self, seconds: float) -> list[Verdict]:
        """Look for so long; the verdicts of that time."""
        ends_s, before = time.monotonic() + seconds, len(self.verdicts)
        while time.monotonic() < ends_s:
            flows = self._traffic.look()
            rows = [
                (int(name), TcpInfo(**{field: flow[field] for field in TcpInfo._fields}))
                for name, flow in flows.items()
                if "rtt_us" in flow
            ]
            at_s = max(flow["at_s"] for flow in flows.values())
            sample = LinkSample(at_s, True, sum(info.notsent_bytes for _, info in rows), tuple(rows))
            self.samples.append(sample)
            self.verdicts.append(self._detector.observe(sample))
            time.sleep(self._random.uniform(*LOOK_S))
        return self.verdicts[before:]

    def watch_until(self, wanted: Callable[[Verdict], bool], *, within_s: float = 15.0) -> list[Verdict]:
        """Look until a verdict is as wanted; the verdicts of that time."""
        ends_s, before = time.monotonic() + within_s, len(self.verdicts)
        while not self.verdicts[before:] or not wanted(self.verdicts[-1]):
            assert time.monotonic() < ends_s, f"not within {within_s:g} s: {states(self.verdicts[before:])}"
            self.watch(0.05)
        return self.verdicts[before:]

    def totals(self, verdicts: list[Verdict]) -> dict[str, float]:
        """Of the time of these verdicts: greatest smoothed round trip, bytes sent, again, segments marked."""
        first_s, last_s = verdicts[0].at_s, verdicts[-1].at_s
        tracker = SignalTracker("")
        steps = [step for sample in self.samples if (step := tracker.add(sample)) and first_s <= step.at_s <= last_s]
        return {
            "rtt_s": max((step.srtt_s or 0.0 for step in steps), default=0.0),
            "sent_bytes": sum(step.sent_bytes for step in steps),
            "retrans_bytes": sum(step.retrans_bytes for step in steps),
            "delivered_bytes": sum(step.delivered_bytes for step in steps),
            "marked": sum(step.marked for step in steps),
        }


def states(verdicts: list[Verdict]) -> list[LinkState]:
    """States in order, each once as long as it lasted."""
    return [state for state, _ in groupby(verdict.state for verdict in verdicts)]
