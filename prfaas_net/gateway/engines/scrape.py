"""What is read off an engine's ``/metrics``, and how the metrics of several become one exposition.

Names, types, help and values pass unchanged; every sample gets ``prfaas_node`` and ``prfaas_cluster``, without which
the samples of two engines would be one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["EngineLoad", "MetricNames", "merged", "sums"]

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")


@dataclass(frozen=True)
class MetricNames:
    """What one kind of engine calls the things that are needed here; the first name that is there counts."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    cache_usage: tuple[str, ...]
    prompt_tokens: tuple[str, ...]
    requests: tuple[str, ...]

    def load(self, text: str) -> EngineLoad:
        """Read an exposition."""
        found = sums(text, {*self.running, *self.waiting, *self.cache_usage, *self.prompt_tokens, *self.requests,
                            "process_start_time_seconds"})  # fmt: skip

        def first(names: Iterable[str]) -> float | None:
            return next((found[name] for name in names if name in found), None)

        prompt_tokens, requests = first(self.prompt_tokens), first(self.requests)
        mean = prompt_tokens / requests if prompt_tokens and requests else 0.0
        return EngineLoad(
            int(first(self.running) or 0),
            int(first(self.waiting) or 0),
            first(self.cache_usage),
            mean,
            found.get("process_start_time_seconds"),
            prompt_tokens,
        )


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine says it is.

    Attributes:
        running, waiting: requests, of whomever.
        cache_usage: share of its KVCache memory in use, 0 to 1; None if it does not say.
        mean_prompt_tokens: over all requests so far; 0 if it does not say.
        started_s: when its process began, by its own clock; None if it does not say.
        prompt_tokens: computed so far; falls when it restarts.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float | None = None
    mean_prompt_tokens: float = 0.0
    started_s: float | None = None
    prompt_tokens: float | None = None

    def restarted_since(self, before: EngineLoad) -> bool:
        """Whether the process cannot be the one that said ``before``."""
        if self.started_s is not None and before.started_s is not None:
            return self.started_s != before.started_s
        fell = self.prompt_tokens is not None and before.prompt_tokens is not None
        return fell and (self.prompt_tokens or 0.0) < (before.prompt_tokens or 0.0)


def sums(text: str, names: Iterable[str]) -> dict[str, float]:
    """The values of some metrics, added up over their labels; lines that cannot be read are left out."""
    wanted, found = set(names), dict[str, float]()
    starts = tuple(wanted)
    for line in text.splitlines():
        sample = _SAMPLE.match(line) if line.startswith(starts) else None
        if sample is None or sample[1] not in wanted:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if value == value and abs(value) != float("inf"):
            found[sample[1]] = found.get(sample[1], 0.0) + value
    return found


def merged(texts: Iterable[tuple[str, str, str]]) -> str:
    """One exposition of several.

    Args:
        texts: (node, cluster, exposition).
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for node, cluster, text in texts:
        labels = f'prfaas_node="{_escaped(node)}",prfaas_cluster="{_escaped(cluster)}"'
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, what, family, *_ = [*line.split(" ", 3), ""]
                head = heads.setdefault(family, [])
                if not any(known.startswith(f"# {what} ") for known in head):
                    head.append(line)
            elif (sample := _SAMPLE.match(line)) is not None:
                name, own, rest = sample[1], sample[2], line[sample.start(3) :]
                of = family if family and name.startswith(family) else name
                heads.setdefault(of, [])
                inside = f"{own.rstrip(',')},{labels}" if own else labels
                samples.setdefault(of, []).append(f"{name}{{{inside}}} {rest}")
    lines = [line for of, head in heads.items() if of in samples for line in (*head, *samples[of])]
    return "\n".join(lines) + "\n" if lines else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
