"""One transfer on a link, for its user."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from prfaas_net.errors import PrfaasError
from prfaas_net.kv.chunks import checksum
from prfaas_net.wire import OutgoingTransfer, SenderStats

__all__ = ["Outgoing", "TransferLink"]


class TransferLink(Protocol):
    """What a transfer needs of its link; every call may come from any thread."""

    def ready(self, transfer: OutgoingTransfer, chunk: int, known: int | None) -> None: ...

    def seal(self, transfer: OutgoingTransfer, body: dict[str, Any]) -> None: ...

    def abort(self, transfer: OutgoingTransfer, error: PrfaasError) -> None: ...


class Outgoing:
    """Made by a link's ``open``."""

    def __init__(self, link: TransferLink, transfer: OutgoingTransfer, views: Sequence[memoryview]) -> None:
        self.transfer = transfer
        self.views = views
        self._link = link
        self._done: asyncio.Future[SenderStats] = asyncio.get_running_loop().create_future()
        # A failure is also known to whoever never waits; that must not be reported as an unhandled future.
        self._done.add_done_callback(lambda future: future.cancelled() or future.exception())

    def ready(self, chunk: int) -> None:
        """The chunk's bytes are final. From any thread; hashes them here, where they are still in the cache."""
        self._link.ready(self.transfer, chunk, checksum(self.views[chunk]))

    def ready_all(self) -> None:
        """Every chunk is final; the connections hash them, each chunk just before it is sent."""
        for chunk in range(len(self.views)):
            self._link.ready(self.transfer, chunk, None)

    def seal(self, body: dict[str, Any]) -> None:
        """Every chunk is ready; ``body`` travels ahead of them on the control connection. From any thread."""
        self._link.seal(self.transfer, body)

    def abort(self, error: PrfaasError) -> None:
        """Give up; the receiver gets ``error``. From any thread; harmless after the end."""
        self._link.abort(self.transfer, error)

    async def wait(self) -> SenderStats:
        """Until the receiver has confirmed everything.

        Raises:
            PrfaasError: it will not; the transfer's own deadline bounds the wait.
        """
        return await asyncio.shield(self._done)

    def end(self, error: PrfaasError | None) -> None:
        """For the link: the transfer has ended. On the loop."""
        if self._done.done():
            return
        if error is None:
            self._done.set_result(self.transfer.stats)
        else:
            self._done.set_exception(error)
