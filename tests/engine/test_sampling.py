"""Sampling: which tokens may be drawn, how often, and that a draw depends on seed and position alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine
from engine.sampling import Sampler, check_sampling
from prfaas_net.errors import InternalError, InvalidRequest
from prfaas_net.nodes.engine_api import Sampling
from tests.engine.helpers import random_prompt

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], dtype=np.float32))


def choose_token(logits: Any, sampling: Sampling, position: int) -> int:
    """The first token of an answer."""
    return Sampler(sampling, frozenset()).choose(logits, position).token


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
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"min_tokens": 17},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logprobs": 101},
        {"logit_bias": ((5, 1.0),)},
        {"logit_bias": ((1, float("nan")),)},
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    """By name."""
    with pytest.raises(InvalidRequest, match=f"{next(iter(changes))} is out of range"):
        check_sampling(Sampling(**changes), vocab_size=5)


def test_a_computation_gone_wrong_is_not_sampled_from() -> None:
    """A logit that is not a number is our bug and is reported as such."""
    with pytest.raises(InternalError, match="logit nan"):
        choose_token(np.array([0, np.nan, 1], np.float32), Sampling(), 0)


def test_min_p_drops_the_unlikely() -> None:
    """Those under the given share of the likeliest."""
    assert set(draw(Sampling(temperature=1.0, min_p=0.3))) == {1, 3, 4}


@given(seed=st.integers(0, 2**32), top_p=st.floats(0.01, 1.0), top_k=st.integers(0, 600))
def test_a_large_vocabulary_is_drawn_from_as_if_it_were_sorted(seed: int, top_p: float, top_k: int) -> None:
    """Cutting candidates off by partition gives the token of the plain definition."""
    logits = np.random.default_rng(seed).standard_normal(500).astype(np.float32) * 2
    sampling = Sampling(temperature=0.9, top_p=top_p, top_k=top_k, seed=seed)
    if top_p >= 1 and not 0 < top_k < 500:
        return  # drawn in the order of the vocabulary
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / 0.9)
    total = np.cumsum(weights)
    n = int(np.searchsorted(total, top_p * total[-1])) + 1 if top_p < 1 else len(order)
    uniform = np.random.Generator(np.random.Philox(counter=7, key=seed)).random()
    expected = order[:n][np.searchsorted(total[:n], uniform * total[:n][-1], side="right")]
    assert choose_token(logits, sampling, 7) == expected


def test_biases_and_penalties_move_the_choice() -> None:
    """A bias adds; frequency and presence count the answer alone, repetition the prompt too."""
    assert choose_token(LOGITS, Sampling(logit_bias=((0, 9.0),)), 0) == 0
    assert choose_token(LOGITS, Sampling(logit_bias=((1, -100.0),)), 0) == 3
    for sampling in (Sampling(presence_penalty=1.0), Sampling(frequency_penalty=1.0)):
        sampler = Sampler(sampling, frozenset(), prompt_tokens=[1])
        assert sampler.choose(LOGITS, 0).token == 1
        sampler.accept(1)
        assert sampler.choose(LOGITS, 1).token == 3
    # Logits are negative here: the penalty multiplies.
    assert Sampler(Sampling(repetition_penalty=2.0), frozenset(), [1]).choose(LOGITS, 0).token == 3
    assert Sampler(Sampling(repetition_penalty=2.0), frozenset(), [1]).choose(LOGITS + 9, 0).token == 3


def test_frequency_counts_and_presence_does_not() -> None:
    """Twice the token is twice the frequency penalty."""
    sampler = Sampler(Sampling(frequency_penalty=0.2, max_tokens=9), frozenset())
    assert [step(sampler) for _ in range(5)] == [1, 1, 3, 1, 3]
    sampler = Sampler(Sampling(presence_penalty=0.5, max_tokens=9), frozenset())
    assert [step(sampler) for _ in range(4)] == [1, 3, 1, 1]


def step(sampler: Sampler) -> int:
    """Choose and accept."""
    token = sampler.choose(LOGITS, sampler.n_produced).token
    sampler.accept(token)
    return token


def test_no_answer_ends_before_min_tokens() -> None:
    """End tokens are closed, then open."""
    sampler = Sampler(Sampling(min_tokens=2, max_tokens=9), frozenset({1}))
    reasons = []
    for position in range(3):
        reasons.append(sampler.accept(sampler.choose(LOGITS, position).token))
    assert reasons == [None, None, "stop"]


def test_logprobs_are_the_models_own() -> None:
    """Of the chosen token and of the likeliest, whatever moved the choice; none if none were asked for."""
    sampling = Sampling(logit_bias=((0, 9.0),), temperature=0.5, top_k=1, logprobs=2)
    choice = Sampler(sampling, frozenset()).choose(LOGITS, 0)
    assert choice.token == 0
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(np.log(0.05), abs=1e-5)
    assert [token for token, _ in choice.logprobs.top] == [1, 3]
    assert [logprob for _, logprob in choice.logprobs.top] == pytest.approx(np.log([0.4, 0.3]), abs=1e-5)
    alone = Sampler(Sampling(logprobs=0), frozenset()).choose(LOGITS, 0).logprobs
    assert alone is not None and alone.top == ()
    assert Sampler(Sampling(), frozenset()).choose(LOGITS, 0).logprobs is None
