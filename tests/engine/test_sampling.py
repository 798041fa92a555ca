"""Sampling: which tokens may be drawn, how often, and that a draw depends on seed and position alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine
from engine.sampling import check_sampling, choose_token
from prfaas_net.errors import InternalError, InvalidRequest
from prfaas_net.nodes.engine_api import Sampling
from tests.engine.helpers import random_prompt

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], dtype=np.float32))


def draw(sampling: Sampling, n: int = 4000) -> dict[int, float]:
    """How often each token is drawn over ``n`` positions."""
    counts = Counter(choose_token(LOGITS, sampling, position) for position in range(n))
    return {token: count / n for token, count in counts.items()}


def test_temperature_zero_is_greedy() -> None:
    """Whatever the other parameters, and the first of equals."""
    assert choose_token(LOGITS, Sampling(top_p=0.1, top_k=3, seed=9), 5) == 1
    assert choose_token(np.zeros(4, np.float32), Sampling(), 0) == 0


def test_tokens_are_drawn_by_their_probability() -> None:
    """At temperature 1; at 0.5 by its square."""
    weights = np.exp(LOGITS)
    for temperature, expected in ((1.0, weights), (0.5, weights**2 / (weights**2).sum())):
        drawn = draw(Sampling(temperature=temperature, seed=1))
        for token, p in enumerate(expected):
            assert drawn[token] == pytest.approx(p, abs=0.03)


def test_top_k_keeps_the_best() -> None:
    """No other token is ever drawn."""
    assert set(draw(Sampling(temperature=1.0, top_k=2))) == {1, 3}
    assert set(draw(Sampling(temperature=1.0, top_k=99))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """And always one token."""
    assert set(draw(Sampling(temperature=1.0, top_p=0.69))) == {1, 3}
    assert set(draw(Sampling(temperature=1.0, top_p=0.71))) == {1, 3, 4}
    assert set(draw(Sampling(temperature=1.0, top_p=1e-9))) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    """0.4 of 0.7 is more than half."""
    assert set(draw(Sampling(temperature=1.0, top_k=2, top_p=0.55))) == {1}


@given(seed=st.integers(-(2**70), 2**70), position=st.integers(0, 2**20))
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    """Any integer is a seed; the same pair draws the same token."""
    sampling = Sampling(temperature=1.0, seed=seed)
    assert choose_token(LOGITS, sampling, position) == choose_token(LOGITS.copy(), sampling, position)


def test_seeds_and_positions_are_independent() -> None:
    """Neighbours in either draw differently often enough."""
    by_position = [choose_token(LOGITS, Sampling(temperature=1.0, seed=4), p) for p in range(200)]
    by_seed = [choose_token(LOGITS, Sampling(temperature=1.0, seed=s), 4) for s in range(200)]
    assert len(set(by_position)) == len(set(by_seed)) == 5
    assert by_position != by_seed


def test_a_sampled_answer_is_the_same_wherever_it_is_resumed(engine: Engine) -> None:
    """Token n of an answer is the first token after a prefill of all before it."""
    prompt, sampling = random_prompt(12), Sampling(temperature=1.5, top_p=0.95, seed=3, max_tokens=6, ignore_eos=True)
    tokens = engine.generate(prompt, sampling)
    assert tokens == engine.generate(prompt, sampling)
    assert tokens != engine.generate(prompt, Sampling(temperature=1.5, top_p=0.95, seed=5, max_tokens=6))
    for n in range(1, 6):
        assert engine.generate(prompt + tokens[:n], sampling)[0] == tokens[n]


@pytest.mark.parametrize(
    "changes",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(InvalidRequest, match=f"{next(iter(changes))} is out of range"):
        check_sampling(Sampling(**changes))


def test_a_computation_gone_wrong_is_not_sampled_from() -> None:
    """A logit that is not a number is our bug and is reported as such."""
    with pytest.raises(InternalError, match="logit nan"):
        choose_token(np.array([0, np.nan, 1], np.float32), Sampling(), 0)
