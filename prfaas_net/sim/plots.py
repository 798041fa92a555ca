"""Plots of a comparison, as PNG. matplotlib is an optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import DEFAULT_POLICY
from prfaas_net.sim.compare import ORACLE, Cell, run_cell
from prfaas_net.sim.result import BUCKET_S, SimResult

__all__ = ["draw"]

# Requests of the one run whose details are drawn.
DETAIL_REQUESTS = 4000


def draw(cells: Sequence[Cell], directory: Path, report: dict[str, Any]) -> list[Path]:
    """TTFT CDF, throughput against SLO, goodput against load, link use, offloaded share and threshold over time.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ConfigError("plots need matplotlib", do="pip install 'prfaas-net[plots]'") from error
    directory.mkdir(parents=True, exist_ok=True)
    runs = _runs(cells)
    paths = [
        _cdf(cells, runs, directory, plt),
        _within_limit(cells, runs, directory, plt),
        _goodput(report, directory, plt),
        _timeline(cells, directory, plt),
    ]
    plt.close("all")
    return paths


def _runs(cells: Sequence[Cell]) -> dict[str, SimResult]:
    """Every policy at the highest load of the first workload and link."""
    first, load = cells[0], max(cell.load for cell in cells)
    shorter = replace(first, load=load, requests=min(first.requests, DETAIL_REQUESTS))
    return {name: run_cell(replace(shorter, policy=name))[1] for name in dict.fromkeys(cell.policy for cell in cells)}


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path


def _cdf(cells: Sequence[Cell], runs: dict[str, SimResult], directory: Path, plt: Any) -> Path:
    """How TTFT is distributed."""
    figure, axes = plt.subplots()
    for name, result in runs.items():
        times = np.sort(np.asarray(result.ttft_s))
        axes.plot(times, np.arange(1, len(times) + 1) / len(times), label=name)
    title = _title(cells[0], max(cell.load for cell in cells))
    axes.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log", title=title)
    axes.legend()
    return _save(figure, directory / "ttft_cdf.png")


def _within_limit(cells: Sequence[Cell], runs: dict[str, SimResult], directory: Path, plt: Any) -> Path:
    """Throughput against SLO: requests/s whose first token comes within a limit, over that limit."""
    figure, axes = plt.subplots()
    for name, result in runs.items():
        times = np.sort(np.asarray(result.ttft_s))
        span_s = max(result.arrived_s) - min(result.arrived_s)
        axes.plot(times, np.arange(1, len(times) + 1) / span_s, label=name)
    title = _title(cells[0], max(cell.load for cell in cells))
    axes.set(xlabel="limit of TTFT, s", ylabel="requests/s within it", xlim=(0, 30), title=title)
    axes.legend()
    return _save(figure, directory / "throughput_by_limit.png")


def _goodput(report: dict[str, Any], directory: Path, plt: Any) -> Path:
    """Requests/s within the limit, against load."""
    rows = report["rows"]
    figure, axes = plt.subplots()
    workload, link = rows[0]["workload"], rows[0]["link"]
    for name in dict.fromkeys(row["policy"] for row in rows):
        mine = [r for r in rows if (r["policy"], r["workload"], r["link"]) == (name, workload, link)]
        axes.plot([r["load"] for r in mine], [r["goodput_req_s"] for r in mine], marker="o", label=name)
    axes.set(xlabel="load", ylabel="goodput, requests/s", title=f"{workload}, {link} link")
    axes.legend()
    return _save(figure, directory / "goodput.png")


def _timeline(cells: Sequence[Cell], directory: Path, plt: Any) -> Path:
    """Link use with the detector's alarms, offloaded share and threshold while the link changes: the default policy,
    and a threshold that is re-optimised where the link drops."""
    links = [cell.link for cell in cells]
    link = next((name for name in ("drop", "bursty") if name in links), links[0])
    load = max(cell.load for cell in cells)
    figure, (use, share, threshold) = plt.subplots(3, sharex=True, figsize=(7, 7))
    for policy in (DEFAULT_POLICY, ORACLE if link == "drop" else "threshold"):
        requests = min(cells[0].requests, DETAIL_REQUESTS)
        cell = replace(cells[0], link=link, policy=policy, load=load, requests=requests)
        result = run_cell(cell)[1]
        line = result.timeline()
        # What drains after the last arrival says nothing of the policy.
        n = max(1, int(max(result.arrived_s) / BUCKET_S))
        use.plot(line["at_s"][:n], line["link_use"][:n], label=policy)
        share.plot(line["at_s"][:n], line["offloaded_share"][:n], label=policy)
        if policy == DEFAULT_POLICY:
            for begin_s, end_s in result.troubled():
                use.axvspan(begin_s, end_s, color="tab:red", alpha=0.2, lw=0)
        if result.thresholds:
            at_s, t_tokens = zip(*result.thresholds, (BUCKET_S * n, result.thresholds[-1][1]), strict=True)
            threshold.step(at_s, t_tokens, where="post", label=policy, color="tab:orange")
    use.set(ylabel="link use (red: alarm)", title=_title(cell, load))
    share.set(ylabel="offloaded share")
    threshold.set(xlabel="time, s", ylabel="t, tokens", xlim=(0, BUCKET_S * n))
    for axes in (use, threshold):
        axes.legend()
    return _save(figure, directory / "timeline.png")


def _title(cell: Cell, load: float) -> str:
    return f"{cell.workload}, {cell.link} link, load {load}"
