"""Over emulated paths: what share of the path a transfer gets, and what a prefill exposes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas_net.bench import iperf3, rivals
from prfaas_net.bench.emulation import SENDER, emulate, why_not
from prfaas_net.bench.figures import middle
from prfaas_net.bench.pair import Pair, Place
from prfaas_net.bench.plan import Path, Plan
from prfaas_net.errors import PrfaasError
from prfaas_net.units import MiB

__all__ = ["ideal_exposed_s", "wan"]

Progress = Callable[[str], None]
# What the bench asks for where the host allows it; cubic at 0.1 % loss and 80 ms carries 2 % of a gigabit.
WANTED = "bbr"
RUN_LIMIT_S = 45.0
# Raised buffers are so many bandwidth-delay products; what "prfaas doctor" recommends.
BUFFERS = 4
PEER_PIECE_BYTES = 16 * MiB


def _congestion_control() -> str | None:
    with open("/proc/sys/net/ipv4/tcp_available_congestion_control", encoding="ascii") as file:
        return WANTED if WANTED in file.read().split() else None


def ideal_exposed_s(chunks: Sequence[int], *, prefill_s: float, rate_bps: float, rtt_s: float) -> float:
    """What a perfect sender exposes: what is left at the end of prefill, at the path's rate, and one round trip.

    Chunks become ready evenly over the prefill; the path carries each as soon as it is ready and the path is free.
    """
    free_at = 0.0
    for index, n_bytes in enumerate(chunks):
        free_at = max(free_at, prefill_s * (index + 1) / len(chunks)) + n_bytes * 8 / rate_bps
    return free_at - prefill_s + rtt_s


def wan(
    plan: Plan, progress: Progress, notes: list[str], *, peer_python: str | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of goodput, rows of exposed time); empty, with a note, where no path can be emulated.

    Args:
        peer_python: also run the peers that this interpreter has.
    """
    reason = why_not()
    if reason is not None:
        notes.append(f"no emulated path: {reason}")
        return [], []
    if _congestion_control() is None:
        notes.append(f"{WANTED} is not available: emulated paths use the host's default (modprobe tcp_{WANTED})")
    goodput, exposed = [], []
    for path in plan.paths:
        try:
            places = sorted({raised for _, raised in path.ends})
            for raised in places:
                with emulate(path, buffer_bytes=BUFFERS * path.bdp_bytes if raised else None) as place:
                    rows = _goodput(place, path, plan, raised, progress)
                    last = raised == places[-1]
                    if last and peer_python is not None and path is plan.paths[0]:
                        rows[-1]["peers"] |= _peers(place, path, plan, peer_python, progress)
                    goodput += rows
                    exposed += _exposed(place, path, plan, progress) if last else []
        except PrfaasError as error:
            notes.append(f"path of {_mbps(path)}, {path.rtt_s * 1e3:g} ms: {error.line()}")
    return goodput, exposed


def _mbps(path: Path) -> str:
    return f"{path.rate_bps / 1e6:g} Mbps"


def _row(path: Path) -> dict[str, Any]:
    return {"rate_bps": path.rate_bps, "rtt_ms": round(path.rtt_s * 1e3, 3), "loss": path.loss}


def _whole_mib(path: Path, seconds: float) -> int:
    return max(1, round(path.rate_bps / 8 * seconds / MiB)) * MiB


@dataclass
class _End:
    """Rounds of one number of connections, as shares of the path's rate."""

    connections: int
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    iperf3: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "connections": self.connections,
            "goodput_over_path": middle(self.warm),
            "goodput_over_path_range": [round(min(self.warm), 3), round(max(self.warm), 3)],
            "first_transfer_over_path": middle(self.cold),
            "peers": {"iperf3": middle(self.iperf3)} if self.iperf3 else {},
        }


def _goodput(place: Place, path: Path, plan: Plan, raised: bool, progress: Progress) -> list[dict[str, Any]]:
    """A first transfer on a fresh link, a second one on the warm link, iperf3 in its steady state."""
    total, control = _whole_mib(path, plan.path_s), _congestion_control()
    ends = [_End(n) for n, wants_raised in path.ends if wants_raised is raised]
    for number in range(plan.path_rounds):
        for end in ends:
            progress(f"path of {_mbps(path)}, round {number + 1} of {plan.path_rounds}, {end.connections} connections")
            with Pair(place) as pair:
                pair.connect(end.connections, congestion_control=control)
                for shares in (end.cold, end.warm):
                    shares.append(total * 8 / pair.send(total, MiB)["took_s"] / path.rate_bps)
                pair.hang_up()
            if iperf3.available():
                reference = iperf3.measure(
                    connections=end.connections, steady_s=plan.path_s, host=place.host, congestion_control=control,
                    server_prefix=place.receiver_prefix, client_prefix=place.sender_prefix, limit_s=RUN_LIMIT_S,
                )  # fmt: skip
                end.iperf3.append(reference.goodput_bps / path.rate_bps)
    shared = {"congestion_control": control, "buffers": "raised" if raised else "host", "bytes": total}
    return [{**_row(path), **end.to_json(), **shared} for end in ends]


def _peers(place: Place, path: Path, plan: Plan, python: str, progress: Progress) -> dict[str, float | None]:
    """Each peer once, after a smaller transfer that warms it; None if it failed."""
    total, warm = (
        max(1, _whole_mib(path, seconds) // PEER_PIECE_BYTES) * PEER_PIECE_BYTES
        for seconds in (plan.path_s, plan.path_s / 4)
    )
    shares: dict[str, float | None] = {}
    for name in rivals.installed(python):
        progress(f"path of {_mbps(path)}, peer {name}")
        try:
            sample = rivals.measure(name, python, total, place=place, here=SENDER, warm_bytes=warm)
            shares[name] = round(sample.goodput_bps / path.rate_bps, 3)
        except PrfaasError:
            shares[name] = None
    return shares


def _exposed(place: Place, path: Path, plan: Plan, progress: Progress) -> list[dict[str, Any]]:
    """Prefills on a warm link of four connections."""
    rows = []
    for prefill_s, load in plan.exposures:
        kv_bytes = _whole_mib(path, prefill_s * load)
        ideal_s = ideal_exposed_s(
            [MiB] * (kv_bytes // MiB), prefill_s=prefill_s, rate_bps=path.rate_bps, rtt_s=path.rtt_s
        )
        exposed_s = []
        for number in range(plan.path_rounds):
            progress(f"path of {_mbps(path)}, prefill of {prefill_s:g} s, round {number + 1} of {plan.path_rounds}")
            with Pair(place) as pair:
                pair.connect(4, congestion_control=_congestion_control())
                pair.send(_whole_mib(path, plan.path_s / 2), MiB)
                exposed_s.append(pair.prefill(kv_bytes, MiB, prefill_s)["exposed_s"])
                pair.hang_up()
        middle_s = middle(exposed_s) or 0.0
        rows.append(
            {
                **_row(path),
                "kv_bytes": kv_bytes,
                "prefill_s": prefill_s,
                "exposed_s": middle_s,
                "exposed_range_s": [round(min(exposed_s), 3), round(max(exposed_s), 3)],
                "ideal_s": round(ideal_s, 3),
                "exposed_over_ideal": round(middle_s / ideal_s, 3),
            }
        )
    return rows
