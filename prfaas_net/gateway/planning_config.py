"""``[planner]`` of a gateway's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from prfaas_net.config import Duration, Section
from prfaas_net.scheduling import PlannerSettings

__all__ = ["PlannerField", "PlannerSection"]


class PlannerSection(Section):
    """How the long-timescale planner looks after the fleet. ``planner = "act"`` is short for its mode alone.

    Attributes:
        mode: ``off``; ``advise``: look, and tell what would be done (``GET /v1/plan``); ``act``: set the threshold and
            change the roles of nodes. Of several gateways that act, one at a time changes roles.
        period: from one look to the next.
        window: how far back requests count; at least a period.
        least_requests: fewer of them in a window say nothing.
        least_gain: what a new split must carry more than the present one, as a share of it.
        confirmations: looks in a row that must find so.
        dwell: from one change of roles in a cluster to the next.
        drain_limit: how long a node may take to end what it has; one that takes longer keeps its role.
        threshold_change: a new threshold is set if it differs by this share.
        lease: how long a gateway that acts may be silent before another takes over.
    """

    mode: Literal["off", "advise", "act"] = "advise"
    period: Duration = Field(180.0, gt=0)
    window: Duration = Field(900.0, gt=0)
    least_requests: int = Field(100, ge=1)
    least_gain: float = Field(0.10, ge=0)
    confirmations: int = Field(2, ge=1)
    dwell: Duration = Field(600.0, ge=0)
    drain_limit: Duration = Field(900.0, gt=0, le=86_400)
    threshold_change: float = Field(0.05, ge=0)
    lease: Duration = Field(15.0, ge=0.5, le=600)

    def settings(self) -> PlannerSettings:
        """For :class:`prfaas_net.scheduling.Planner`."""
        return PlannerSettings(
            self.period,
            self.window,
            self.least_requests,
            self.least_gain,
            self.confirmations,
            self.dwell,
            self.drain_limit,
            self.threshold_change,
        )

    @model_validator(mode="after")
    def _check(self) -> PlannerSection:
        self.settings()
        return self


def _section(raw: object) -> object:
    return {"mode": raw} if isinstance(raw, str) else raw


PlannerField = Annotated[PlannerSection, BeforeValidator(_section)]
