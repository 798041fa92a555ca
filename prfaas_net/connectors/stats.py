"""What a connector counts, as plain data that an engine can carry to its own metrics, and in our own."""

from __future__ import annotations

import threading
from typing import Any

from prfaas_net.metrics import Metrics

__all__ = ["COUNTS", "SERIES", "ConnectorStats", "is_empty", "merged", "summary"]

# One value for each transfer that went well.
SERIES = {
    "sent_bytes": "KVCache sent, bytes of each transfer",
    "sent_s": "First chunk sent until the last byte was confirmed, seconds",
    "sent_exposed_s": "End of prefill until the last byte was confirmed, seconds",
    "received_bytes": "KVCache received, bytes of each transfer",
    "received_s": "Reservation until the pages hold all of it, seconds",
    "received_exposed_s": "End of prefill until the pages hold all of it, seconds",
}
COUNTS = {
    "failed_loads": "KVCache that did not arrive",
    "failed_sends": "KVCache that could not be sent",
    "expired_holds": "Finished prompts that nobody took in time",
}


class ConnectorStats:
    """Since they were taken last; from any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, list[float]] = {}
        self._histograms = {
            name: metrics.histogram(f"connector_{name.removesuffix('_s')}_seconds", text)
            for name, text in SERIES.items()
            if name.endswith("_s")
        }
        self._counters = {
            name: metrics.counter(f"connector_{name}", text)
            for name, text in (SERIES | COUNTS).items()
            if not name.endswith("_s")
        }

    def add(self, name: str, value: float = 1) -> None:
        """One more value of a series, or one more event of a count."""
        with self._lock:
            self._data.setdefault(name, []).append(value)
        if name in self._histograms:
            self._histograms[name].observe(value)
        else:
            self._counters[name].inc(value)

    def take(self) -> dict[str, list[float]]:
        """Everything since the last call; empty if there was nothing."""
        with self._lock:
            data, self._data = self._data, {}
        return data


def is_empty(data: dict[str, list[float]]) -> bool:
    return not any(data.values())


def merged(first: dict[str, list[float]], second: dict[str, list[float]]) -> dict[str, list[float]]:
    """Both, name by name."""
    return {name: [*first.get(name, ()), *second.get(name, ())] for name in {**first, **second}}


def summary(data: dict[str, list[float]]) -> dict[str, Any]:
    """A few numbers for a log line: counts, megabytes, and means in milliseconds."""
    line: dict[str, Any] = {}
    for way in ("sent", "received"):
        sizes = data.get(f"{way}_bytes", [])
        if sizes:
            line[f"transfers {way}"] = len(sizes)
            line[f"MB {way}"] = round(sum(sizes) / 1e6, 3)
        for name, label in ((f"{way}_s", f"mean ms {way}"), (f"{way}_exposed_s", f"mean exposed ms {way}")):
            values = data.get(name, [])
            if values:
                line[label] = round(1e3 * sum(values) / len(values), 1)
    line.update({name.replace("_", " "): int(sum(data[name])) for name in COUNTS if data.get(name)})
    return line
