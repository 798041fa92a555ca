"""Two engines agree on how KVCache can go from one to the other, or say why it cannot."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from prfaas_net.connectors.agreement import Form, agree, heads_of
from prfaas_net.connectors.layout import EngineLayout, GroupLayout, PageLayout, StateKind
from prfaas_net.connectors.plan import PagePlan, sections_of
from prfaas_net.errors import IncompatibleError
from tests.connectors.engines import FakeEngine, cpu_page, gpu_page, hybrid_layout, latent_page

TOKENS = 40
TP = (1, 2, 4, 8)


def attention(page: PageLayout, tokens: int, total_heads: int, tp_size: int = 1, tp_rank: int = 0) -> EngineLayout:
    group = GroupLayout(StateKind.FULL, tokens, 0, total_heads, (("l0", 0), ("l1", 0)))
    return EngineLayout("test 1", "tiny", "w", tp_size, tp_rank, (page,), (group,))


def blocks_for(n_tokens: int, block_tokens: int) -> tuple[list[int], ...]:
    return ([1 + 2 * n for n in range(-(-n_tokens // block_tokens))],)


def hand_over(source: FakeEngine, target: FakeEngine, rank: int, start: int = 0) -> bool:
    """Everything that one prefill rank gives, chunk by chunk as the stream would carry it; False if that is nothing."""
    shares = agree(target.layout, source.layout).shares.get(rank)
    if shares is None:
        return False
    theirs = blocks_for(TOKENS, source.layout.groups[0].block_tokens)
    ours = blocks_for(TOKENS, target.layout.groups[0].block_tokens)
    plan = PagePlan(TOKENS, sections_of(target.layout, shares, ours, start, TOKENS), 12, 1 << 20)
    plan = PagePlan.from_json(plan.to_json())
    plan.check(source.layout)
    for chunk in plan.chunks:
        section, data = plan.sections[chunk.section], memoryview(bytearray(chunk.n_bytes))
        source.pages.gather(chunk, section, theirs[0], data, lambda: None)
        target.pages.scatter(chunk, section, ours[0], data, shares[chunk.layer].target_heads)
    return True


@pytest.mark.parametrize(("theirs", "ours"), list(product(TP, TP)))
def test_field_35_heads_arrive_in_their_place_for_every_split_over_ranks(theirs: int, ours: int) -> None:
    """Also where there are more ranks than heads, which then hold copies."""
    for total in TP:
        sources = []
        for rank in range(theirs):
            low, high = heads_of(total, theirs, rank)
            sources.append(FakeEngine(attention(cpu_page(high - low, 16, 4), 16, total, theirs, rank)))
            sources[-1].write(blocks_for(TOKENS, 16), 0, TOKENS, heads=range(low, high))
        for rank in range(ours):
            first, last = heads_of(total, ours, rank)
            target = FakeEngine(attention(cpu_page(last - first, 16, 4), 16, total, ours, rank))
            for source_rank, source in enumerate(sources):
                hand_over(source, target, source_rank)
            assert target.holds(blocks_for(TOKENS, 16), 0, TOKENS, heads=range(first, last)), (total, rank)


@pytest.mark.parametrize(("theirs", "ours"), list(product((8, 16, 32), (8, 16, 32))))
@pytest.mark.parametrize("head_major", [True, False])
def test_blocks_of_another_size_and_rows_in_another_order_are_converted(
    theirs: int, ours: int, head_major: bool
) -> None:
    """Whatever the block sizes, and heads outside tokens there and inside here."""
    source = FakeEngine(attention(gpu_page(2, theirs, 4, head_major=head_major), theirs, 2))
    target = FakeEngine(attention(gpu_page(2, ours, 4, head_major=True), ours, 2))
    source.write(blocks_for(TOKENS, theirs), 0, TOKENS)
    assert hand_over(source, target, 0)
    assert target.holds(blocks_for(TOKENS, ours), 0, TOKENS)


@pytest.mark.parametrize(("theirs", "ours"), [(16, 64), (64, 16), (32, 16)])
def test_of_a_window_no_more_is_asked_for_than_smaller_blocks_still_hold(theirs: int, ours: int) -> None:
    """Blocks that a window has left are null there, though a larger block here begins before them."""
    window, stop = 32, 200

    def one(tokens: int) -> tuple[EngineLayout, tuple[list[int], ...]]:
        group = GroupLayout(StateKind.WINDOW, tokens, window, 2, (("l0", 0),))
        layout = EngineLayout("test 1", "tiny", "w", 1, 0, (cpu_page(2, tokens, 4),), (group,))
        left = (stop - window + 1) // tokens  # blocks that the token at ``stop`` does not see any part of
        return layout, ([0] * left + list(range(1, 1 - (-stop // tokens) - left)),)

    (their_layout, their_blocks), (our_layout, our_blocks) = one(theirs), one(ours)
    source, target = FakeEngine(their_layout), FakeEngine(our_layout)
    source.write(their_blocks, 0, stop)
    target.memory["l0"][:] = 255
    shares = agree(our_layout, their_layout).shares[0]
    plan = PagePlan(stop, sections_of(our_layout, shares, our_blocks, 0, stop), 12, 1 << 20)
    for chunk in plan.chunks:
        data = memoryview(bytearray(chunk.n_bytes))
        source.pages.gather(chunk, plan.sections[0], their_blocks[0], data, lambda: None)
        target.pages.scatter(chunk, plan.sections[0], our_blocks[0], data, (0, 0))
    assert target.holds(our_blocks, stop - window + 1, stop)
    before = (stop - window + 1) % ours
    for part in target.pages._parts["l0"]:
        assert np.count_nonzero(part[our_blocks[0][(stop - window + 1) // ours], :, :before]) == 0


def test_equal_pages_are_copied_as_they_are() -> None:
    """Then nothing has to be known of what is in them, and a page crosses in one piece."""
    page = PageLayout(640, "bfloat16", "cpu amx")  # packed for matrix units
    layout = attention(page, 16, 2)
    shares = agree(layout, layout).shares
    assert {share.form for share in shares[0].values()} == {Form.PAGES}


def test_rows_behind_the_last_token_are_zeroed_where_rows_are_written() -> None:
    """Masked rows must not be what the last user left: a NaN survives multiplication by zero."""
    source = FakeEngine(attention(cpu_page(2, 16, 4), 16, 2))
    target = FakeEngine(attention(cpu_page(2, 32, 4), 32, 2))
    target.memory["l0"][:] = 255
    source.write(blocks_for(TOKENS, 16), 0, TOKENS)
    hand_over(source, target, 0)
    last = blocks_for(TOKENS, 32)[0][-1]
    for part in target.pages._parts["l0"]:
        assert np.count_nonzero(part[last, :, TOKENS % 32 :]) == 0


def test_field_37_what_every_rank_holds_is_sent_once_and_the_other_ranks_are_told() -> None:
    """Latents are the same on every rank: one of four sends to the one that decodes, three have nothing to wait for."""
    group = GroupLayout(StateKind.FULL, 16, 0, 0, (("l0", 0),))
    ours = EngineLayout("test 1", "tiny", "w", 1, 0, (latent_page(16, 8),), (group,))
    agreed = agree(ours, replace(ours, tp_size=4))
    assert list(agreed.shares) == [0]
    assert agreed.claims == (1, 0, 0, 0)
    spread = [list(agree(replace(ours, tp_size=4, tp_rank=rank), ours).shares) for rank in range(4)]
    assert spread == [[0]] * 4
    assert agree(replace(ours, tp_size=4), ours).claims == (4,)


def refusal(ours: EngineLayout, theirs: EngineLayout) -> IncompatibleError:
    with pytest.raises(IncompatibleError) as caught:
        agree(ours, theirs)
    error = caught.value
    assert error.expected is not None
    assert error.found is not None
    assert error.do
    return error


def test_field_36_recurrent_state_is_not_cut_over_ranks_by_guesswork() -> None:
    """Its parts have borders that a contiguous cut would miss."""
    error = refusal(hybrid_layout(), hybrid_layout(tp_size=2))
    assert "recurrent state" in error.message
    assert "--tensor-parallel-size" in str(error.do)


def test_field_41_a_refusal_names_what_differs_both_values_and_what_to_change() -> None:
    """Every field of a layout that must agree."""
    ours = hybrid_layout()
    pages = (replace(ours.pages[0], dtype="bfloat16"), ours.pages[1])
    assert refusal(ours, replace(ours, weights="x")).line().startswith("the prefill server runs another model")
    assert "--dtype" in str(refusal(ours, replace(ours, pages=pages)).do)
    moved = replace(ours.pages[1], n_bytes=999)
    assert "VLLM_SSM_CONV_STATE_LAYOUT" in str(refusal(ours, replace(ours, pages=(ours.pages[0], moved))).do)
    packed = replace(ours.pages[0], parts=(), tag="cpu amx")
    assert "--block-size" in str(refusal(ours, replace(ours, pages=(packed, ours.pages[1]))).do)
    fewer = replace(ours, groups=ours.groups[:2])
    assert "l3" in str(refusal(ours, fewer).found)
    window = replace(ours.groups[1], window_tokens=64)
    assert "l1" in refusal(ours, replace(ours, groups=(ours.groups[0], window, ours.groups[2]))).message


def test_field_42_versions_are_compared_before_anything_else() -> None:
    """Another version of the connector or of the engine is told as that, whatever else it would have got wrong."""
    ours = hybrid_layout()
    other = EngineLayout.from_json({"protocol": 9, "engine": "vllm 9", "pages": "unknown"})
    assert "different versions" in refusal(ours, other).message
    assert refusal(ours, replace(ours, engine="test 2")).found == "test 2"


def test_a_plan_for_other_pages_is_refused_by_whoever_would_read_them() -> None:
    """The prefill side checks what it is asked for against its own pages."""
    ours, theirs = hybrid_layout(16), hybrid_layout(32)
    shares = agree(ours, ours).shares[0]
    sections = sections_of(ours, shares, ([1, 2], [3, 4], [5]), 0, 20)
    with pytest.raises(IncompatibleError, match="other pages"):
        PagePlan(20, sections, 16, 1 << 20).check(theirs)
