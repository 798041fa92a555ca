"""What a link and its transfers are doing, as plain numbers."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from prfaas_net.congestion.tcp_info import TCP_INFO, TCP_INFO_BYTES, TcpInfo
from prfaas_net.congestion.verdict import Verdict
from prfaas_net.wire import OutgoingTransfer

__all__ = ["LinkStats", "TransferProgress", "read_tcp_info"]


@dataclass(frozen=True)
class TransferProgress:
    """One transfer, as its sender knows it.

    Attributes:
        ready_bytes: made so far; ``acked_bytes`` of them have landed and were verified.
        exposed_s: time since everything was made, or None while it is being made.
    """

    transfer_id: str
    state: str
    total_bytes: int
    ready_bytes: int
    acked_bytes: int
    n_chunks: int
    acked_chunks: int
    resent_chunks: int
    exposed_s: float | None

    @classmethod
    def of(cls, transfer: OutgoingTransfer, *, now: float) -> TransferProgress:
        sealed_s = transfer.stats.sealed_s
        lengths = transfer.table.lengths
        return cls(
            transfer_id=transfer.transfer_id,
            state=transfer.state.value,
            total_bytes=transfer.table.total_bytes,
            ready_bytes=sum(length for chunk, length in enumerate(lengths) if chunk in transfer.ready),
            acked_bytes=transfer.stats.acked_bytes,
            n_chunks=len(lengths),
            acked_chunks=transfer.acked.count,
            resent_chunks=transfer.stats.resent_chunks,
            exposed_s=None if sealed_s is None else now - sealed_s,
        )


@dataclass(frozen=True)
class LinkStats:
    """One link.

    Attributes:
        connections: data connections that are up.
        transfers: that have not ended.
        queued_bytes: made and not acknowledged yet, over all transfers.
        acked_bytes: since the link exists.
        goodput_bps: of acknowledged bytes, over the last sampling interval with anything to send.
        rtt_s: of the last ping, application to application; ``tcp_rtt_s`` the kernel's, mean over data connections.
        bytes_sent, bytes_retrans: by the kernel, over the data connections that are up.
        delivery_rate_bps: the kernel's estimates, summed.
        budget_bps: what the link is paced to now; None if it is not.
        verdict: what the link is doing.
    """

    peer: str
    alive: bool
    connections: int
    transfers: int
    queued_bytes: int
    acked_bytes: int
    goodput_bps: float
    rtt_s: float | None
    tcp_rtt_s: float
    bytes_sent: int
    bytes_retrans: int
    delivery_rate_bps: int
    budget_bps: int | None
    verdict: Verdict


def read_tcp_info(sock: socket.socket) -> TcpInfo | None:
    """What the kernel knows of a connection; None once it is closed. About 2 us."""
    try:
        return TcpInfo.parse(sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, TCP_INFO_BYTES))
    except OSError:
        return None
