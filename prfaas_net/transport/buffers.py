"""Moving somebody else's buffers: bytes, NumPy arrays, torch tensors on the CPU, anything with a buffer interface.

For stacks that have memory of their own and want it at another host; see ``docs/embedding.md``.
"""

from __future__ import annotations

from typing import Any, Protocol

from prfaas_net.errors import CancelledByPeer, UsageError
from prfaas_net.kv.chunks import ChunkTable
from prfaas_net.transport.incoming import Incoming
from prfaas_net.transport.outgoing import Outgoing
from prfaas_net.units import MiB
from prfaas_net.wire import SenderStats, Ticket

__all__ = ["bytes_of", "put", "reserve_buffer"]


class ReservingListener(Protocol):
    """``KvListener`` or ``MemoryListener``."""

    def reserve(
        self, table: ChunkTable, destinations: list[memoryview], *, lifetime_s: float, manifest: dict[str, Any] | None
    ) -> Incoming: ...


class OpeningLink(Protocol):
    """``SenderLink`` or ``MemoryLink``."""

    def open(
        self, ticket: Ticket, table: ChunkTable, views: list[memoryview], *, lifetime_s: float | None = None
    ) -> Outgoing: ...


def bytes_of(buffer: Any, *, writable: bool = False) -> memoryview:
    """The bytes of a buffer, without a copy.

    Args:
        buffer: contiguous; a torch tensor must be on the CPU.

    Raises:
        UsageError: it has no bytes that could be used as they lie.
    """
    if hasattr(buffer, "detach") and hasattr(buffer, "numpy"):
        # A torch tensor. View it as bytes first: NumPy does not know bfloat16.
        import torch

        if not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise UsageError(
                "the tensor cannot be used as it lies", expected="a contiguous tensor on the CPU",
                found=f"{buffer.device}, contiguous: {buffer.is_contiguous()}",
            )  # fmt: skip
        buffer = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    try:
        view = memoryview(buffer)
        if not view.c_contiguous or (writable and view.readonly):
            raise UsageError(
                "the buffer cannot be used as it lies",
                expected="contiguous and writable memory" if writable else "contiguous memory",
                found=f"contiguous: {view.c_contiguous}, writable: {not view.readonly}",
            )
        return view.cast("B") if view.nbytes else view
    except (TypeError, ValueError) as error:
        raise UsageError("not a buffer", found=f"{type(buffer).__name__}: {error}") from error


def _chunks(buffer: memoryview, chunk_bytes: int) -> tuple[ChunkTable, list[memoryview]]:
    table = ChunkTable.split(buffer.nbytes, chunk_bytes)
    pairs = zip(table.offsets, table.lengths, strict=True)
    return table, [buffer[start : start + length] for start, length in pairs]


def reserve_buffer(
    listener: ReservingListener, buffer: Any, *, lifetime_s: float = 60.0, chunk_bytes: int = MiB
) -> Incoming:
    """Promise to take exactly as many bytes as ``buffer`` has, into it.

    The ticket of what is returned goes to the sender; ``await incoming.landed()`` and the bytes are there, verified.

    Raises:
        UsageError: the buffer is not contiguous and writable.
    """
    table, views = _chunks(bytes_of(buffer, writable=True), chunk_bytes)
    return listener.reserve(table, views, lifetime_s=lifetime_s, manifest={"chunk_bytes": chunk_bytes})


async def put(link: OpeningLink, ticket: Ticket, buffer: Any, *, body: dict[str, Any] | None = None) -> SenderStats:
    """Send a whole buffer; returns when every byte has landed and was verified.

    Args:
        buffer: as many bytes as were reserved; must not change until this returns.
        body: arrives ahead of the bytes, at ``await incoming.sealed()``.

    Raises:
        UsageError: the ticket is for another number of bytes.
        PrfaasError: they did not arrive, and why.
    """
    data = bytes_of(buffer)
    if data.nbytes != ticket.total_bytes:
        raise UsageError("the ticket is for another buffer", expected=f"{ticket.total_bytes} bytes", found=data.nbytes)
    table, views = _chunks(data, int(ticket.manifest.get("chunk_bytes", MiB)))
    outgoing = link.open(ticket, table, views)
    try:
        outgoing.ready_all()
        outgoing.seal(body or {})
        return await outgoing.wait()
    except BaseException:
        outgoing.abort(CancelledByPeer("the sender gave up"))
        raise
