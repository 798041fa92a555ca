"""Bitmaps, tickets, the send queue and the transition tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.errors import AuthError, ProtocolError
from prfaas_net.wire import Ticket, TicketSigner
from prfaas_net.wire.bitmap import ChunkBitmap
from prfaas_net.wire.send_queue import SendQueue
from prfaas_net.wire.states import SENDER, TABLES, Machine, Table, Tx, TxEvent

TICKET = Ticket("1" * 32, "boot", (("127.0.0.1", 9),), 100, 2, "table", 30.0, {"start_token": 0})


@given(st.integers(1, 100).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=60))))
def test_reports_carry_exactly_what_was_added(case: tuple[int, list[int]]) -> None:
    """Merging every report of one bitmap makes the other equal, each chunk new once."""
    n_chunks, added = case
    here, there = ChunkBitmap(n_chunks), ChunkBitmap(n_chunks)
    seen: list[int] = []
    for index, chunk in enumerate(added):
        here.add(chunk)
        if index % 3 == 0 and (report := here.take_report()) is not None:
            seen += there.merge(*report)
    whole = here.take_report(whole=True)
    assert whole is not None
    seen += there.merge(*whole)
    assert sorted(seen) == sorted(set(added))
    assert there.count == here.count == len(set(added))


@pytest.mark.parametrize(("first", "bits"), [(8, b"\x01"), (0, b"\x00\x01"), (4, b"\x01"), (0, b"\x20")])
def test_reports_of_chunks_that_do_not_exist_are_refused(first: int, bits: bytes) -> None:
    """A peer cannot acknowledge what there is not."""
    with pytest.raises(ProtocolError):
        list(ChunkBitmap(5).merge(first, bits))


def test_a_ticket_survives_json_and_only_its_issuer_accepts_it() -> None:
    """Signature over every field, checked by the one who holds the key."""
    signer = TicketSigner(b"k" * 32)
    ticket = Ticket.from_json(signer.sign(TICKET).to_json())
    signer.check(ticket)
    with pytest.raises(AuthError):
        TicketSigner(b"x" * 32).check(ticket)


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": "2" * 32},
        {"total_bytes": 10**12},
        {"lifetime_s": 1e9},
        {"endpoints": (("10.0.0.1", 9),)},
        {"manifest": {"start_token": 5}},
        {"signature": ""},
    ],
)
def test_an_altered_ticket_is_refused(change: dict[str, object]) -> None:
    """No field can be changed."""
    signer = TicketSigner(b"k" * 32)
    with pytest.raises(AuthError):
        signer.check(replace(signer.sign(TICKET), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["transfer_id", "endpoints", "total_bytes", "manifest", "signature"])
@pytest.mark.parametrize("value", [None, 7.5, ["x"], {"y": []}])
def test_a_ticket_of_the_wrong_form_is_a_protocol_error(field: str, value: object) -> None:
    """Never a TypeError from deep inside."""
    body = TICKET.to_json() | {field: value}
    if field == "manifest" and isinstance(value, dict):
        return
    with pytest.raises(ProtocolError):
        Ticket.from_json(body)


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "discard", "drop"]), st.integers(1, 3), st.integers(0, 7))))
def test_the_send_queue_hands_out_each_queued_chunk_once(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain set: nothing lost, nothing twice, nothing of a dropped transfer."""
    queue, model = SendQueue(), {handle: set[int]() for handle in (1, 2, 3)}
    for handle in model:
        queue.add_transfer(handle, (10,) * 8, deadline=float(handle))
        queue.release(handle)
    for action, handle, chunk in steps:
        if action == "pop":
            popped = queue.pop()
            assert (popped is None) == (not any(model.values()))
            if popped is not None:
                model[popped[0]].remove(popped[1])
        elif action == "drop":
            queue.drop(handle)
            model.pop(handle, None)
        elif handle in model and action == "push":
            assert queue.push(handle, chunk) == (chunk not in model[handle])
            model[handle].add(chunk)
        elif handle in model:
            queue.discard(handle, chunk)
            model[handle].discard(chunk)
        assert queue.waiting() == any(model.values())


def test_an_illegal_transition_names_state_event_and_what_is_possible() -> None:
    """The error reads as a sentence."""
    machine = Machine("sender", SENDER, Tx.OPENING)
    with pytest.raises(ProtocolError, match="done is not possible for a sender that is opening; expected ready"):
        machine.advance(TxEvent.DONE)
    assert machine.state is Tx.OPENING


@pytest.mark.parametrize("name", TABLES)
def test_every_state_of_a_table_can_be_reached_and_left(name: str) -> None:
    """No orphan states: each is a start or the end of some transition, and targets have a row."""
    table: Table[Any, Any] = TABLES[name]  # type: ignore[assignment]
    targets = {target for row in table.values() for target in row.values()}
    assert targets <= set(table)
    assert len(set(table) - targets) <= 1 or name == "receiver"
