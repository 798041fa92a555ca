"""What the arms of the closed loop have shown: figures for each phase, a timeline, a plot."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.errors import ConfigError
from tools.netlab.closed_loop import Played, Served

__all__ = ["draw", "need_matplotlib", "report", "timeline"]

# A point of the timelines covers so much, of requests several times that: few arrive.
BIN_S, REQUESTS_BIN_S = 0.5, 3.0
_TROUBLE = (LinkState.BUILDING, LinkState.CONGESTED, LinkState.DOWN)
_COLOURS = {"detector": "tab:blue", "frozen": "tab:red", "deaf": "tab:gray"}


def report(arms: Sequence[Played]) -> dict[str, Any]:
    """JSON-ready figures of every arm.

    ``ttft_s`` is what a client waits for the first token: for room on the decode node, for the prefill, and for the
    seal that brings it ahead of the KVCache. ``second_s`` is the first token that is decoded from the KVCache.
    """
    bodies = {played.arm: _arm(played) for played in arms}
    body: dict[str, Any] = {"experiment": vars(arms[0].experiment), "arms": bodies}
    if {"detector", "frozen"} <= bodies.keys():
        for name in ("ttft", "second"):
            ours, theirs = (bodies[arm]["event"][f"{name}_s_p90"] for arm in ("detector", "frozen"))
            body[f"{name}_p90_over_frozen"] = round(ours / theirs, 3)
    return body


def _arm(played: Played) -> dict[str, Any]:
    began_s, ended_s = played.event
    phases = {
        "before": (0.0, began_s),
        "event": (began_s, ended_s),
        "after": (ended_s, played.experiment.total_s),
    }
    served = [one for one in played.served if one.error is None]
    drains = [(verdict.at_s - played.start_s, played.drain_s(verdict)) for verdict in played.verdicts]
    return {
        "requests": len(played.served),
        "failed": [one.error for one in played.served if one.error is not None],
        "competitor_bps": round(played.competitor_bps),
        "event_s": [round(began_s, 3), round(ended_s, 3)],
        "seen_after_s": _seen_after_s(played),
        **{
            name: _phase([one for one in served if start <= one.at_s < stop], drains, start, stop)
            for name, (start, stop) in phases.items()
        },
        "held_before_bytes": _held_bytes([one for one in served if one.at_s < began_s], began_s),
        "drain_s_max": round(max((drain for _, drain in drains), default=0.0), 3),
        "exposed_s_max": round(max((one.exposed_s for one in served if one.offloaded), default=0.0), 3),
        "over_deadline_share": round(_share(drain > played.experiment.deadline_s for _, drain in drains), 4),
        "timeline": timeline(played),
    }


def _share(flags: Any) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0


def _phase(served: list[Served], drains: list[tuple[float, float]], start: float, stop: float) -> dict[str, Any]:
    longs = [one for one in served if one.long]
    drained = [drain for at_s, drain in drains if start <= at_s < stop]
    body: dict[str, Any] = {
        "requests": len(served),
        "offloaded_share": round(_share(one.offloaded for one in served), 3),
        "offloaded_share_of_long": round(_share(one.offloaded for one in longs), 3),
        "drain_s_max": round(max(drained, default=0.0), 3),
    }
    for name in ("reserved_s", "ttft_s", "second_s", "landed_s"):
        times = [getattr(one, name) for one in served]
        for q in (50, 90):
            body[f"{name}_p{q}"] = round(float(np.percentile(times, q)), 3) if times else None
    return body


def _held_bytes(served: list[Served], duration_s: float) -> int:
    """What the decode node held on the mean (Little's law): bytes times seconds from reservation to last token."""
    return round(sum(one.kv_bytes * (one.finished_s - one.reserved_s) for one in served) / duration_s)


def _seen_after_s(played: Played) -> float | None:
    """From the competitor's first byte to the first verdict that speaks against the link; None: none did."""
    began_s = played.start_s + played.event[0]
    seen = (verdict.at_s for verdict in played.verdicts if verdict.at_s >= began_s and verdict.state in _TROUBLE)
    first = next(seen, None)
    return None if first is None else round(first - began_s, 3)


def timeline(played: Played) -> dict[str, list[Any]]:
    """The link every half a second (the last verdict, mean goodput, most backlog), requests every three seconds."""
    link: dict[str, list[Any]] = {"at_s": [], "state": [], "goodput_bps": [], "available_bps": [], "drain_s": []}
    bins: dict[int, list[Any]] = {}
    for verdict in played.verdicts:
        if verdict.at_s >= played.start_s:
            bins.setdefault(int((verdict.at_s - played.start_s) / BIN_S), []).append(verdict)
    for number, verdicts in sorted(bins.items()):
        link["at_s"].append((number + 1) * BIN_S)
        link["state"].append(verdicts[-1].state.value)
        link["goodput_bps"].append(round(float(np.mean([verdict.goodput_bps for verdict in verdicts]))))
        link["available_bps"].append(verdicts[-1].available_bps and round(verdicts[-1].available_bps))
        link["drain_s"].append(round(max(played.drain_s(verdict) for verdict in verdicts), 3))
    groups: dict[int, list[Served]] = {}
    for one in played.served:
        if one.error is None:
            groups.setdefault(int(one.at_s / REQUESTS_BIN_S), []).append(one)
    rows = sorted(groups.items())
    return {
        **link,
        "arrived_s": [(number + 0.5) * REQUESTS_BIN_S for number, _ in rows],
        "offloaded_share": [round(_share(one.offloaded for one in group), 3) for _, group in rows],
        "request_s": [round(one.at_s, 3) for one in played.served if one.error is None],
        "ttft_s": [round(one.ttft_s, 3) for one in played.served if one.error is None],
        "second_s": [round(one.second_s, 3) for one in played.served if one.error is None],
    }


def need_matplotlib() -> None:
    """
    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib", do="pip install 'prfaas-net[plots]'")


def draw(body: dict[str, Any], path: Path) -> None:
    """One picture over all arms of a :func:`report`: verdict, goodput, offloaded share, token times, drain time.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(6, sharex=True, figsize=(8.0, 10.5))
    states = [state.value for state in LinkState]
    for name, arm in body["arms"].items():
        line, colour = arm["timeline"], _COLOURS[name]
        if name == "detector":
            axes[0].plot(line["at_s"], [states.index(state) for state in line["state"]], ".", color=colour)
        axes[1].plot(line["at_s"], [bps / 1e6 for bps in line["goodput_bps"]], color=colour, label=name)
        axes[2].plot(line["arrived_s"], line["offloaded_share"], color=colour)
        axes[3].plot(line["request_s"], line["ttft_s"], ".", color=colour)
        axes[4].plot(line["request_s"], line["second_s"], ".", color=colour)
        axes[5].plot(line["at_s"], line["drain_s"], color=colour)
    axes[0].set(ylabel="verdict (detector)", yticks=range(len(states)), yticklabels=states)
    axes[1].set(ylabel="KV goodput, Mbps")
    axes[1].legend(loc="upper left")
    axes[2].set(ylabel="offloaded share", ylim=(-0.05, 1.05))
    axes[3].set(ylabel="first token, s", yscale="log")
    axes[4].set(ylabel="second token, s", yscale="log")
    axes[5].axhline(body["experiment"]["deadline_s"], color="black", linestyle=":")
    axes[5].set(ylabel="backlog's drain, s", xlabel="time, s", yscale="symlog", ylim=(0, None))
    first = next(iter(body["arms"].values()))
    for one in axes:
        one.axvspan(*first["event_s"], color="0.92", zorder=0)
    figure.tight_layout()
    figure.savefig(path, dpi=72)
    plt.close(figure)
