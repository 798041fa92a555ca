"""One way of a link as queueing disciplines of Linux: netem for delay and loss, tbf under it for rate and queue, red
under that for marks. Pure: settings in, lines for ``tc -batch`` out; counters in as JSON.

The byte queue is tbf's: netem's own limit counts packets, and a super-packet of 64 KiB as one. A change is made in
place: packets that are under way stay there, unless the kinds of disciplines change.
"""

from __future__ import annotations

import math
from typing import Any

from prfaas_net.units import KiB
from tools.netlab.settings import Counters, Way

__all__ = ["TBF_BURST_S", "burst_bytes", "counters_of", "lines_for"]

# Never the limit: what may be on its way (5 Gbps for 80 ms are 33,000 packets).
_NETEM_PACKETS = 100_000
# A rate that no packet feels: with one, netem keeps packets in order when delays vary (sch_netem.c, netem_enqueue).
_IN_ORDER = "rate 100gbit"
# What tbf may send at once. It wakes up late by up to about a millisecond, and must catch up then.
TBF_BURST_S = 0.002
# From here on packets stay whole super-packets; below, tbf cuts what is longer than a burst, and counts it exactly.
_WHOLE_FROM_BPS = 50e6
_MIN_BURST_BYTES = 3200
# RED (sch_red(8)) marks more and more between its thresholds, and everything above the upper one.
_RED_WIDTH, _RED_AVPKT = 2, 1000


def burst_bytes(rate_bps: float) -> int:
    """Bucket of the token bucket filter."""
    floor = 64 * KiB if rate_bps >= _WHOLE_FROM_BPS else _MIN_BURST_BYTES
    return max(floor, math.ceil(rate_bps / 8 * TBF_BURST_S))


def _kinds(way: Way) -> tuple[bool, bool]:
    return way.rate_bps is not None, way.mark_bytes is not None


def lines_for(device: str, way: Way, before: Way | None) -> list[str]:
    """What brings a device to these settings.

    Args:
        before: the settings that are in force there; None: nothing is.
    """
    lines = []
    if before is not None and _kinds(before) != _kinds(way):
        lines.append(f"qdisc del dev {device} root")
    netem = f"limit {_NETEM_PACKETS} delay {way.delay_ms:.3f}ms {way.jitter_ms:.3f}ms"
    if way.loss:
        netem += f" loss random {way.loss * 100:.6f}%"
    lines.append(f"qdisc replace dev {device} root handle 1: netem {netem} {_IN_ORDER}")
    if way.rate_bps is not None:
        rate = f"rate {int(way.rate_bps)}bit burst {burst_bytes(way.rate_bps)}b limit {way.limit_bytes}b"
        lines.append(f"qdisc replace dev {device} parent 1:1 handle 2: tbf {rate}")
    if way.rate_bps is not None and way.mark_bytes is not None:
        low, high = way.mark_bytes, way.mark_bytes * _RED_WIDTH
        # The least that tc takes, which gives the average its least memory: it follows within two packets.
        burst = math.ceil(low / _RED_AVPKT)
        lines.append(
            f"qdisc replace dev {device} parent 2:1 handle 3: red limit {way.limit_bytes} min {low} max {high} "
            f"avpkt {_RED_AVPKT} burst {burst} probability 1 bandwidth {int(way.rate_bps)}bit ecn"
        )
    return lines


def counters_of(disciplines: list[dict[str, Any]]) -> Counters:
    """From ``tc -s -j qdisc show dev DEVICE``."""
    by_kind = {each["kind"]: each for each in disciplines}
    netem, tbf, red = (by_kind.get(kind, {}) for kind in ("netem", "tbf", "red"))
    # netem counts among its own what its child refused.
    dropped = tbf.get("drops", 0)
    return Counters(
        packets=netem.get("packets", 0),
        bytes=netem.get("bytes", 0),
        lost=max(0, netem.get("drops", 0) - dropped),
        dropped=dropped,
        marked=red.get("marked", 0),
    )
