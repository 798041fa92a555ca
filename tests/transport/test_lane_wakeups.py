"""When a receiving connection wakes the event loop."""

from __future__ import annotations

import socket
import threading

import numpy as np

from prfaas_net.clock import ManualClock
from prfaas_net.kv import ChunkTable
from prfaas_net.transport.lanes import ReceiveLane
from prfaas_net.transport.streams import PlainStream
from prfaas_net.wire import SendOrder
from tests.wire.pair import Pair, random_bytes

TABLE = ChunkTable.split(3000, 1000)


def receive(pair: Pair, orders: list[SendOrder], lane: int) -> int:
    """Send the chunks through a connection of their own; returns how often the loop was woken. Time stands still."""
    wakes: list[None] = []
    there, here = socket.socketpair()
    receiver = ReceiveLane(
        lane, PlainStream(here), pair.receiver, lock=threading.Lock(), clock=ManualClock(),
        wake=lambda: wakes.append(None), on_end=lambda lane, error: None,
    )  # fmt: skip
    receiver.start()
    with there:
        for order in orders:
            assert order.checksum is not None
            there.sendall(order.header(order.checksum) + bytes(pair.sources[order.transfer.handle][order.chunk]))
    assert receiver.join(5.0)
    receiver.close()
    return len(wakes)


def test_what_completes_a_transfer_wakes_the_loop_whichever_chunk_it_is() -> None:
    """The chunk that the sender pulled last overtakes the others on its own connection: DONE must not wait for a
    timer, and what merely lands need not be told at once."""
    pair = Pair()
    source = random_bytes(TABLE.total_bytes)
    incoming, memory = pair.reserve(TABLE)
    outgoing = pair.open(incoming, source)
    pair.exchange_control()
    pair.make_ready(outgoing)
    pair.sender.seal(outgoing, {}, now=pair.now)
    pair.exchange_control()
    first, second, last = (order for _ in TABLE.lengths if (order := pair.pull()) is not None)
    assert [order.more for order in (first, second, last)] == [True, True, False]
    assert receive(pair, [last], lane=2) == 1
    pair.receiver.take_output(now=pair.now)
    assert receive(pair, [first], lane=3) == 0
    assert receive(pair, [second], lane=1) == 1
    assert np.array_equal(memory, source)
