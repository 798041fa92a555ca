"""Compressed transfers over real sockets: equal at the other end, fewer bytes on a thin link."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas_net.kv import ChunkTable
from prfaas_net.kv.codecs import Codec
from prfaas_net.transport import KvListener
from prfaas_net.transport.relay import Relay, Shape
from tests.kv.test_codecs import bfloat16
from tests.transport.conftest import Connect, reserve
from tests.wire.pair import cut

SOURCE = np.frombuffer(bfloat16(2_000_000), dtype=np.uint8)
TABLE = ChunkTable.split(SOURCE.nbytes, 128 << 10)


async def test_a_thin_link_carries_fewer_bytes(listener: KvListener, connect: Connect) -> None:
    """Through 40 Mbps: equal, and at most 85 % of the bytes cross."""
    relay = Relay(listener.address, Shape(40_000_000, 0.005), Shape(None, 0.005))
    await relay.start("127.0.0.1", 0)
    try:
        link = await connect(2, address=relay.address, encode=True)
        incoming, memory = reserve(listener, TABLE)
        outgoing = link.open(incoming.ticket, TABLE, cut(SOURCE, TABLE), codec=Codec.BF16_PLANES)
        for chunk in range(len(TABLE)):
            outgoing.ready(chunk)
        outgoing.seal({})
        await incoming.landed()
        await outgoing.wait()
        assert np.array_equal(memory, SOURCE)
        assert relay.forwarded_bytes < 0.85 * SOURCE.nbytes
        await link.close()
    finally:
        await relay.close()


@pytest.mark.parametrize("encode", [False, True])
async def test_without_agreement_bytes_go_as_they_are(listener: KvListener, connect: Connect, encode: bool) -> None:
    """A codec that was not asked for, or that the values do not need, is not used."""
    link = await connect(2, encode=encode)
    incoming, memory = reserve(listener, TABLE)
    codec = Codec.RAW if encode else Codec.BF16_PLANES
    outgoing = link.open(incoming.ticket, TABLE, cut(SOURCE, TABLE), codec=codec)
    outgoing.ready_all()
    outgoing.seal({})
    await incoming.landed()
    assert np.array_equal(memory, SOURCE)
    assert outgoing.transfer.codec == Codec.RAW
