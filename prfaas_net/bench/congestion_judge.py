"""What each detector made of the recordings: how soon, how often for nothing, how far off."""

from __future__ import annotations

import gzip
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prfaas_net.bench.congestion_cases import WARM_S
from prfaas_net.bench.meters import percentile
from prfaas_net.congestion.detectors import DETECTORS, make_detector
from prfaas_net.congestion.samples import LinkSample, Mark, read_log
from prfaas_net.congestion.signals import SignalTracker
from prfaas_net.congestion.verdict import LinkState, Verdict

__all__ = ["Recording", "judge", "read_recording"]

# Both ends of a saturated path carry this share of its rate as payload.
PAYLOAD_SHARE = 1448 / 1500
# Overload: we and the others have sent more than the path carries, over so long.
OVERLOAD_WINDOW_S = 0.05
# An estimate is held against what the link then carried, from then on for so long.
AHEAD_S = 0.5
ALARM, TROUBLE = LinkState.CONGESTED, (LinkState.BUILDING, LinkState.CONGESTED)


@dataclass
class Recording:
    """One log, and what only the recorder knew of it."""

    congestion_control: str
    about: dict[str, Any]
    samples: list[LinkSample]
    others: list[Mark]
    start_s: float | None = None
    stop_s: float | None = None

    @property
    def overload_s(self) -> float | None:
        """When more was sent than the path carries; before that there is nothing to be found."""
        if self.start_s is None:
            return None
        ours, others = _sent(self.samples), [(m.at_s, m.value) for m in self.others]
        limit_bps = self.about["rate_bps"] * PAYLOAD_SHARE
        for at_s, _ in others:
            if _mean(others, at_s) + _mean(ours, at_s) > limit_bps:
                return at_s - OVERLOAD_WINDOW_S / 2
        return None


def read_recording(path: Path) -> Recording:
    """A recording from its file."""
    with gzip.open(path, "rb") as file:
        head, entries = read_log(file)
        found = Recording(head.congestion_control, head.about, [], [])
        for entry in entries:
            if isinstance(entry, LinkSample):
                found.samples.append(entry)
            elif entry.what == "competitor-start":
                found.start_s = entry.at_s
            elif entry.what == "competitor-stop":
                found.stop_s = entry.at_s
            else:
                found.others.append(entry)
    return found


def _sent(samples: Sequence[LinkSample]) -> list[tuple[float, float]]:
    """(time, bits a second since the look before)."""
    tracker = SignalTracker("")
    steps = (tracker.add(sample) for sample in samples)
    return [(step.at_s, 8 * step.sent_bytes / step.dt_s) for step in steps if step is not None]


def _mean(rates: Sequence[tuple[float, float]], at_s: float) -> float:
    within = [rate for time_s, rate in rates if at_s - OVERLOAD_WINDOW_S < time_s <= at_s]
    return sum(within) / len(within) if within else 0.0


@dataclass
class _Cell:
    """All recordings of one row."""

    detect_s: list[float] = field(default_factory=list)
    first_byte_s: list[float] = field(default_factory=list)
    overload_s: list[float] = field(default_factory=list)
    clear_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    missed: int = 0
    runs: int = 0
    alarms: int = 0
    quiet_s: float = 0.0


def judge(recordings: Iterable[Recording], detectors: Sequence[str] = tuple(DETECTORS)) -> list[dict[str, Any]]:
    """A row for each control, round trip, queue, competitor and detector."""
    cells: dict[tuple[Any, ...], _Cell] = defaultdict(_Cell)
    for recording in recordings:
        about, overload_s = recording.about, recording.overload_s
        for name in detectors:
            key = (recording.congestion_control, about["rtt_ms"], about["queue_bdp"], about["competitor"], name)
            _judge_one(cells[key], recording, name, overload_s)
    return [_row(key, cell) for key, cell in sorted(cells.items(), key=lambda item: tuple(map(str, item[0])))]


def _judge_one(cell: _Cell, recording: Recording, name: str, overload_s: float | None) -> None:
    detector = make_detector(name, recording.congestion_control)
    verdicts = [detector.observe(sample) for sample in recording.samples]
    cell.runs += 1
    begin_s = recording.samples[0].at_s + WARM_S
    end_s = recording.start_s if recording.start_s is not None else recording.samples[-1].at_s
    cell.alarms += _alarms(verdicts, begin_s, end_s)
    cell.quiet_s += end_s - begin_s
    cell.errors += _errors(recording, verdicts)
    if recording.start_s is None or recording.stop_s is None:
        return
    onset_s = recording.start_s if overload_s is None else overload_s
    cell.kept.append(_kept(recording, recording.start_s, recording.stop_s))
    # An alarm that is already on says nothing of what comes.
    during = [v for v in verdicts if recording.start_s <= v.at_s < recording.stop_s]
    found = next((v for v in during if v.state is ALARM and v.since_s >= recording.start_s), None)
    cell.overload_s.append(onset_s - recording.start_s)
    if found is None:
        cell.missed += 1
        return
    cell.detect_s.append(found.at_s - onset_s)
    cell.first_byte_s.append(found.at_s - recording.start_s)
    cell.again.append(_retransmitted(recording, recording.start_s, found.at_s))
    cleared = next((v.at_s for v in verdicts if v.at_s >= recording.stop_s and v.state not in TROUBLE), None)
    if cleared is not None:
        cell.clear_s.append(cleared - recording.stop_s)


def _alarms(verdicts: Sequence[Verdict], begin_s: float, end_s: float) -> int:
    """Times that an alarm went on."""
    within = [v.state is ALARM for v in verdicts if begin_s <= v.at_s < end_s]
    return sum(now and not before for before, now in zip([False, *within], within, strict=False))


def _errors(recording: Recording, verdicts: Sequence[Verdict]) -> list[float]:
    """Of estimates, against what was delivered in the next half second; where others were there if there were any."""
    begin_s, end_s = recording.samples[0].at_s + WARM_S, recording.samples[-1].at_s
    if recording.start_s is not None and recording.stop_s is not None:
        begin_s, end_s = recording.start_s, recording.stop_s
    tracker, delivered, total = SignalTracker(recording.congestion_control), [], 0.0
    for sample in recording.samples:
        step = tracker.add(sample)
        total += step.delivered_bytes if step is not None else 0
        delivered.append((sample.at_s, total))
    errors, ahead = [], 0
    for (at_s, bytes_then), verdict in zip(delivered, verdicts, strict=True):
        while ahead < len(delivered) and delivered[ahead][0] < at_s + AHEAD_S:
            ahead += 1
        if ahead == len(delivered):
            break
        if begin_s <= at_s < end_s - AHEAD_S and verdict.available_bps is not None:
            carried_bps = 8 * (delivered[ahead][1] - bytes_then) / (delivered[ahead][0] - at_s)
            if carried_bps > 0:
                errors.append(abs(verdict.available_bps - carried_bps) / carried_bps)
    return errors


def _retransmitted(recording: Recording, begin_s: float, end_s: float) -> float:
    """Share of the bytes sent meanwhile that were sent again."""
    tracker, sent, again = SignalTracker(recording.congestion_control), 0, 0
    for sample in recording.samples:
        step = tracker.add(sample)
        if step is not None and begin_s <= step.at_s <= end_s:
            sent, again = sent + step.sent_bytes, again + step.retrans_bytes
    return again / sent if sent else 0.0


def _kept(recording: Recording, begin_s: float, end_s: float) -> float:
    """Share of our pace that arrived meanwhile: what others have left us."""
    tracker, arrived = SignalTracker(recording.congestion_control), 0
    for sample in recording.samples:
        step = tracker.add(sample)
        if step is not None and begin_s <= step.at_s <= end_s:
            arrived += step.delivered_bytes
    paced_bps: float = recording.about["load"] * recording.about["rate_bps"]
    return 8 * arrived / (end_s - begin_s) / paced_bps


def _row(key: tuple[Any, ...], cell: _Cell) -> dict[str, Any]:
    control, rtt_ms, queue_bdp, competitor, detector = key
    middle = _ms(cell.detect_s, 0.5)
    return {
        "cc": control,
        "rtt_ms": rtt_ms,
        "queue_bdp": queue_bdp,
        "competitor": competitor,
        "detector": detector,
        "detect_ms_p50": middle,
        "detect_ms_p90": _ms(cell.detect_s, 0.9),
        "detect_rtts_p50": None if middle is None else round(middle / rtt_ms, 2),
        "detect_from_first_byte_ms_p50": _ms(cell.first_byte_s, 0.5),
        "overload_ms_p50": _ms(cell.overload_s, 0.5),
        "missed": cell.missed,
        "runs": cell.runs,
        "false_alarms": cell.alarms,
        "quiet_s": round(cell.quiet_s, 1),
        "false_alarms_per_hour": round(3600 * cell.alarms / cell.quiet_s, 1) if cell.quiet_s else None,
        "clear_ms_p50": _ms(cell.clear_s, 0.5),
        "bandwidth_error_p50": round(percentile(cell.errors, 0.5), 3) if cell.errors else None,
        "kept_share_p50": round(percentile(cell.kept, 0.5), 3) if cell.kept else None,
        "retransmitted_share_at_detection": round(percentile(cell.again, 0.5), 5) if cell.again else None,
    }


def _ms(seconds: list[float], share: float) -> float | None:
    return round(1e3 * percentile(seconds, share), 1) if seconds else None
