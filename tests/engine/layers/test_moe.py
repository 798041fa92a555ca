"""Routing of experts, against its definition token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backend import NUMPY
from engine.layers.moe import MoeSpec


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def by_definition(spec: MoeSpec, w: dict[str, Any], x: Any) -> Any:
    """One token through its experts, in float64."""
    scores = 1 / (1 + np.exp(-(w["gate.weight"] @ x)))
    choice = scores + w["gate.e_score_correction_bias"]
    groups = choice.reshape(spec.n_groups, -1)
    best_groups = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: spec.top_groups]
    open_experts = [e for e in range(spec.n_experts) if e // groups.shape[1] in best_groups]
    chosen = sorted(open_experts, key=lambda e: -choice[e])[: spec.top_k]
    total = sum(scores[e] for e in chosen) if spec.renormalise else 1.0
    y = w["shared_experts.down_proj.weight"] @ (
        silu(w["shared_experts.gate_proj.weight"] @ x) * (w["shared_experts.up_proj.weight"] @ x)
    )
    for e in chosen:
        inner = silu(w[f"experts.{e}.w1.weight"] @ x) * (w[f"experts.{e}.w3.weight"] @ x)
        y = y + spec.scale * scores[e] / total * (w[f"experts.{e}.w2.weight"] @ inner)
    return y


@pytest.mark.parametrize(
    ("n_groups", "top_groups", "renormalise"), [(1, 1, True), (4, 2, True), (2, 1, False), (4, 4, False)]
)
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_every_token_gets_its_experts(n_groups: int, top_groups: int, renormalise: bool, n_tokens: int) -> None:
    """Groups first, then experts; the bias chooses and does not weigh."""
    spec = MoeSpec(
        hidden_size=12, expert_size=6, n_experts=8, n_shared=2, top_k=2,
        n_groups=n_groups, top_groups=top_groups, renormalise=renormalise, scale=1.7,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in spec.weight_shapes().items()}
    x = draw.standard_normal((n_tokens, 12)).astype(np.float32)
    y = spec.build(weights, NUMPY).forward(x)
    wide = {name: w.astype(np.float64) for name, w in weights.items()}
    np.testing.assert_allclose(
        y, [by_definition(spec, wide, row) for row in x.astype(np.float64)], rtol=1e-4, atol=1e-4
    )
