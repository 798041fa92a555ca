"""What a planner has seen and done: typed events, each of them logged, counted, and kept for a while."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from prfaas_net.metrics import Metrics
from prfaas_net.scheduling import Role, Solution

__all__ = [
    "ChangeBegan",
    "ChangeEnded",
    "LeaseMoved",
    "Outcome",
    "Planned",
    "PlanningEvent",
    "PlanningLog",
    "ThresholdMoved",
]

log = logging.getLogger(__name__)

# Kept for whoever looks: some hours of one look every three minutes.
KEPT_EVENTS = 200

Outcome = str
# How a change of role ends: the node has its new role; it did not drain in time; the planner called it off; the node
# refused it; the node, or the way to it, was lost.
OUTCOMES: tuple[Outcome, ...] = ("converted", "kept", "called_off", "refused", "lost")


@dataclass(frozen=True)
class Planned:
    """A look at the fleet.

    Attributes:
        outcome: ``no_plan`` (``why`` says what is missing), ``as_it_is``, ``advised`` or ``acted``.
        present, best: what the splits as they are carry, and the best ones, in requests/s.
    """

    at_s: float
    outcome: str
    why: str
    threshold_tokens: int | None = None
    present_req_s: float | None = None
    best_req_s: float | None = None


@dataclass(frozen=True)
class ThresholdMoved:
    """The router has another ``t``."""

    at_s: float
    before_tokens: int
    after_tokens: int
    reason: str


@dataclass(frozen=True)
class ChangeBegan:
    """A node was told to change its role."""

    at_s: float
    node: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True)
class ChangeEnded:
    """A change of role is over, however it ended (:data:`OUTCOMES`)."""

    at_s: float
    node: str
    before: str
    after: str
    outcome: Outcome
    took_s: float
    detail: str


@dataclass(frozen=True)
class LeaseMoved:
    """This gateway may change roles from now on, or may not any more; ``holder`` may, where that is known."""

    at_s: float
    held: bool
    holder: str | None


PlanningEvent = Planned | ThresholdMoved | ChangeBegan | ChangeEnded | LeaseMoved


class PlanningLog:
    """Takes note of events."""

    def __init__(self, metrics: Metrics) -> None:
        self.events: deque[PlanningEvent] = deque(maxlen=KEPT_EVENTS)
        self._plans = metrics.counter("planner_plans", "Looks at the fleet, by what came of them.", ("outcome",))
        self._changes = metrics.counter(
            "planner_role_changes", "Changes of role, by the new role and how they ended.", ("role", "outcome")
        )
        for role in Role:
            for outcome in OUTCOMES:
                self._changes.labels(role.value, outcome)
        self._threshold = metrics.gauge("planner_threshold_tokens", "The threshold that the planner has found.")
        self._carries = metrics.gauge(
            "planner_carried_requests_per_second",
            "What the fleet carries by the model, as it is and at best",
            ("split",),
        )
        self._instances = metrics.gauge(
            "planner_instances", "PD nodes by role, as they are and at best.", ("cluster", "role", "split")
        )
        self._acting = metrics.gauge("planner_acting", "1 while this gateway may change roles.")

    def note(self, event: PlanningEvent) -> None:
        """Keep, count and log it."""
        self.events.append(event)
        match event:
            case Planned():
                self._plans.labels(event.outcome).inc()
                log.log(logging.INFO if event.outcome == "acted" else logging.DEBUG, "planner: %s", event.why)
            case ThresholdMoved():
                log.info("planner: t from %d to %d tokens: %s", event.before_tokens, event.after_tokens, event.reason)
            case ChangeBegan():
                log.info("planner: %s is to %s from now on: %s", event.node, event.after, event.reason)
            case ChangeEnded():
                self._changes.labels(event.after, event.outcome).inc()
                level = logging.INFO if event.outcome == "converted" else logging.WARNING
                log.log(
                    level, "planner: %s, from %s to %s: %s after %.1f s%s", event.node, event.before, event.after,
                    event.outcome, event.took_s, f" ({event.detail})" if event.detail else "",
                )  # fmt: skip
            case LeaseMoved():
                self._acting.set(event.held)
                who = "this gateway" if event.held else event.holder or "nobody"
                log.info("planner: %s changes roles from now on", who)

    def show(self, threshold_tokens: int | None, present: Solution, best: Solution) -> None:
        """Set the gauges."""
        if threshold_tokens is not None:
            self._threshold.set(threshold_tokens)
        for split, solution in (("present", present), ("best", best)):
            self._carries.labels(split).set(solution.result.lambda_max)
            for cluster in solution.pd:
                self._instances.labels(cluster.name, "prefill", split).set(cluster.prefill_instances)
                self._instances.labels(cluster.name, "decode", split).set(cluster.decode_instances)

    def describe(self) -> list[dict[str, Any]]:
        """All events that are kept, oldest first."""
        return [{"event": type(event).__name__, **asdict(event), "at_s": round(event.at_s, 3)} for event in self.events]
