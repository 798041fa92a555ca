"""What a bench found, as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from prfaas_net.units import format_bytes, format_rate

__all__ = ["show"]


def _figure(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _rate(value: float | None) -> str:
    return "–" if value is None else format_rate(value)


def _rows(report: dict[str, Any]) -> Table:
    table = Table(title="Loopback, two processes, beside iperf3 with as many streams")
    for name in (
        "connections",
        "chunk",
        "checksum",
        "TLS",
        "goodput",
        "iperf3",
        "ratio",
        "range",
        "CPU s/GiB",
        "ratio",
        "alike",
    ):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        low, high = row["goodput_over_iperf3_range"] or (None, None)
        table.add_row(
            str(row["connections"]),
            format_bytes(row["chunk_bytes"]),
            "on" if row["checksum"] else "off",
            "on" if row["tls"] else "off",
            _rate(row["goodput_bps"]),
            _rate(row["iperf3_bps"]),
            _figure(row["goodput_over_iperf3"]),
            f"{_figure(low)}–{_figure(high)}",
            _figure(row["cpu_s_per_gib"], 3),
            _figure(row["cpu_over_iperf3"]),
            _figure(row["goodput_over_iperf3_alike"]),
        )
    return table


def _peers(report: dict[str, Any]) -> Table:
    table = Table(title="Peers, loopback, the same bytes into the same kind of memory")
    for name in ("peer", "goodput", "CPU s/GiB", "ours / peer", "range", "note"):
        table.add_column(name, justify="right")
    for peer in report["peers"]:
        low, high = peer.get("ours_over_peer_range") or (None, None)
        table.add_row(
            peer["name"],
            _rate(peer["goodput_bps"]),
            _figure(peer.get("cpu_s_per_gib"), 3),
            _figure(peer["ours_over_peer"]),
            f"{_figure(low)}–{_figure(high)}",
            peer.get("note", ""),
        )
    return table


def _wan(report: dict[str, Any]) -> Table:
    table = Table(title="Emulated path: share of its rate")
    for name in ("rate", "RTT", "loss", "connections", "ours", "others"):
        table.add_column(name, justify="right")
    for row in report["wan"]:
        others = ", ".join(f"{name} {_figure(share)}" for name, share in row["peers"].items())
        table.add_row(
            format_rate(row["rate_bps"]),
            f"{row['rtt_ms']:g} ms",
            f"{row['loss']:.2%}",
            str(row["connections"]),
            _figure(row["goodput_over_path"]),
            others,
        )
    return table


def _exposed(report: dict[str, Any]) -> Table:
    table = Table(title="Exposed time: from the end of prefill to the confirmation that all has landed")
    for name in ("KVCache", "path", "RTT", "prefill", "exposed", "ideal", "ratio"):
        table.add_column(name, justify="right")
    for row in report["exposed"]:
        table.add_row(
            format_bytes(row["kv_bytes"]),
            format_rate(row["rate_bps"]),
            f"{row['rtt_ms']:g} ms",
            f"{row['prefill_s']:.2f} s",
            f"{row['exposed_s']:.3f} s",
            f"{row['ideal_s']:.3f} s",
            _figure(row["exposed_over_ideal"]),
        )
    return table


def show(report: dict[str, Any], console: Console) -> None:
    """Print every table that has a row."""
    for name, table in (("rows", _rows), ("peers", _peers), ("wan", _wan), ("exposed", _exposed)):
        if report[name]:
            console.print(table(report))
    late, first = report["loop_lateness_p99_ms"], report["first_byte"]
    if late:
        console.print(
            f"Loop lateness p99: {late['bulk']} ms while bulk runs, {late['idle']} ms in an idle process beside it, "
            f"{late['alone']} ms on the machine alone."
        )
    if first:
        console.print(
            f"First {first['bytes'] >> 10} KiB on a warm link: landed after {first['landed_p50_us']:g} us "
            f"(p99 {first['landed_p99_us']:g}); bare TCP round trip {first['tcp_p50_us']:g} us blocking, "
            f"{first['tcp_from_loop_p50_us']:g} us from an event loop."
        )
    for note in report["notes"]:
        console.print(f"Note: {note}", style="yellow")
