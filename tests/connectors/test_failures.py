"""Whatever breaks, both engines are told once, in time, and nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from prfaas_net.connectors.config import check_engine
from prfaas_net.connectors.layout import EngineLayout, StateKind
from prfaas_net.connectors.orders import StepOrders
from prfaas_net.errors import ConfigError
from tests.connectors.engines import Serving, config, hybrid_layout, load_order, prefill_order, serving
from tests.connectors.test_hand_over import OURS, STOP, THEIRS

# A transfer's own deadline in these tests, and how much later than that the engine may hear of it here.
DEADLINE_S, LATE_S = 0.5, 10.0


@pytest.fixture
def there() -> Iterator[Serving]:
    with serving(hybrid_layout(), prefills=True, pairing="500ms") as opened:
        yield opened


@pytest.fixture
def here() -> Iterator[Serving]:
    with serving(hybrid_layout(), decodes=True) as opened:
        yield opened


def load(here: Serving, *orders: object) -> None:
    here.step(StepOrders(loads=list(orders)))  # type: ignore[arg-type]


def ends_failed(here: Serving, name: str = "d") -> None:
    """The load is told as ended and failed, once, and holds nothing."""
    here.until(lambda: name in here.received)
    assert name in here.failed
    assert here.worker.under_way[1] == 0
    assert here.step(StepOrders()).loads.received == set()


def said(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.text


def test_field_01_a_prefill_server_that_dies_during_a_transfer_fails_the_load(here: Serving) -> None:
    """Its connections end; the load does not wait for its deadline, and the pages are the engine's again."""
    with serving(hybrid_layout(), prefills=True) as there:
        load(here, load_order(there, OURS, 0, STOP))
        there.prefill(prefill_order(THEIRS, 0, 32, STOP))
        here.until(lambda: there.worker.take_stats() is not None and here.worker.under_way[1] == 1)
    ends_failed(here)


def test_field_02_one_deadline_bounds_a_load_whose_prompt_never_ends(there: Serving, here: Serving) -> None:
    """The prompt is there and does not go on: the load ends at its deadline, and so does the claim."""
    there.prefill(prefill_order(THEIRS, 0, 16, STOP))
    begun = time.monotonic()
    load(here, load_order(there, OURS, 0, STOP, deadline_s=DEADLINE_S))
    ends_failed(here)
    assert DEADLINE_S <= time.monotonic() - begun < DEADLINE_S + LATE_S


def test_a_finished_prompt_that_nobody_takes_is_let_go_at_its_deadline(there: Serving) -> None:
    """Blocks are not kept for a decode server that never comes."""
    there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
    there.hold("p", deadline_s=DEADLINE_S)
    there.until(lambda: there.sent == {"p"})
    assert there.worker.under_way[0] == 0
    assert there.worker.take_stats()["expired_holds"] == [1]


def test_a_ticket_whose_prompt_never_comes_is_answered_in_time(
    there: Serving, here: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefill request was lost, or went to another server."""
    load(here, load_order(there, OURS, 0, STOP))
    ends_failed(here)
    assert "no prompt with this transfer_id is here" in said(caplog)


def test_a_closed_port_is_named_at_once(here: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """With what to look at: the address, and whether it is open between the sites."""
    with serving(hybrid_layout(), prefills=True) as there:
        order = load_order(there, OURS, 0, STOP)
    load(here, order)
    ends_failed(here)
    assert f"cannot reach the prefill server's connector at 127.0.0.1:{order.port}" in said(caplog)


def test_field_24_a_request_given_up_at_any_stage_frees_both_sides(there: Serving, here: Serving) -> None:
    """Before the prompt is there, while it runs, and after it has been finished."""
    load(here, load_order(there, OURS, 0, STOP, request_id="d1", transfer_id="t1"))
    here.step(StepOrders(), ["d1"])
    ends_failed(here, "d1")
    load(here, load_order(there, OURS, 0, STOP, request_id="d2", transfer_id="t2"))
    there.prefill(prefill_order(THEIRS, 0, 32, STOP, request_id="p2", transfer_id="t2"))
    here.step(StepOrders(), ["d2"])
    ends_failed(here, "d2")
    there.prefill(prefill_order(THEIRS, 32, STOP, STOP, request_id="p2", transfer_id="t2"))
    there.hold("p2", deadline_s=DEADLINE_S)
    there.until(lambda: there.sent == {"p2"})
    assert there.worker.under_way[0] == 0


def test_field_25_a_request_that_ends_after_it_was_given_up_is_told_once(there: Serving, here: Serving) -> None:
    """Given up in the moment in which it succeeds: one word, whichever."""
    there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
    there.hold("p")
    load(here, load_order(there, OURS, 0, STOP))
    there.until(lambda: there.sent == {"p"})
    told = [here.step(StepOrders(), ["d"]).loads.received for _ in range(2)]
    here.until(lambda: here.worker.under_way[1] == 0)
    told.append(here.step(StepOrders()).loads.received)
    told.append(here.step(StepOrders()).loads.received)
    assert here.received == {"d"}
    assert sum("d" in names for names in told) <= 1


def test_field_27_a_prompt_given_up_on_the_prefill_side_fails_the_load_with_that_reason(
    there: Serving, here: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks belong to somebody else from that step on; nothing of them is read any more."""
    load(here, load_order(there, OURS, 0, STOP))
    there.prefill(prefill_order(THEIRS, 0, 32, STOP))
    there.step(StepOrders(dropped=["p"]), ["p"], run=lambda: there.engine.write(THEIRS, 0, STOP, seed=9))
    ends_failed(here)
    assert "the prefill was given up" in said(caplog)
    assert there.worker.under_way[0] == 0
    assert there.sent == set()


def test_field_21_another_prompts_kvcache_is_never_taken(
    there: Serving, here: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """One name, two prompts: what is there is not what is asked for, and the pages stay as they were."""
    there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
    there.hold("p")
    load(here, load_order(there, OURS, 0, STOP, digest="another"))
    ends_failed(here)
    assert "the two servers were given different prompts" in said(caplog)
    assert not any(pages.any() for pages in here.engine.memory.values())
    load(here, load_order(there, OURS, 0, STOP, request_id="d2", transfer_id="unknown"))
    ends_failed(here, "d2")


def test_a_second_taker_of_one_prompt_does_not_wait_for_its_deadline(there: Serving, here: Serving) -> None:
    """Several choices of one answer, say, that share a transfer_id: one of them is served, the others compute."""
    load(here, *(load_order(there, OURS, 0, STOP, request_id=name) for name in ("d1", "d2")))
    there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
    there.hold("p")
    here.until(lambda: here.received == {"d1", "d2"})
    assert len(here.failed) <= 1
    there.until(lambda: there.sent == {"p"})
    assert here.worker.held_bytes == 0


def test_field_43_a_server_that_was_refused_is_asked_again(here: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """A handshake that failed leaves nothing behind: the next server at the same address is taken for what it is."""
    wrong = replace(hybrid_layout(), weights="other", model="another")
    with serving(wrong, prefills=True) as there:
        port = there.worker.control_address[1]
        load(here, load_order(there, OURS, 0, STOP))
        ends_failed(here)
        assert "the prefill server runs another model" in said(caplog)
    with serving(hybrid_layout(), prefills=True, listen=f"127.0.0.1:{port}") as there:
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        load(here, load_order(there, OURS, 0, STOP, request_id="d2"))
        here.until(lambda: "d2" in here.received)
        assert "d2" not in here.failed


def test_field_08_a_prefill_server_that_restarts_is_known_for_another(here: Serving) -> None:
    """Its layout was asked for before the restart; it is asked for again, and the load succeeds."""
    with serving(hybrid_layout(), prefills=True) as there:
        port = there.worker.control_address[1]
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        load(here, load_order(there, OURS, 0, STOP))
        here.until(lambda: "d" in here.received)
    with serving(hybrid_layout(), prefills=True, listen=f"127.0.0.1:{port}") as there:
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        load(here, load_order(there, OURS, 0, STOP, request_id="d2"))
        here.until(lambda: "d2" in here.received)
        assert here.failed == set()


def test_field_44_a_failed_load_names_the_blocks_that_it_did_not_fill(there: Serving, here: Serving) -> None:
    """Those behind the prefix that was here, of every group of attention layers; never the null block."""
    load(here, load_order(there, OURS, 32, STOP, transfer_id="unknown"))
    ends_failed(here)
    assert here.bad_blocks == {1, 6, 10, 14, 17, 16}


def test_field_45_giving_up_many_requests_leaves_no_memory_taken(there: Serving, here: Serving) -> None:
    """Offers, claims, and the memory that chunks pass through, on both sides."""
    for n in range(30):
        changes = {"transfer_id": f"t{n}"}
        load(here, load_order(there, OURS, 0, STOP, request_id=f"d{n}", **changes))
        there.prefill(prefill_order(THEIRS, 0, 32, STOP, request_id=f"p{n}", **changes))
        if n % 2:
            there.step(StepOrders(dropped=[f"p{n}"]), [f"p{n}"])
        here.step(StepOrders(), [f"d{n}"])
        if not n % 2:
            there.step(StepOrders(dropped=[f"p{n}"]), [f"p{n}"])
    here.until(lambda: len(here.received) == 30)
    there.until(lambda: there.worker.held_bytes == 0 and here.worker.held_bytes == 0)
    assert there.worker.under_way[0] == 0
    assert here.worker.under_way[1] == 0


def test_a_transfer_larger_than_its_memory_is_refused_with_the_setting_to_change(
    there: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    """It would wait for ever otherwise."""
    large = EngineLayout.from_json(hybrid_layout().to_json())
    groups = tuple(
        replace(group, layers=(("l3", 2),)) if group.kind is StateKind.STATE else group for group in large.groups
    )
    state = replace(large.pages[1], n_bytes=3 << 20)
    large = replace(large, pages=(*large.pages, state), groups=groups)
    with serving(large, prefills=True) as there, serving(large, decodes=True, kv={"arena": "2MiB"}) as here:
        there.prefill(prefill_order(THEIRS, 0, STOP, STOP))
        load(here, load_order(there, OURS, 0, STOP))
        ends_failed(here)
    assert "raise kv.arena" in said(caplog)


def test_a_prefill_server_with_a_key_serves_nobody_without_it(here: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """The error says what is missing."""
    with serving(hybrid_layout(), prefills=True, node_key="a key of some length") as there:
        load(here, load_order(there, OURS, 0, STOP))
        ends_failed(here)
    assert "node key" in said(caplog)


def test_settings_that_cannot_work_are_refused_with_their_name() -> None:
    """At the start, not at the first request."""
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.*unknown key.*deadlin"):
        config(deadlin="3s")
    with serving(hybrid_layout(), prefills=True) as there:
        host, port = there.worker.control_address
        with (
            pytest.raises(ConfigError, match="port in use"),
            serving(hybrid_layout(), prefills=True, listen=f"{host}:{port}"),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="without authentication"),
        serving(hybrid_layout(), prefills=True, listen="0.0.0.0:0"),
    ):
        pass


def test_field_40_engine_settings_that_cannot_work_are_refused_at_the_start() -> None:
    """With the flag to change: ways of keeping recurrent state and of splitting a model that do not fit."""
    good: dict[str, Any] = {"pipeline_ranks": 1, "context_ranks": 1, "state_mode": "align"}
    check_engine(config(), "kv_both", **good)
    for change, flag in (
        ({"state_mode": "all"}, "--mamba-cache-mode align"),
        ({"pipeline_ranks": 2}, "--pipeline-parallel-size"),
        ({"context_ranks": 2}, "--decode-context-parallel-size"),
    ):
        with pytest.raises(ConfigError, match=flag):
            check_engine(config(), "kv_both", **{**good, **change})
    with pytest.raises(ConfigError, match="set advertise"):
        check_engine(config(listen="0.0.0.0:1"), "kv_producer", **good)
    check_engine(config(listen="0.0.0.0:1"), "kv_consumer", **good)
