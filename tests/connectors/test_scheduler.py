"""What a scheduler's connector makes of requests, without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prfaas_net.connectors.layout import digest_of
from prfaas_net.connectors.orders import Blocks
from prfaas_net.connectors.scheduler import ScheduledStep, SchedulerSide, SideInfo

BLOCKS: Blocks = ([1, 2, 3], [0, 4, 5])


@dataclass
class Request:
    kv_transfer_params: dict[str, Any] | None
    request_id: str = "r"
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(40)))
    num_prompt_tokens: int = 40

    def shorten(self) -> None:
        assert self.prompt_token_ids is not None
        del self.prompt_token_ids[-1:]
        self.num_prompt_tokens -= 1


def side(*, prefills: bool = True, decodes: bool = True) -> SchedulerSide:
    return SchedulerSide(SideInfo("engine", "10.0.0.1", 14579, 1, prefills, decodes, 60.0))


def asked(**more: Any) -> dict[str, Any]:
    return {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "p", "remote_port": 1, **more}


def test_a_prompt_is_run_without_its_last_token_and_its_answer_says_where_it_is() -> None:
    """h(N-1): the decode side computes the last token, and both sides mean the same N-1 tokens."""
    scheduler, request = side(), Request({"do_remote_decode": True})
    scheduler.arrive(request, "", request.shorten)
    orders = scheduler.take_orders([ScheduledStep("r", 0, 39)], lambda name: BLOCKS)
    (order,) = orders.prefills
    assert (order.before, order.after, order.stop, order.blocks) == (0, 39, 39, BLOCKS)
    assert order.digest == digest_of(list(range(40)), 39)
    held, params = scheduler.finished(request, completed=True)
    assert held
    assert params is not None
    assert params["transfer_id"] == order.transfer_id
    assert (params["remote_host"], params["remote_port"], params["remote_num_tokens"]) == ("10.0.0.1", 14579, 39)
    assert [hold.request_id for hold in scheduler.take_orders([], lambda name: BLOCKS).holds] == ["r"]


def test_what_the_prefill_side_answers_is_what_the_decode_side_takes() -> None:
    """Verbatim, as vllm-router copies it; the prompts are compared by their digest."""
    there, first = side(), Request({"do_remote_decode": True})
    there.arrive(first, "lora", first.shorten)
    (prefill,) = there.take_orders([ScheduledStep("r", 0, 39)], lambda name: BLOCKS).prefills
    _, params = there.finished(first, completed=True)
    here, second = side(), Request(params)
    assert here.loadable(second, 16) == 23
    here.allocated(second, "lora", BLOCKS, 23)
    (load,) = here.take_orders([], lambda name: BLOCKS).loads
    assert (load.start, load.stop, load.digest, load.refusal) == (16, 39, prefill.digest, "")
    assert load.transfer_id == prefill.transfer_id


def test_a_load_is_tried_once_and_then_the_prompt_is_computed_here() -> None:
    """After a failure, or a preemption, the scheduler asks again what could be loaded: nothing."""
    scheduler, request = side(), Request(asked())
    assert scheduler.loadable(request, 0) == 39
    assert scheduler.loadable(request, 0) == 39  # asking changes nothing
    scheduler.allocated(request, "", BLOCKS, 39)
    assert scheduler.loadable(request, 0) == 0
    scheduler.allocated(request, "", BLOCKS, 0)
    assert len(scheduler.take_orders([], lambda name: BLOCKS).loads) == 1


def test_field_39_state_of_another_length_is_never_loaded() -> None:
    """A recurrent state is that of exactly N-1 tokens: a prompt that is longer here is not continued from it."""
    scheduler, request = side(), Request(asked(remote_num_tokens=30))
    scheduler.allocated(request, "", BLOCKS, scheduler.loadable(request, 0))
    (load,) = scheduler.take_orders([], lambda name: BLOCKS).loads
    assert "the prefill server ran another prompt: 31 tokens there, 40 here" in load.refusal


def test_field_31_engines_request_ids_never_name_a_transfer() -> None:
    """Both engines make up ids of their own; what joins the halves is transfer_id alone."""
    there, first = side(), Request({"do_remote_decode": True, "transfer_id": "t"}, request_id="a")
    there.arrive(first, "", first.shorten)
    (prefill,) = there.take_orders([ScheduledStep("a", 0, 39)], lambda name: BLOCKS).prefills
    here, second = side(), Request(asked(), request_id="b")
    here.allocated(second, "", BLOCKS, 39)
    (load,) = here.take_orders([], lambda name: BLOCKS).loads
    assert prefill.transfer_id == load.transfer_id == "t"
    assert prefill.digest == load.digest


def test_requests_of_the_wrong_role_are_answered_with_the_reason() -> None:
    """They are served without any transfer, and the answer says why."""
    scheduler, request = side(prefills=False), Request({"do_remote_decode": True})
    scheduler.arrive(request, "", request.shorten)
    assert request.num_prompt_tokens == 40
    held, params = scheduler.finished(request, completed=True)
    assert not held
    assert params == {"error": "wrong role: do_remote_decode was asked of a server with kv_role kv_consumer"}
    scheduler, request = side(decodes=False), Request(asked())
    assert scheduler.loadable(request, 0) == 0
    scheduler.allocated(request, "", BLOCKS, 0)
    assert "kv_producer" in str(scheduler.finished(request, completed=True)[1])


def test_parameters_that_cannot_be_used_are_refused_with_what_is_missing() -> None:
    """Never an exception: that would end the engine."""
    bad: list[dict[str, Any]] = [
        {"transfer_id": None}, {"transfer_id": "x" * 200}, {"remote_host": ""}, {"remote_port": "80"},
        {"remote_port": 0}, {"transfer_id": "a\nb"},
    ]  # fmt: skip
    for change in bad:
        scheduler, request = side(), Request(asked(**change))
        scheduler.allocated(request, "", BLOCKS, 39)
        (load,) = scheduler.take_orders([], lambda name: BLOCKS).loads
        assert "no usable transfer_id, remote_host and remote_port" in load.refusal
    for params in ({"transfer_id": "a\nb"}, {"do_remote_prefill": True}, {"transfer_id": 7}):
        scheduler, request = side(), Request({"do_remote_decode": True, **params})
        scheduler.arrive(request, "", request.shorten)
        assert scheduler.finished(request, completed=True)[0] is False
    scheduler = side()
    for request in (Request({"do_remote_decode": True}, prompt_token_ids=[1], num_prompt_tokens=1),
                    Request({"do_remote_decode": True}, prompt_token_ids=None)):  # fmt: skip
        scheduler.arrive(request, "", request.shorten)
        assert scheduler.finished(request, completed=True)[0] is False


def test_a_transfer_id_that_is_in_use_is_refused() -> None:
    """Two prompts under one name could not be told apart; the name is free again when the first has ended."""
    scheduler = side()
    first, second, third = (
        Request({"do_remote_decode": True, "transfer_id": "t"}, request_id=str(n)) for n in range(3)
    )
    scheduler.arrive(first, "", first.shorten)
    scheduler.arrive(second, "", second.shorten)
    assert "in use" in str(scheduler.finished(second, completed=True)[1])
    scheduler.finished(first, completed=True)
    scheduler.arrive(third, "", third.shorten)
    assert scheduler.finished(third, completed=True)[0]


def test_a_request_that_ends_early_tells_the_other_side() -> None:
    """A prompt that was aborted is dropped; one that was never loaded is released."""
    scheduler, request = side(), Request({"do_remote_decode": True})
    scheduler.arrive(request, "", request.shorten)
    assert scheduler.finished(request, completed=False) == (False, None)
    assert scheduler.has_orders
    assert scheduler.take_orders([], lambda name: BLOCKS).dropped == ["r"]
    request = Request(asked())
    scheduler.finished(request, completed=False)
    (release,) = scheduler.take_orders([], lambda name: BLOCKS).releases
    assert (release.transfer_id, release.host, release.port) == ("t", "p", 1)


def test_a_prompt_that_is_cached_here_needs_nothing_and_says_so() -> None:
    """Every block of it was in the decode side's own cache."""
    scheduler, request = side(), Request(asked(), num_prompt_tokens=33, prompt_token_ids=list(range(33)))
    assert scheduler.loadable(request, 32) == 0
    scheduler.allocated(request, "", BLOCKS, 0)
    orders = scheduler.take_orders([], lambda name: BLOCKS)
    assert not orders.loads
    assert len(orders.releases) == 1


def test_a_request_may_ask_for_less_time_than_the_server_gives() -> None:
    """Never for more, and nonsense is not heard."""
    for wanted, given in ((5, 5.0), (600, 60.0), (-1, 60.0), ("5", 60.0), (True, 60.0)):
        scheduler, request = side(), Request(asked(transfer_deadline_s=wanted))
        scheduler.allocated(request, "", BLOCKS, 39)
        assert scheduler.take_orders([], lambda name: BLOCKS).loads[0].deadline_s == given


def test_requests_without_parameters_are_nobodys_business() -> None:
    """They are served as if there were no connector."""
    scheduler = side()
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": False}):
        request = Request(params)
        scheduler.arrive(request, "", request.shorten)
        assert scheduler.loadable(request, 0) == 0
        scheduler.allocated(request, "", BLOCKS, 0)
        assert scheduler.finished(request, completed=True) == (False, None)
    orders = scheduler.take_orders([ScheduledStep("r", 0, 40)], lambda name: BLOCKS)
    assert not orders.prefills
    assert not scheduler.has_orders
