"""Both ends of a transfer under a fault, and the one thing that must hold whatever the fault was."""

from __future__ import annotations

import asyncio

import numpy as np

from prfaas_net.errors import PrfaasError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Incoming, KvListener, Outgoing, SenderLink
from tests.transport.conftest import open_transfer, reserve
from tests.wire.pair import random_bytes

__all__ = ["Ends", "start_transfer"]


class Ends:
    """One transfer under way."""

    def __init__(
        self, listener: KvListener, incoming: Incoming, outgoing: Outgoing, memory: np.ndarray, source: np.ndarray
    ) -> None:
        self.listener = listener
        self.incoming = incoming
        self.outgoing = outgoing
        self.memory = memory
        self.source = source

    @property
    def landed(self) -> int:
        """Chunks that are verified in their place."""
        return self.incoming.transfer.landed.count

    def seal(self) -> None:
        """Every chunk is ready."""
        self.outgoing.ready_all()
        self.outgoing.seal({})

    async def finish(self, *, within_s: float, last_word_may_be_lost: bool = False) -> PrfaasError | None:
        """Wait for both ends. None: delivered and identical. Otherwise both failed with a typed error, and this is
        the sender's. Anything else fails the test, and so does a wait that is longer than ``within_s``.

        Args:
            last_word_may_be_lost: where a link ends for good, or a sender gives up, the receiver may have everything
                and its last word not reach the sender: no protocol can exclude that. Such a sender has an error.
        """
        async with asyncio.timeout(within_s):
            results = await asyncio.gather(
                self.outgoing.wait(), self.incoming.landed(), self.incoming.sealed(), return_exceptions=True
            )
        sent, landed, _ = results
        await self.incoming.abort()
        assert self.incoming.transfer not in tuple(self.listener._inbox.reservations)
        assert not self.incoming.transfer.landing
        if landed is None:
            assert np.array_equal(self.memory, self.source), "delivered, and not what was sent"
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, PrfaasError), repr(result)
        if not isinstance(sent, BaseException):
            assert landed is None, f"the sender believes in a delivery that failed: {landed!r}"
            return None
        assert isinstance(sent, PrfaasError)
        if last_word_may_be_lost and landed is None:
            assert isinstance(sent, PrfaasError)
            return sent
        assert isinstance(landed, PrfaasError), f"the sender gave up on what was delivered: {sent!r}"
        return sent

    async def delivered(self, *, within_s: float) -> None:
        """Both ends agree that it was, and the bytes are equal."""
        error = await self.finish(within_s=within_s)
        assert error is None, error


def start_transfer(
    listener: KvListener, link: SenderLink, table: ChunkTable, *, seed: int = 0, lifetime_s: float = 20.0
) -> Ends:
    """Reserve and open; nothing is ready yet."""
    source = random_bytes(table.total_bytes, seed)
    incoming, memory = reserve(listener, table, lifetime_s=lifetime_s)
    return Ends(listener, incoming, open_transfer(link, incoming, source), memory, source)
