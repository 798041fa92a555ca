"""What holds for prefill and decode whatever the model."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engine import Engine
from engine.sampling import Greedy
from prfaas_net.errors import InvalidRequest, UsageError
from prfaas_net.kv import KvKind, RegionMap
from prfaas_net.nodes import engine_api
from tests.engine.helpers import RecordingSink, greedy, prefill, random_prompt


@pytest.mark.parametrize("chunk", [1, 7, 64, 150, 1000])
def test_the_chunk_size_changes_nothing(directory: Path, chunk: int) -> None:
    """Any prefill chunk size gives the same tokens, and the same logits to 1e-4."""
    prompt = random_prompt(150)
    whole = prefill(Engine.load(directory), prompt, greedy())
    chunked = prefill(Engine.load(directory, prefill_chunk_tokens=chunk), prompt, greedy())
    np.testing.assert_allclose(chunked.result.logits, whole.result.logits, atol=1e-4)
    assert chunked.decode() == whole.decode()


@pytest.mark.parametrize("n_prompt", [1, 2, 33, 130])
def test_decoding_continues_what_prefill_began(engine: Engine, n_prompt: int) -> None:
    """Each decoded token is the one that a prefill of everything before it would choose."""
    prompt = random_prompt(n_prompt)
    tokens = engine.generate(prompt, greedy(6))
    for n in range(1, 6):
        assert prefill(engine, prompt + tokens[:n], greedy(1)).result.first_token == tokens[n]


def test_state_may_move(engine: Engine) -> None:
    """Decoding in a copy of the buffer gives exactly the tokens of decoding in the first."""
    prompt = random_prompt(100)
    here = prefill(engine, prompt, greedy(12))
    there = bytearray(here.buffer)
    decoding = engine.resume(len(prompt), here.sampling, here.regions, memoryview(there))
    tokens = [here.result.first_token]
    while len(tokens) < 12:
        tokens.append(decoding.step(tokens[-1])[0])
    assert tokens == here.decode() == engine.generate(prompt, greedy(12))
    assert there == here.buffer


def test_the_state_is_the_same_however_it_came_about(engine: Engine) -> None:
    """Decoding leaves the state that a prefill of the same tokens leaves."""
    prompt = random_prompt(45)
    run = prefill(engine, prompt, greedy(5))
    tokens = run.decode()
    direct = prefill(engine, prompt + tokens[:-1], greedy(1))
    for region in direct.regions:
        index, name = region.layer.index, region.tensor.name
        linear = region.layer.kind is KvKind.LINEAR
        rows = slice(None) if linear else slice(region.layer.rows(direct.n_tokens))
        np.testing.assert_allclose(run.array(index, name)[rows], direct.array(index, name)[rows], atol=1e-4)


def test_the_sink_sees_everything_once_in_order(engine: Engine) -> None:
    """Full attention chunk by chunk, linear state once at the end, layers in order within each chunk."""
    prompt, sink = random_prompt(80), RecordingSink()
    prefill(engine, prompt, greedy(), sink)
    full = [layer.index for layer in engine.layout.layers if layer.kind is KvKind.FULL]
    every = [layer.index for layer in engine.layout.layers]
    assert sink.emitted == [(i, stop) for stop in (32, 64) for i in full] + [(i, 80) for i in every]


def test_what_was_emitted_is_final(engine: Engine) -> None:
    """No byte changes after it was emitted: the receiver has what the sender ends with."""
    prompt = random_prompt(80)
    regions = RegionMap(engine.layout, 90)
    buffer = bytearray(regions.total_bytes)
    received = {}

    class Receiver(RecordingSink):
        def emit(self, layer_index: int, stop_token: int) -> None:
            for region in regions:
                if region.layer.index == layer_index:
                    linear = region.layer.kind is not KvKind.FULL
                    n_bytes = region.n_bytes if linear else stop_token * region.tensor.row_bytes
                    start = 0 if linear else (stop_token - 1) // 32 * 32 * region.tensor.row_bytes
                    received[region.offset + start] = bytes(buffer[region.offset + start : region.offset + n_bytes])

    engine.prefill(prompt, greedy(), regions, buffer, Receiver())
    assert received
    for offset, piece in received.items():
        assert buffer[offset : offset + len(piece)] == piece


@pytest.mark.parametrize("cancel_after", [0, 1, 5])
def test_a_cancelled_prefill_stops_between_layers(engine: Engine, cancel_after: int) -> None:
    """It returns None and tells nothing more."""
    sink = RecordingSink(cancel_after=cancel_after)
    regions = RegionMap(engine.layout, 90)
    assert engine.prefill(random_prompt(80), greedy(), regions, bytearray(regions.total_bytes), sink) is None
    assert sink.asked == cancel_after + 1
    assert len(sink.emitted) <= cancel_after


def test_an_end_token_stops(directory: Path, tmp_path: Path) -> None:
    """The reason is "stop", the token is part of the answer, and ignore_eos goes on."""
    prompt = random_prompt(20)
    free = Engine.load(directory).generate(prompt, greedy(8))
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {free[3]}}}')
    engine = Engine.load(tmp_path)
    ended = free[: free.index(free[3]) + 1]
    assert engine.generate(prompt, Greedy(max_tokens=8)) == ended
    assert prefill(engine, prompt + ended[:-1], Greedy(max_tokens=1)).result.finish_reason == "stop"
    assert engine.generate(prompt, greedy(8)) == free


def test_a_decoded_token_must_be_in_the_vocabulary(engine: Engine) -> None:
    """A node that passes on another model's token is told so."""
    run = prefill(engine, random_prompt(3), greedy())
    with pytest.raises(InvalidRequest, match="not in the vocabulary; found 264"):
        engine.resume(3, run.sampling, run.regions, run.buffer).step(264)


def test_an_answer_has_max_tokens_tokens(engine: Engine) -> None:
    """The first one counts; the last one's reason is "length"; there is no step after it."""
    prompt = random_prompt(10)
    assert prefill(engine, prompt, greedy(1)).result.finish_reason == "length"
    run = prefill(engine, prompt, greedy(3))
    decoding = engine.resume(10, run.sampling, run.regions, run.buffer)
    second, reason = decoding.step(run.result.first_token)
    assert reason is None
    third, reason = decoding.step(second)
    assert reason == "length"
    with pytest.raises(UsageError, match="the sequence is complete"):
        decoding.step(third)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([5, -1], 1, "found -1"),
        ([5, 10_000], 1, "found 10000"),
        ([5] * 2000, 49, "found 2000 \\+ 49"),
        ([5], 0, "max_tokens is out of range"),
    ],
)
def test_an_impossible_request_is_refused(engine: Engine, prompt: list[int], max_tokens: int, message: str) -> None:
    """Whichever call it reaches, before anything is computed."""
    regions = RegionMap(engine.layout, 16)
    with pytest.raises(InvalidRequest, match=message):
        engine.generate(prompt, greedy(max_tokens))
    with pytest.raises(InvalidRequest, match=message):
        engine.prefill(prompt, greedy(max_tokens), regions, bytearray(regions.total_bytes))


def test_threads_do_not_disturb_each_other(engine: Engine) -> None:
    """Requests that run at the same time get the tokens that they get alone."""
    prompts = [random_prompt(60 + n, seed=n) for n in range(6)]
    alone = [engine.generate(prompt, greedy()) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: engine.generate(prompt, greedy()), prompts)) == alone


def test_the_longest_request_is_served(engine: Engine) -> None:
    """Prompt plus max_tokens may reach the model's limit exactly."""
    assert len(engine.generate(random_prompt(2045), greedy(3))) == 3


def test_an_engine_is_what_a_node_expects(demo: Engine, demo_directory: Path) -> None:
    """It satisfies the node's protocol (checked by the type checker) and answers through it."""
    api: engine_api.Engine = demo
    assert (api.model_name, api.vocab_size, api.max_model_tokens) == ("demo_model", 2048, 131072)
    assert api.prefill_chunk_tokens == 512
    sampling = engine_api.Sampling(max_tokens=2)
    regions = RegionMap(api.layout, 12)
    buffer = bytearray(regions.total_bytes)
    result = api.prefill(random_prompt(10), sampling, regions, buffer, RecordingSink())
    assert result is not None
    batch: engine_api.DecodeBatch = api.batch()
    key = batch.join(10, result.first_token, sampling, regions, buffer)
    stepped: engine_api.Stepped = batch.step()[0]
    assert (stepped.key, stepped.finish_reason in ("length", "stop"), stepped.error) == (key, True, None)


def test_a_prefill_chunk_needs_tokens(demo_directory: Path) -> None:
    """A chunk size of 0 is refused."""
    with pytest.raises(UsageError, match="a prefill chunk needs tokens"):
        Engine.load(demo_directory, prefill_chunk_tokens=0)


def test_a_pace_makes_a_prefill_slower_and_changes_nothing_else(demo_directory: Path, demo: Engine) -> None:
    """Slower hardware, rehearsed; cancelled while it waits, it ends."""
    paced = Engine.load(demo_directory, pace_tokens_per_s=400)
    prompt, began_s = random_prompt(40), time.monotonic()
    result = prefill(paced, prompt, greedy()).result
    assert time.monotonic() - began_s >= 0.1
    assert result.first_token == prefill(demo, prompt, greedy()).result.first_token

    patient = Engine.load(demo_directory, pace_tokens_per_s=0.1)
    regions = RegionMap(patient.layout, 50)
    sink = RecordingSink(cancel_after=100)
    assert patient.prefill(prompt, greedy(), regions, bytearray(regions.total_bytes), sink) is None
    with pytest.raises(UsageError, match="above 0"):
        Engine.load(demo_directory, pace_tokens_per_s=0)
