"""Transfers over a fake link: what both ends promise, in order and in trouble."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from prfaas_net.errors import (
    AuthError,
    BusyError,
    CancelledByPeer,
    CorruptionError,
    DeadlineError,
    LinkError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from prfaas_net.kv import ChunkTable, checksum
from prfaas_net.wire import (
    Completed,
    Delivered,
    FrameType,
    Header,
    IncomingTransfer,
    LaneGivenUp,
    OutgoingTransfer,
    PeerDraining,
    ReceiveFailed,
    SealArrived,
    SendFailed,
    SessionLost,
    TakenOver,
    TransferOpened,
)
from prfaas_net.wire.states import Rx, Tx
from tests.wire.pair import Pair, of_type, random_bytes

TABLE = ChunkTable([100, 1, 4096, 100, 77])
SOURCE = random_bytes(TABLE.total_bytes)


def test_a_transfer_lands_whole_and_both_sides_know() -> None:
    """Reserve, open, send, seal: bytes equal, Completed and Delivered, nothing left reserved."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {"first_token": 7}, now=pair.now)
    pair.run()
    assert np.array_equal(memory, SOURCE)
    assert [type(e) for e in pair.receiver_events] == [TransferOpened, SealArrived, Completed]
    assert [type(e) for e in pair.sender_events] == [Delivered]
    assert incoming.seal is not None
    assert incoming.seal["body"] == {"first_token": 7}
    assert (incoming.state, outgoing.state) == (Rx.COMPLETE, Tx.DONE)
    assert len(pair.reservations) == 0
    assert outgoing.stats.acked_bytes == TABLE.total_bytes


def test_nothing_is_sent_before_the_receiver_agrees() -> None:
    """Chunks that are ready stay back until OPENED has come."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    assert pair.pull() is None
    pair.exchange_control()
    assert pair.pull() is not None


def test_the_seal_overtakes_the_data() -> None:
    """The first token arrives before any chunk has landed."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {"first_token": 7}, now=pair.now)
    pair.exchange_control()
    assert of_type(pair.receiver_events, SealArrived)
    assert incoming.landed.count == 0


def test_the_seal_waits_for_the_last_checksum() -> None:
    """Chunks that are hashed only when they are sent hold the seal back, since it carries the digest."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    for chunk in range(len(TABLE)):
        pair.sender.ready(outgoing, chunk, None)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.exchange_control()
    assert not of_type(pair.receiver_events, SealArrived)
    pair.run()
    assert of_type(pair.receiver_events, Completed)
    assert np.array_equal(memory, SOURCE)


def test_chunks_land_in_any_order() -> None:
    """Readiness out of order and delivery in reverse make no difference."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing, [3, 0, 4, 1, 2])
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.exchange_control()
    orders = [pair.pull(lane) for lane in range(5)]
    for order in reversed(orders):
        assert order is not None
        pair.carry(order)
    pair.exchange_control()
    assert np.array_equal(memory, SOURCE)
    assert of_type(pair.sender_events, Delivered)


def test_a_corrupt_chunk_is_sent_again_and_counted() -> None:
    """A flipped bit never completes a transfer; the chunk goes again."""

    def flip(data: np.ndarray) -> None:
        data[0] ^= 1

    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.exchange_control()
    first = pair.pull()
    assert first is not None
    pair.carry(first, damage=flip)
    pair.run()
    assert incoming.corrupt_chunks == 1
    assert outgoing.stats.resent_chunks == 1
    assert np.array_equal(memory, SOURCE)
    assert of_type(pair.sender_events, Delivered)


def test_a_wrong_digest_fails_both_sides() -> None:
    """Chunks that each hash right but do not make the sealed whole are not delivered."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.exchange_control()
    pair.sender._write_json(FrameType.SEAL, {"digest": "0" * 16, "body": {}}, transfer=outgoing.handle)
    pair.exchange_control()
    pair.make_ready(outgoing)
    pair.run()
    (failed,) = of_type(pair.receiver_events, ReceiveFailed)
    assert isinstance(failed, ReceiveFailed)
    assert isinstance(failed.error, CorruptionError)
    (told,) = of_type(pair.sender_events, SendFailed)
    assert isinstance(told, SendFailed)
    assert isinstance(told.error, CorruptionError)
    assert len(pair.reservations) == 0


def test_a_lost_lane_returns_its_chunks() -> None:
    """What a dead connection carried goes again on another; what it half wrote is asked for again."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.exchange_control()
    lost = pair.pull(lane=1)
    assert lost is not None
    landing = pair.receiver.admit(Header.unpack(lost.header(lost.checksum or 0)), 1)
    assert landing is not None
    # The same chunk comes on another lane while the receiver still believes in the first one: drained.
    pair.sender.lane_lost(1)
    again = pair.pull(lane=2)
    assert again is not None
    assert again.chunk == lost.chunk
    assert pair.carry(again, 2) is False
    pair.exchange_control()
    assert of_type(pair.receiver_events, LaneGivenUp) == [LaneGivenUp(1)]
    pair.receiver.aborted(landing)
    pair.run()
    assert np.array_equal(memory, SOURCE)
    assert of_type(pair.sender_events, Delivered)
    assert incoming.discarded_chunks == 1


def test_a_chunk_that_has_landed_is_never_written_again() -> None:
    """A duplicate is drained: verified bytes are not touched, not even for a moment."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.exchange_control()
    order = pair.pull()
    assert order is not None
    assert pair.carry(order) is True
    assert pair.carry(order) is False
    assert incoming.landed.count == 1


def test_cancel_by_the_sender_frees_both_sides_in_one_trip() -> None:
    """ABORT ends the reservation; late chunks are drained and harm nobody."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.exchange_control()
    late = pair.pull()
    assert late is not None
    pair.sender.abort(outgoing, CancelledByPeer("not needed"), now=pair.now)
    pair.exchange_control()
    assert incoming.state is Rx.FAILED
    assert len(pair.reservations) == 0
    assert pair.carry(late) is False
    assert pair.pull() is None
    assert pair.sender.error is None
    assert pair.receiver.error is None


def test_cancel_by_the_receiver_stops_the_sender() -> None:
    """The sender learns the reason and sends no more of it."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.exchange_control()
    pair.receiver.abort(incoming, CancelledByPeer("the user left"))
    pair.exchange_control()
    (failed,) = of_type(pair.sender_events, SendFailed)
    assert isinstance(failed, SendFailed)
    assert "the user left" in failed.error.line()
    assert pair.pull() is None


def test_an_unknown_or_forged_ticket_is_refused_and_the_session_lives() -> None:
    """One transfer's bad ticket is that transfer's failure only."""
    pair = Pair()
    good, memory = pair.reserve(TABLE)
    forged, _ = Pair().reserve(TABLE)
    object.__setattr__(forged.ticket, "signature", "0" * 64)
    bad = pair.open(forged, SOURCE)
    outgoing = pair.open(good, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.run()
    assert isinstance(bad.error, AuthError)
    assert outgoing.state is Tx.DONE
    assert np.array_equal(memory, SOURCE)


def test_a_used_ticket_moves_nothing() -> None:
    """Replaying the ticket of a finished transfer writes no byte and fails; other transfers of the session go on."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.run()
    memory[:] = 0xAB
    replay = pair.open(incoming, random_bytes(TABLE.total_bytes, 9))
    pair.make_ready(replay)
    pair.run()
    assert isinstance(replay.error, AuthError)
    assert (memory == 0xAB).all()
    assert pair.sender.error is None


def test_the_last_word_of_a_session_is_said_again() -> None:
    """DONE was lost with the link: the sender presents its ticket once more and hears that all has landed."""
    old = Pair(link_grace_s=30)
    incoming, memory, outgoing = half_sent(old)
    old.make_ready(outgoing, [3, 4])
    old.sender.seal(outgoing, {}, now=old.now)
    old.receiver.receive(b"".join(old.sender.take_output(now=old.now)), now=old.now)
    while (order := old.pull()) is not None:
        old.carry(order)
    assert of_type(old.receiver.take_events(), Completed) == [Completed(incoming)]
    for session in (old.sender, old.receiver):
        session.lost(LinkError("gone"), now=old.now)
    new = Pair(link_grace_s=30, reservations=old.reservations)
    new.sender.adopt(outgoing)
    new.exchange_control()
    assert new.sender_events == [Delivered(outgoing)]
    assert np.array_equal(memory, SOURCE)
    assert old.reservations.expire(now=new.now + 100) == []


def test_a_missing_or_repeated_control_frame_is_noticed() -> None:
    """Sound frames in the wrong number: the session is given up, not fooled, and its transfers can go on."""
    changes: list[Callable[[list[bytes]], list[bytes]]] = [
        lambda frames: frames[1:],
        lambda frames: frames[:1] + frames,
        lambda frames: frames[::-1],
    ]
    for change in changes:
        pair = Pair(link_grace_s=30)
        incoming, _, _ = half_sent(pair)
        pair.sender.go_away("one")
        pair.sender.go_away("two")
        frames = pair.sender.take_output(now=pair.now)
        pair.receiver.receive(b"".join(change(frames)), now=pair.now)
        assert isinstance(pair.receiver.error, CorruptionError)
        assert incoming.error is None


def test_a_ticket_in_use_cannot_be_taken_over_by_somebody_else() -> None:
    """A session of another sender that presents the same ticket is told that it is busy."""
    pair = Pair()
    thief = Pair(reservations=pair.reservations, peer="thief")
    incoming, _ = pair.reserve(TABLE)
    pair.open(incoming, SOURCE)
    pair.exchange_control()
    stolen = thief.open(incoming, SOURCE)
    thief.exchange_control()
    assert isinstance(stolen.error, BusyError)
    assert incoming.state is Rx.STREAMING


@pytest.mark.parametrize(
    ("chunk", "n_bytes", "offset"),
    [(5, 77, 4374), (0, 99, 0), (0, 100, 1), (4, 77, 0), (2**31, 1, 0)],
    ids=["past-the-end", "short", "moved", "elsewhere", "far-out"],
)
def test_data_outside_the_grant_ends_the_session(chunk: int, n_bytes: int, offset: int) -> None:
    """Chunk, length and offset must be exactly those of the table; nothing is written."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.exchange_control()
    with pytest.raises(ProtocolError):
        pair.receiver.admit(Header(FrameType.DATA, 0, outgoing.handle, n_bytes, offset, chunk, 0), 1)
    assert not incoming.landing


def test_data_for_a_transfer_that_was_never_opened_ends_the_session() -> None:
    """Only handles of this session's own past may be drained."""
    with pytest.raises(ProtocolError):
        Pair().receiver.admit(Header(FrameType.DATA, 0, 3, 10, 0, 0, 0), 1)


def test_a_transfer_ends_at_its_deadline_on_both_sides() -> None:
    """Time up: DeadlineError here, the same there, nothing reserved."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE, lifetime_s=5)
    outgoing = pair.open(incoming, SOURCE, lifetime_s=5)
    pair.exchange_control()
    pair.advance(6)
    assert isinstance(outgoing.error, DeadlineError)
    assert isinstance(incoming.error, DeadlineError)
    assert len(pair.reservations) == 0


def test_a_reservation_nobody_comes_for_expires() -> None:
    """Memory does not wait for a sender that never dials."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE, lifetime_s=5)
    assert pair.reservations.expire(now=pair.now + 4.9) == []
    assert pair.reservations.expire(now=pair.now + 5) == [incoming]
    assert isinstance(incoming.error, DeadlineError)
    assert len(pair.reservations) == 0


def test_a_stalled_transfer_fails_long_before_its_deadline() -> None:
    """Chunks that were sent and never acknowledged end the transfer after stall_after_s, pings or not."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.exchange_control()
    assert pair.pull() is not None
    pair.advance(6)
    assert isinstance(outgoing.error, LinkError)
    assert incoming.state is Rx.FAILED


def test_a_stalled_lane_costs_only_its_share() -> None:
    """One connection swallows its chunk: it is given up, the chunk goes on another, the transfer completes."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.exchange_control()
    swallowed = pair.pull(lane=9)
    assert swallowed is not None
    pair.run()
    assert not of_type(pair.receiver_events, Completed)
    pair.advance(2.5)
    assert of_type(pair.sender_events, LaneGivenUp) == [LaneGivenUp(9)]
    pair.run()
    assert np.array_equal(memory, SOURCE)
    assert outgoing.state is Tx.DONE


def test_waiting_for_the_engine_is_not_a_stall() -> None:
    """A prefill that takes long before its first chunk is none of the link's business."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.exchange_control()
    pair.advance(50)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.run()
    assert np.array_equal(memory, SOURCE)


def test_an_idle_session_pings_and_lives() -> None:
    """Two quiet ends keep each other alive and measure the round trip."""
    pair = Pair()
    pair.advance(100)
    assert pair.sender.error is None
    assert pair.receiver.error is None
    assert pair.sender.rtt_s == 0.0


def test_a_silent_peer_is_dead_after_dead_after_s() -> None:
    """A black hole ends the session on both sides, and every transfer with it."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.exchange_control()
    pair.advance_cut_off(11)
    assert isinstance(outgoing.error, LinkError)
    assert isinstance(incoming.error, LinkError)
    assert of_type(pair.sender_events, SessionLost)
    assert of_type(pair.receiver_events, SessionLost)
    assert len(pair.reservations) == 0


def half_sent(pair: Pair) -> tuple[IncomingTransfer, np.ndarray, OutgoingTransfer]:
    """A transfer of which two chunks have landed."""
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.make_ready(outgoing, [0, 1, 2])
    pair.exchange_control()
    for _ in range(2):
        order = pair.pull()
        assert order is not None
        pair.carry(order)
    pair.exchange_control()
    return incoming, memory, outgoing


def test_a_transfer_survives_the_loss_of_every_connection() -> None:
    """What has landed stays; the next session of the same link sends only the rest, and what became ready meanwhile."""
    old = Pair(link_grace_s=30)
    incoming, memory, outgoing = half_sent(old)
    for session in (old.sender, old.receiver):
        session.lost(LinkError("gone"), now=old.now)
    assert old.sender.orphans == [outgoing]
    views = old.sources[outgoing.handle]
    old.sender.ready(outgoing, 3, checksum(views[3]))

    new = Pair(link_grace_s=30, reservations=old.reservations)
    new.sender.adopt(outgoing)
    new.sources[outgoing.handle] = views
    new.exchange_control()
    assert outgoing.acked.count == 2
    new.make_ready(outgoing, [4])
    new.sender.seal(outgoing, {"first_token": 1}, now=new.now)
    new.run()
    assert np.array_equal(memory, SOURCE)
    assert new.receiver_events[-1] == Completed(incoming)
    assert new.sender_events == [Delivered(outgoing)]
    assert outgoing.stats.resent_chunks == 0


def test_a_restarted_sender_goes_on_with_its_ticket() -> None:
    """A new process with the same name presents the ticket: it is told what has landed, and sends the rest."""
    old = Pair(link_grace_s=30)
    incoming, memory, _ = half_sent(old)
    old.receiver.lost(LinkError("gone"), now=old.now)
    new = Pair(link_grace_s=30, reservations=old.reservations)
    again = new.open(incoming, SOURCE)
    new.make_ready(again)
    new.sender.seal(again, {}, now=new.now)
    new.exchange_control()
    assert again.acked.count == 2
    new.run()
    assert np.array_equal(memory, SOURCE)


def test_a_sender_that_is_back_before_its_loss_is_noticed_takes_its_ticket_over() -> None:
    """The half-open old session lets go; its connections must leave the memory before the new one writes."""
    old = Pair(link_grace_s=30)
    incoming, memory, outgoing = half_sent(old)
    order = old.pull(lane=7)
    assert order is not None
    landing = old.receiver.admit(Header.unpack(order.header(order.checksum or 0)), 7)
    assert landing is not None
    old.sender.lost(LinkError("gone"), now=old.now)
    views = old.sources[outgoing.handle]

    new = Pair(link_grace_s=30, reservations=old.reservations)
    new.sender.adopt(outgoing)
    new.exchange_control()
    (taken,) = of_type(old.receiver.take_events(), TakenOver)
    assert taken == TakenOver(incoming, frozenset({7}))
    assert outgoing.state is Tx.OPENING
    old.receiver.aborted(landing)
    new.advance(0.1)
    new.sources[outgoing.handle] = views
    new.make_ready(outgoing, [3, 4])
    new.sender.seal(outgoing, {}, now=new.now)
    new.run()
    assert np.array_equal(memory, SOURCE)
    assert incoming.error is None


def test_a_sender_that_does_not_come_back_is_not_waited_for_long() -> None:
    """After the grace the reservation ends with what happened, long before its deadline."""
    pair = Pair(link_grace_s=5)
    incoming, _, _ = half_sent(pair)
    pair.receiver.lost(LinkError("cable cut"), now=pair.now)
    assert pair.reservations.expire(now=pair.now + 4.9) == []
    assert pair.reservations.expire(now=pair.now + 5) == [incoming]
    assert isinstance(incoming.error, LinkError)
    assert "cable cut" in incoming.error.line()


def test_an_end_that_one_side_wanted_is_final() -> None:
    """A session closed with ERROR fails its transfers at once, grace or not: nobody will come back."""
    pair = Pair(link_grace_s=30)
    incoming, _, outgoing = half_sent(pair)
    pair.sender.fail(LinkError("shutting down"), now=pair.now)
    pair.exchange_control()
    assert isinstance(incoming.error, LinkError)
    assert isinstance(outgoing.error, LinkError)
    assert pair.sender.orphans == []
    assert len(pair.reservations) == 0


def test_an_orphan_can_be_given_up() -> None:
    """Abort between two sessions ends the transfer for its user."""
    pair = Pair(link_grace_s=30)
    _, _, outgoing = half_sent(pair)
    pair.sender.lost(LinkError("gone"), now=pair.now)
    pair.sender.abort(outgoing, CancelledByPeer("no time for this"), now=pair.now)
    assert of_type(pair.sender.take_events(), SendFailed)
    assert outgoing.state is Tx.FAILED


def test_a_draining_receiver_takes_no_new_transfers() -> None:
    """GOAWAY refuses new work; what is under way completes."""
    pair = Pair()
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.exchange_control()
    pair.receiver.go_away("shutting down soon")
    pair.exchange_control()
    assert of_type(pair.sender_events, PeerDraining)
    other, _ = pair.reserve(TABLE)
    with pytest.raises(BusyError):
        pair.open(other, SOURCE)
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.run()
    assert np.array_equal(memory, SOURCE)


def test_the_urgent_transfer_overtakes_in_the_middle() -> None:
    """Earliest deadline first, whatever was queued before."""
    pair = Pair()
    bulk, _ = pair.reserve(TABLE)
    urgent, _ = pair.reserve(TABLE)
    slow = pair.open(bulk, SOURCE, lifetime_s=60)
    pair.make_ready(slow)
    pair.exchange_control()
    first = pair.pull()
    fast = pair.open(urgent, SOURCE, lifetime_s=2)
    pair.make_ready(fast)
    pair.exchange_control()
    rest = [pair.pull() for _ in range(6)]
    assert first is not None
    assert first.transfer is slow
    assert [order.transfer is fast for order in rest if order] == [True] * 5 + [False]


def test_transfers_with_like_deadlines_share_the_link() -> None:
    """Equal urgency: whoever has sent fewer bytes goes next."""
    pair = Pair()
    table = ChunkTable([10] * 6)
    source = random_bytes(60)
    transfers = [pair.open(pair.reserve(table)[0], source) for _ in range(2)]
    for transfer in transfers:
        pair.make_ready(transfer)
    pair.exchange_control()
    turns = [order.transfer.handle for _ in range(6) if (order := pair.pull())]
    assert turns.count(1) == turns.count(2) == 3


@pytest.mark.parametrize("kind", [FrameType.DONE, FrameType.ACK, FrameType.OPENED])
def test_a_frame_out_of_order_ends_the_session_with_a_typed_error(kind: FrameType) -> None:
    """The receiver says DONE before the seal, ACK before OPENED, OPENED twice: ProtocolError, told to the peer."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    if kind is not FrameType.ACK:
        pair.exchange_control()
    pair.receiver._write(kind, b"\x1f", transfer=outgoing.handle)
    pair.sender.receive(b"".join(pair.receiver.take_output(now=pair.now)), now=pair.now)
    assert isinstance(pair.sender.error, ProtocolError)
    assert isinstance(outgoing.error, ProtocolError)
    pair.exchange_control()
    assert isinstance(pair.receiver.error, ProtocolError)


def test_garbage_in_an_established_session_is_damage() -> None:
    """The connections are given up; transfers may go on with others."""
    pair = Pair(link_grace_s=30)
    incoming, _, _ = half_sent(pair)
    pair.receiver.receive(b"GET / HTTP/1.1\r\nHost: nowhere\r\n\r\n" * 3, now=pair.now)
    assert isinstance(pair.receiver.error, CorruptionError)
    assert incoming.error is None


def test_a_probe_is_counted_and_forgotten() -> None:
    """Bytes into nowhere: no reservation, acknowledged, done; too large or too many are refused."""
    pair = Pair()
    probe = pair.sender.probe(ChunkTable([50] * 4), deadline=pair.now + 10, now=pair.now)
    pair.sources[probe.handle] = [memoryview(bytes(50))] * 4
    pair.make_ready(probe)
    pair.sender.seal(probe, {}, now=pair.now)
    pair.exchange_control()
    while (order := pair.pull()) is not None:
        header = Header.unpack(order.header(order.checksum or 0))
        assert pair.receiver.admit(header, 1) is None
        pair.receiver.drained(header, now=pair.now)
        pair.exchange_control()
    assert pair.sender_events == [Delivered(probe)]
    assert pair.receiver_events == []
    huge = pair.sender.probe(ChunkTable([16 << 20] * 65), deadline=pair.now + 10, now=pair.now)
    pair.exchange_control()
    assert isinstance(huge.error, RefusedError)


def test_misuse_is_told_to_the_user_and_sends_nothing() -> None:
    """Sealing too early, readying twice, a ticket for another table: UsageError."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    with pytest.raises(UsageError, match="seal once"):
        pair.sender.seal(outgoing, {}, now=pair.now)
    pair.sender.ready(outgoing, 0, checksum(b"x"))
    with pytest.raises(UsageError, match="ready once"):
        pair.sender.ready(outgoing, 0, None)
    with pytest.raises(UsageError, match="another chunk table"):
        pair.sender.open(incoming.ticket, ChunkTable([1]), deadline=pair.now + 1, now=pair.now)


def test_after_the_end_everything_is_quiet() -> None:
    """Late calls of an engine that does not know yet are ignored, opening is refused."""
    pair = Pair()
    incoming, _ = pair.reserve(TABLE)
    outgoing = pair.open(incoming, SOURCE)
    pair.sender.lost(LinkError("gone"), now=pair.now)
    pair.sender.ready(outgoing, 0, 1)
    pair.sender.abort(outgoing, CancelledByPeer("late"), now=pair.now)
    assert pair.sender.next_deadline() is None
    assert pair.sender.take_output(now=pair.now) == []
    with pytest.raises(LinkError):
        pair.open(incoming, SOURCE)
