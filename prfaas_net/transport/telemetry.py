"""Looking at a link's sockets at jittered intervals: samples to the log, verdicts to whoever wants them, a budget back.

What costs is the system calls, 0.7 us each, and what Python makes of them. So a link with nothing to do is looked at
four times a second, and one with many connections a little less often than one with few.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from prfaas_net.clock import Clock
from prfaas_net.congestion.budget import BudgetFollower
from prfaas_net.congestion.detector import Detector
from prfaas_net.congestion.detectors import make_detector
from prfaas_net.congestion.looking import VerdictNews, look_within_s
from prfaas_net.congestion.probe import ProbeResult
from prfaas_net.congestion.samples import LinkSample, LogHead, write_head, write_sample
from prfaas_net.congestion.verdict import UNKNOWN, LinkState, Verdict
from prfaas_net.transport.stats import read_tcp_info
from prfaas_net.transport.streams import Stream
from prfaas_net.units import MiB

__all__ = ["LinkTelemetry", "OnVerdict", "TelemetryLog"]

OnVerdict = Callable[[Verdict], None]

LOG_BYTES, LOG_BUFFER_BYTES = 64 * MiB, 1 << 16


class TelemetryLog:
    """Samples of one link in a file that is begun anew when it is full; the one before it is kept."""

    def __init__(self, path: Path, head: LogHead, *, limit_bytes: int = LOG_BYTES) -> None:
        self._path = path
        self._head = head
        self._limit_bytes = limit_bytes
        self._begin()

    def _begin(self) -> None:
        self._file = open(self._path, "wb", buffering=LOG_BUFFER_BYTES)  # noqa: SIM115 - closed in close()
        self._written = self._file.write(write_head(self._head))

    def write(self, sample: LinkSample) -> None:
        """Append a sample."""
        self._written += self._file.write(write_sample(sample))
        if self._written >= self._limit_bytes:
            self._file.close()
            self._path.replace(self._path.with_suffix(".old" + self._path.suffix))
            self._begin()

    def close(self) -> None:
        """Write out what is buffered."""
        self._file.close()


class LinkTelemetry:
    """The looks of one link; from :meth:`start` to :meth:`stop`, on the running loop.

    Args:
        streams: the data connections that are up, by number.
        alive, backlog_bytes: of the link.
        in_use: whether it has a transfer that has not ended.
        on_budget: paces the link, if it has a budget.
        log_directory: where to record, or None.
    """

    def __init__(
        self,
        *,
        streams: Callable[[], Iterable[tuple[int, Stream]]],
        alive: Callable[[], bool],
        backlog_bytes: Callable[[], int],
        in_use: Callable[[], bool],
        clock: Clock,
        budget_bps: int | None,
        on_budget: Callable[[int | None], None],
        detector: str = "prfaas",
        log_directory: Path | None = None,
    ) -> None:
        self.verdict = UNKNOWN
        self.on_verdict: OnVerdict | None = None
        self._streams = streams
        self._alive = alive
        self._backlog_bytes = backlog_bytes
        self._in_use = in_use
        self._clock = clock
        self._follower = None if budget_bps is None else BudgetFollower(budget_bps)
        self._pace_bps = budget_bps
        self._on_budget = on_budget
        self._detector_name = detector
        self._detector: Detector | None = None
        self._log_directory = log_directory
        self._log: TelemetryLog | None = None
        self._random = random.Random()
        self._timer: asyncio.Handle | None = None
        self._news = VerdictNews()

    @property
    def budget_bps(self) -> int | None:
        """What the link is held to now, probes of a moment not counted; None if it is not."""
        return None if self._follower is None else self._follower.budget_bps

    @property
    def probed(self) -> ProbeResult | None:
        """What the last probe has found, if there was one."""
        return None if self._follower is None else self._follower.probe.last

    def set_budget(self, budget_bps: int | None) -> None:
        """Another egress budget from now on, at its full; None: none."""
        self._follower = None if budget_bps is None else BudgetFollower(budget_bps)
        self._pace_bps = budget_bps
        self._on_budget(budget_bps)

    def start(self) -> None:
        """Look from now on."""
        self._timer = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def end(self) -> None:
        """The link is dead: say so, and look no more."""
        self.look()
        self.stop()

    def wake(self) -> None:
        """There is something to send: an idle link is looked at now."""
        if self._timer is not None and self.verdict.state is LinkState.IDLE:
            self._timer.cancel()
            self.start()

    def _tick(self) -> None:
        n = self.look()
        bounds = look_within_s(self.verdict.state, in_use=self._in_use(), connections=n)
        self._timer = asyncio.get_running_loop().call_later(self._random.uniform(*bounds), self._tick)

    def look(self) -> int:
        """Look once; how many connections there were."""
        rows = []
        for number, stream in self._streams():
            info = read_tcp_info(stream.sock)
            if info is not None:
                if self._detector is None:
                    self._begin(stream.sock)
                rows.append((number, info))
        if self._detector is not None:
            sample = LinkSample(self._clock.now(), self._alive(), self._backlog_bytes(), tuple(rows))
            if self._log is not None:
                self._log.write(sample)
            self._judge(self._detector.observe(sample))
        return len(rows)

    def _begin(self, sock: socket.socket) -> None:
        """The first connection says which congestion control they have."""
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
        self._detector = make_detector(self._detector_name, name)
        if self._log_directory is not None:
            self._log_directory.mkdir(parents=True, exist_ok=True)
            path = self._log_directory / f"link-{self._random.getrandbits(32):08x}.jsonl"
            self._log = TelemetryLog(path, LogHead(name, {"peer": str(sock.getpeername())}))

    def _judge(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if self._follower is not None:
            pace_bps = self._follower.follow(verdict, now=verdict.at_s)
            if pace_bps != self._pace_bps:
                self._pace_bps = pace_bps
                self._on_budget(pace_bps)
        if self._news.is_news(verdict) and self.on_verdict is not None:
            self.on_verdict(verdict)
