"""Playing a scenario with its own traffic, and looking at it: samples, verdicts, counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prfaas_net.congestion.detectors import DETECTORS, make_detector
from prfaas_net.congestion.samples import LinkSample
from prfaas_net.congestion.tcp_info import TcpInfo
from prfaas_net.congestion.verdict import Verdict
from tools.netlab.scenario import Stage
from tools.netlab.schedule import Player
from tools.netlab.settings import WAYS, Counters
from tools.netlab.traffic import Traffic

__all__ = ["DETECTOR", "Played", "Row", "play"]

# The one that links use.
DETECTOR = next(iter(DETECTORS))
# Between two looks at the sockets, and between two rows.
LOOK_S, ROW_S = 0.025, 0.5


@dataclass(frozen=True)
class Row:
    """The link over half a second.

    Attributes:
        at_s: end of it, since the start.
        received_bps: by the receiving application.
        rtt_ms: mean over the flows; ``retransmits`` in this time.
        happened: what the scenario did.
    """

    at_s: float
    verdict: Verdict
    received_bps: float
    rtt_ms: float
    retransmits: int
    happened: tuple[str, ...]


@dataclass
class Played:
    """What was seen.

    Attributes:
        samples: every look; their clock is that of ``began_s``.
        verdicts: one for each sample.
        counters: of the link, during this.
        events: (planned, actual, what), in seconds since the start.
    """

    began_s: float
    samples: list[LinkSample] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    counters: dict[str, Counters] = field(default_factory=dict)
    events: list[tuple[float, float, str]] = field(default_factory=list)

    def between(self, start_s: float, stop_s: float) -> list[LinkSample]:
        """Samples of a part of it, in seconds since the start."""
        return [sample for sample in self.samples if start_s <= sample.at_s - self.began_s < stop_s]


def _sample(traffic: Traffic) -> LinkSample:
    looked = traffic.look()
    rows = tuple(
        (int(name), TcpInfo(**{field: said[field] for field in TcpInfo._fields}))
        for name, said in looked.items()
        if len(said) > 1
    )
    at_s = max((said["at_s"] for said in looked.values()), default=time.monotonic())
    return LinkSample(at_s, True, sum(info.notsent_bytes for _, info in rows), rows)


def play(stage: Stage, *, detector: str = DETECTOR, on_row: Callable[[Row], None] | None = None) -> Played:
    """Play a scenario to its end.

    Args:
        on_row: called every half a second.
    """
    judge = make_detector(detector, stage.scenario.traffic.cc)
    before = stage.link.counters()
    with stage.start_traffic() as traffic, stage.play() as player:
        played = Played(player.began_s)
        got_at_s, got_bytes = traffic.received()
        row_at_s = player.began_s + ROW_S
        while time.monotonic() < player.began_s + stage.scenario.duration:
            played.samples.append(_sample(traffic))
            played.verdicts.append(judge.observe(played.samples[-1]))
            if time.monotonic() >= row_at_s:
                at_s, total = traffic.received()
                row = _row(played, player, (total - got_bytes) * 8 / (at_s - got_at_s))
                played.rows.append(row)
                if on_row is not None:
                    on_row(row)
                got_at_s, got_bytes, row_at_s = at_s, total, row_at_s + ROW_S
            time.sleep(LOOK_S)
        played.events = list(player.done)
    after = stage.link.counters()
    played.counters = {way: after[way] - before[way] for way in WAYS}
    return played


def _row(played: Played, player: Player, received_bps: float) -> Row:
    at_s = played.samples[-1].at_s - played.began_s
    since_s = played.rows[-1].at_s if played.rows else 0.0
    window = played.between(since_s, at_s + LOOK_S)
    flows = [info for _, info in window[-1].connections]
    first = [info for _, info in window[0].connections]
    return Row(
        at_s=at_s,
        verdict=played.verdicts[-1],
        received_bps=received_bps,
        rtt_ms=sum(info.rtt_us for info in flows) / max(1, len(flows)) / 1e3,
        retransmits=sum(info.total_retrans for info in flows) - sum(info.total_retrans for info in first),
        happened=tuple(what for _, actual_s, what in player.done if since_s <= actual_s < at_s),
    )
