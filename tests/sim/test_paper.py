"""The case study comes out as the paper prints it."""

from __future__ import annotations

import pytest

from prfaas_net.sim.paper import SYSTEMS, analytic, relative_errors, sweeps
from prfaas_net.sim.paper_event import event_part


def test_the_analytic_part_is_within_a_percent() -> None:
    """Table 6 whole, within 1 %; every sweep within 3 %."""
    errors = relative_errors({"analytic": analytic(), "sweeps": sweeps()})
    assert errors["analytic"] < 0.01
    assert errors["sweeps"] < 0.03


def test_cluster_egress_is_that_of_section_2() -> None:
    """Equation 2 over table 3, as the paper rounds it."""
    for row in analytic()["cluster_egress_gbps"]:
        assert row["gbps"] == pytest.approx(row["printed_gbps"], rel=0.07), row


def test_a_simulation_saturates_below_the_formula() -> None:
    """At what E[T(L)] says, within the spread of a short run; never at 3.24."""
    event = event_part(scale=0.015, seed=2)
    formula = analytic()["lambda_max_of_mean_time"]
    for name in SYSTEMS:
        assert event["saturation_req_s"][name] == pytest.approx(formula[name], rel=0.05)
        assert event["ttft_s"]["0.5"][name][0] < event["ttft_s"]["0.9"][name][0]
        assert event["ttft_ci95_s"]["0.9"][name][0] > 0
