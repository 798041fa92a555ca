"""Routing of experts, against its definition token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backend import NUMPY
from engine.layers.moe import MoeSpec
from engine.layers.router import SigmoidRouterSpec, SoftmaxRouterSpec


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def expert(w: dict[str, Any], name: str, x: Any) -> Any:
    inner = silu(w[f"{name}.gate_proj.weight"] @ x) * (w[f"{name}.up_proj.weight"] @ x)
    return w[f"{name}.down_proj.weight"] @ inner


def by_definition(spec: SigmoidRouterSpec, w: dict[str, Any], x: Any) -> Any:
    """One token through its experts, in float64."""
    scores = 1 / (1 + np.exp(-(w["gate.weight"] @ x)))
    choice = scores + w["gate.e_score_correction_bias"]
    groups = choice.reshape(spec.n_groups, -1)
    best_groups = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: spec.top_groups]
    open_experts = [e for e in range(spec.n_experts) if e // groups.shape[1] in best_groups]
    chosen = sorted(open_experts, key=lambda e: -choice[e])[: spec.top_k]
    total = sum(scores[e] for e in chosen) if spec.renormalise else 1.0
    y = expert(w, "shared_experts", x)
    for e in chosen:
        y = y + spec.scale * scores[e] / total * expert(w, f"experts.{e}", x)
    return y


def softmax_by_definition(spec: SoftmaxRouterSpec, w: dict[str, Any], x: Any) -> Any:
    """One token through its experts and the gated shared one, in float64."""
    scores = np.exp(w["gate.weight"] @ x)
    scores /= scores.sum()
    chosen = np.argsort(-scores)[: spec.top_k]
    total = scores[chosen].sum() if spec.renormalise else 1.0
    y = expert(w, "shared_expert", x) / (1 + np.exp(-(w["shared_expert_gate.weight"] @ x)))
    for e in chosen:
        y = y + scores[e] / total * expert(w, f"experts.{e}", x)
    return y


@pytest.mark.parametrize(
    ("n_groups", "top_groups", "renormalise"), [(1, 1, True), (4, 2, True), (2, 1, False), (4, 4, False)]
)
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_every_token_gets_its_experts(n_groups: int, top_groups: int, renormalise: bool, n_tokens: int) -> None:
    """Groups first, then experts; the bias chooses and does not weigh."""
    router = SigmoidRouterSpec(8, 2, n_groups, top_groups, renormalise, scale=1.7)
    spec = MoeSpec(hidden_size=12, expert_size=6, router=router, shared="shared_experts", shared_size=12)
    weights, x, y = run(spec, n_tokens)
    np.testing.assert_allclose(y, [by_definition(router, weights, row) for row in x], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_a_softmax_router_and_a_gated_shared_expert(renormalise: bool, n_tokens: int) -> None:
    """Weights are those of all experts, or made to sum to 1 over the chosen."""
    router = SoftmaxRouterSpec(8, 3, renormalise)
    spec = MoeSpec(12, 6, router, shared="shared_expert", shared_size=10, shared_gate=True)
    weights, x, y = run(spec, n_tokens)
    np.testing.assert_allclose(y, [softmax_by_definition(router, weights, row) for row in x], rtol=1e-4, atol=1e-4)


def run(spec: MoeSpec, n_tokens: int) -> tuple[dict[str, Any], Any, Any]:
    """Random weights and inputs, in float64, and what comes out."""
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in spec.weight_shapes().items()}
    x = draw.standard_normal((n_tokens, 12)).astype(np.float32)
    y = spec.build(weights, NUMPY).forward(x)
    return {name: w.astype(np.float64) for name, w in weights.items()}, x.astype(np.float64), y
