"""A prompt's KVCache goes from the pages of one engine into those of another, over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from prfaas_net.connectors.layout import EngineLayout, GroupLayout, StateKind
from prfaas_net.connectors.orders import ReleaseOrder, StepOrders
from prfaas_net.errors import ConfigError
from tests.connectors.engines import (
    Serving,
    cpu_page,
    hybrid_layout,
    latent_page,
    load_order,
    prefill_order,
    serving,
)

# 70 tokens in blocks of 16: the window (32) has left its first two blocks.
THEIRS = ([3, 5, 4, 9, 7], [0, 0, 11, 12, 13], [15])
OURS = ([2, 8, 1, 6, 10], [0, 0, 14, 17, 16], [20])
STOP = 70
PAGE, STATE_BYTES = (page.n_bytes for page in hybrid_layout().pages)


def test_what_was_prefilled_first_is_taken_later() -> None:
    """The two-step protocol: the prompt is finished and held, then it is asked for, and then its blocks are let go."""
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        there.hold("p")
        here.step(StepOrders(loads=[load_order(there, OURS, 0, STOP)]))
        here.until(lambda: here.received == {"d"})
        assert not here.failed
        assert here.engine.holds(OURS, 0, STOP)
        there.until(lambda: there.sent == {"p"})
        assert there.worker.under_way == (0, 0)
        assert here.worker.under_way == (0, 0)


def test_a_ticket_that_comes_first_waits_for_its_prompt_and_gets_it_chunk_by_chunk() -> None:
    """Both started at once: the decode side reserves, and chunked prefill streams into the reservation."""
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        here.step(StepOrders(loads=[load_order(there, OURS, 0, STOP)]))
        for before, after in ((0, 32), (32, 64), (64, STOP)):
            there.prefill(prefill_order(THEIRS, before, after, STOP))
        here.until(lambda: here.received == {"d"})
        assert here.engine.holds(OURS, 0, STOP)
        there.hold("p")
        there.until(lambda: there.sent == {"p"})


def test_field_38_layers_that_tell_nothing_are_sent_at_the_end_of_the_step() -> None:
    """Recurrent layers have no hooks, and inside a graph no layer has: nothing is left out for that."""
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        here.step(StepOrders(loads=[load_order(there, OURS, 0, STOP)]))
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP), layers=False)
        here.until(lambda: here.received == {"d"})
        assert here.engine.holds(OURS, 0, STOP)


@pytest.mark.parametrize("cached_blocks", range(5))
def test_field_29_a_prefix_that_is_here_is_not_sent_and_nothing_lands_in_its_place(cached_blocks: int) -> None:
    """Only the increment crosses, into the blocks behind the prefix, however long that is."""
    start = cached_blocks * 16
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        there.hold("p")
        here.engine.write(OURS, 0, start, seed=1)
        kept = [here.engine.memory["l0"][block].copy() for block in OURS[0][:cached_blocks]]
        here.step(StepOrders(loads=[load_order(there, OURS, start, STOP)]))
        here.until(lambda: here.received == {"d"})
        assert here.engine.holds(OURS, start, STOP)
        for block, before in zip(OURS[0], kept, strict=False):
            assert (here.engine.memory["l0"][block] == before).all()
        received = here.worker.take_stats()["received_bytes"]
        windows = min(3, 5 - cached_blocks)
        assert received == [PAGE * (2 * (5 - cached_blocks) + windows) + STATE_BYTES]


def test_what_the_prefill_side_had_cached_is_sent_before_its_first_step_ends() -> None:
    """A prefix hit there: tokens that were computed for another prompt are part of this one."""
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        there.engine.write(THEIRS, 0, 48)
        here.step(StepOrders(loads=[load_order(there, OURS, 0, STOP)]))
        there.prefill(prefill_order(THEIRS, 48, STOP, STOP))
        here.until(lambda: here.received == {"d"})
        assert here.engine.holds(OURS, 0, STOP)


def test_a_preempted_prompt_begins_again_and_arrives_whole() -> None:
    """Its blocks go to somebody else in between; what was copied before stays right, the rest comes from new blocks."""
    again = ([18, 19, 21, 22, 23], [0, 0, 6, 8, 10], [14])
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        here.step(StepOrders(loads=[load_order(there, OURS, 0, STOP)]))
        there.prefill(prefill_order(THEIRS, 0, 32, STOP))
        there.step(StepOrders(preempted=["p"]), run=lambda: there.engine.write(THEIRS, 0, STOP, seed=9))
        there.prefill(prefill_order(again, 0, STOP, STOP))
        here.until(lambda: here.received == {"d"})
        assert not here.failed
        assert here.engine.holds(OURS, 0, STOP)


def test_many_prompts_at_once_do_not_mix() -> None:
    """Eight transfers through memory that holds a few of them at a time."""
    layout = hybrid_layout()
    with (
        serving(layout, prefills=True, kv={"arena": "2MiB"}) as there,
        serving(layout, decodes=True, kv={"arena": "2MiB"}) as here,
    ):
        wanted = {}
        for n in range(8):
            blocks = ([2 * n + 1, 2 * n + 2], [0, 2 * n + 1], [n + 1])
            changes = {"transfer_id": f"t{n}"}
            here.step(StepOrders(loads=[load_order(there, blocks, 0, 30, request_id=f"d{n}", **changes)]))
            there.prefill(prefill_order(blocks, 0, 30, 30, request_id=f"p{n}", **changes), seed=n)
            # The state block is written last: the engine computes whole prompts one after the other here.
            there.hold(f"p{n}")
            wanted[f"d{n}"] = blocks
            here.until(lambda n=n: f"d{n}" in here.received)  # type: ignore[misc]
            assert here.engine.holds(blocks, 0, 30, seed=n)
        there.until(lambda: there.sent == {f"p{n}" for n in range(8)})
        assert not here.failed


def test_a_prompt_that_is_not_needed_after_all_is_let_go_at_once() -> None:
    """The decode side found all of it in its own cache, or the request ended before it was scheduled."""
    with serving(hybrid_layout(), prefills=True) as there, serving(hybrid_layout(), decodes=True) as here:
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        there.hold("p")
        host, port = there.worker.control_address
        here.step(StepOrders(releases=[ReleaseOrder("transfer-1", host, port, 5.0)]))
        there.until(lambda: there.sent == {"p"})


def test_pages_may_lie_apart_in_memory() -> None:
    """vLLM pads the pages of some groups to one size."""
    with (
        serving(hybrid_layout(), prefills=True, gap_bytes=24) as there,
        serving(hybrid_layout(), decodes=True, gap_bytes=1000) as here,
    ):
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        there.hold("p")
        here.step(StepOrders(loads=[load_order(there, OURS, 0, STOP)]))
        here.until(lambda: here.received == {"d"})
        assert here.engine.holds(OURS, 0, STOP)


def ranked_layout(block_tokens: int, tp_size: int, tp_rank: int) -> EngineLayout:
    """Two KV heads split over ranks, and latents that every rank has."""
    pages = (cpu_page(2 // tp_size, block_tokens, 4), latent_page(block_tokens, 8))
    groups = (
        GroupLayout(StateKind.FULL, block_tokens, 0, 2, (("l0", 0),)),
        GroupLayout(StateKind.FULL, block_tokens, 0, 0, (("l1", 1),)),
    )
    return EngineLayout("test 1", "tiny", "w", tp_size, tp_rank, pages, groups)


@contextmanager
def two_ranks(**role: bool) -> Iterator[tuple[Serving, Serving]]:
    """Both ranks of an engine, on neighbouring ports."""
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = int(sock.getsockname()[1])
        try:
            with ExitStack() as stack:
                ranks = [
                    stack.enter_context(serving(ranked_layout(16, 2, rank), listen=f"127.0.0.1:{port}", **role))
                    for rank in range(2)
                ]
                yield ranks[0], ranks[1]
                return
        except ConfigError:
            continue  # the port beside it was somebody's
    raise AssertionError("no two neighbouring ports are free")


def test_heads_of_two_prefill_ranks_meet_in_one_decode_rank_with_blocks_of_another_size() -> None:
    """Each prefill rank sends its head, one of them the latents; both let go only then."""
    theirs, ours = ([3, 5, 4, 9, 7], [2, 6, 8, 10, 12]), ([2, 8, 1], [4, 6, 10])
    with two_ranks(prefills=True) as ranks, serving(ranked_layout(32, 1, 0), decodes=True) as here:
        here.step(StepOrders(loads=[load_order(ranks[0], ours, 0, STOP)]))
        for rank, there in enumerate(ranks):
            there.prefill(prefill_order(theirs, 0, STOP, STOP), heads=range(rank, rank + 1))
            there.hold("p")
        here.until(lambda: here.received == {"d"})
        assert not here.failed
        assert here.engine.holds(ours, 0, STOP)
        for there in ranks:
            there.until(lambda there=there: there.sent == {"p"})  # type: ignore[misc]


def test_one_prefill_rank_serves_two_decode_ranks_and_lets_go_after_both() -> None:
    """Each takes its own head and a copy of the latents."""
    theirs, ours = ([2, 8, 1], [4, 6, 10]), ([3, 5, 4, 9, 7], [2, 6, 8, 10, 12])
    with serving(ranked_layout(32, 1, 0), prefills=True) as there, two_ranks(decodes=True) as ranks:
        there.prefill(prefill_order(theirs, 0, STOP, STOP))
        there.hold("p")
        for rank, here in enumerate(ranks):
            assert there.step(StepOrders()).sent == set()
            here.step(StepOrders(loads=[load_order(there, ours, 0, STOP)]))
            here.until(lambda here=here: here.received == {"d"})  # type: ignore[misc]
            assert not here.failed
            assert here.engine.holds(ours, 0, STOP, heads=range(rank, rank + 1))
        there.until(lambda: there.sent == {"p"})
