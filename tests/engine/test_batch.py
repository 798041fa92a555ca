"""Decoding many sequences together: each gets the tokens that it would get alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Engine
from engine.sampling import Greedy, SamplingParams
from prfaas_net.errors import InternalError, InvalidRequest, UsageError
from prfaas_net.kv import RegionMap
from prfaas_net.nodes.engine_api import Sampling
from tests.engine.helpers import greedy, prefill, random_prompt

MIX = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Request:
    """One request of a mix."""

    prompt: list[int]
    sampling: SamplingParams
    joins_at: int


def requests() -> st.SearchStrategy[list[Request]]:
    """Up to six, of different lengths, that join at different steps."""
    one = st.builds(
        lambda n, m, seed, joins_at: Request(
            random_prompt(n, seed), Sampling(temperature=0.8 * (seed % 2), seed=seed, max_tokens=m, ignore_eos=True),
            joins_at,
        ),
        st.integers(1, 60), st.integers(2, 9), st.integers(0, 99), st.integers(0, 6),
    )  # fmt: skip
    return st.lists(one, min_size=1, max_size=6)


def serve(engine: Engine, mix: list[Request]) -> list[list[int]]:
    """Prefill each request alone, decode all together."""
    batch, answers = engine.batch(), [list[int]() for _ in mix]
    running: dict[int, int] = {}
    step = 0
    while step <= max(request.joins_at for request in mix) or len(batch):
        for index, request in enumerate(mix):
            if request.joins_at == step:
                n_tokens = len(request.prompt)
                regions = RegionMap(engine.layout, n_tokens + request.sampling.max_tokens)
                buffer = bytearray(regions.total_bytes)
                result = engine.prefill(request.prompt, request.sampling, regions, buffer)
                assert result is not None
                answers[index].append(result.first_token)
                running[batch.join(n_tokens, result.first_token, request.sampling, regions, buffer)] = index
        for stepped in batch.step():
            assert stepped.error is None
            answers[running[stepped.key]].append(stepped.token)
        step += 1
    return answers


@MIX
@given(mix=requests())
def test_any_mix_gives_the_tokens_of_each_alone(engine: Engine, mix: list[Request]) -> None:
    """Whatever the others are, whenever they join and leave; greedy and sampled."""
    assert serve(engine, mix) == [engine.generate(request.prompt, request.sampling) for request in mix]


def test_the_logits_do_not_depend_on_the_others(engine: Engine) -> None:
    """To rounding: the log-probabilities of a sequence are the same in a batch of one and of nine."""
    sampling = Greedy(max_tokens=4, ignore_eos=True, logprobs=3)
    runs = [prefill(engine, random_prompt(10 + 7 * n, n), sampling) for n in range(9)]
    alone = []
    for run in runs:
        batch = engine.batch()
        batch.join(run.n_tokens, run.result.first_token, sampling, run.regions, bytearray(run.buffer))
        alone.append(batch.step()[0])
    batch = engine.batch()
    for run in runs:
        batch.join(run.n_tokens, run.result.first_token, sampling, run.regions, run.buffer)
    for one, other in zip(batch.step(), alone, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert one.token == other.token
        np.testing.assert_allclose(one.logprobs.logprob, other.logprobs.logprob, atol=1e-4)


def test_who_leaves_is_not_touched_any_more(engine: Engine) -> None:
    """Its buffer stays as it was; the others go on as if it had not been there."""
    prompts = [random_prompt(20 + n, n) for n in range(3)]
    runs = [prefill(engine, prompt, greedy(6)) for prompt in prompts]
    batch = engine.batch()
    keys = [batch.join(run.n_tokens, run.result.first_token, run.sampling, run.regions, run.buffer) for run in runs]
    answers = [[run.result.first_token] for run in runs]
    for stepped in batch.step():
        answers[keys.index(stepped.key)].append(stepped.token)
    batch.leave(keys[1])
    batch.leave(keys[1])
    left = bytes(runs[1].buffer)
    while len(batch):
        for stepped in batch.step():
            answers[keys.index(stepped.key)].append(stepped.token)
    assert bytes(runs[1].buffer) == left
    expected = [engine.generate(prompt, greedy(6)) for prompt in prompts]
    assert answers == [expected[0], expected[1][:2], expected[2]]
    assert batch.step() == []


def test_one_bad_sequence_does_not_harm_the_others(demo: Engine) -> None:
    """It leaves with its error; the rest get their tokens."""
    good, bad = (prefill(demo, random_prompt(12, n), greedy(4)) for n in range(2))
    bad.buffer[:] = b"\xff" * len(bad.buffer)
    batch = demo.batch()
    for run in (good, bad):
        batch.join(run.n_tokens, run.result.first_token, run.sampling, run.regions, run.buffer)
    first, second = batch.step()
    assert first.error is None
    assert isinstance(second.error, InternalError)
    assert len(batch) == 1
    assert [good.result.first_token, first.token] == demo.generate(random_prompt(12), greedy(4))[:2]


def test_what_cannot_join_is_refused(demo: Engine) -> None:
    """A token of another vocabulary, an answer that is complete, a buffer that is too small."""
    run = prefill(demo, random_prompt(5), greedy(3))
    batch = demo.batch()
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        batch.join(5, 10**6, run.sampling, run.regions, run.buffer)
    with pytest.raises(UsageError, match="the sequence is complete"):
        batch.join(5, 1, greedy(1), run.regions, run.buffer)
    with pytest.raises(UsageError, match="too small"):
        batch.join(5, 1, greedy(4), run.regions, run.buffer)
    assert len(batch) == 0


def test_penalties_count_the_prompt_and_the_whole_answer(engine: Engine) -> None:
    """A request split between nodes gives the tokens of one that is not: the decode side is told what it needs."""
    prompt = random_prompt(30)
    sampling = Sampling(
        max_tokens=8, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
    )
    regions = RegionMap(engine.layout, 38)
    buffer = bytearray(regions.total_bytes)
    result = engine.prefill(prompt, sampling, regions, buffer)
    assert result is not None
    batch, tokens = engine.batch(), [result.first_token]
    batch.join(30, result.first_token, sampling, regions, buffer, sorted(set(prompt)))
    while len(batch):
        tokens += [stepped.token for stepped in batch.step()]
    assert tokens == engine.generate(prompt, sampling)
