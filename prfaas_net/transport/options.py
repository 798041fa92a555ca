"""How the sockets of a link behave, as the operator sets it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from prfaas_net.errors import ConfigError
from prfaas_net.units import KiB

__all__ = ["LinkOptions", "pace", "tune"]

# Not exported by Python 3.11's socket module; values of linux/include/uapi.
TCP_NOTSENT_LOWAT = 25
SO_MAX_PACING_RATE = 47
# The kernel's own value where nobody has set one (include/net/sock.h).
UNPACED = (1 << 64) - 1
# Data connections may be idle for hours. Probing keeps them in the tables of NATs and firewalls, and finds out within
# a minute which of them are dead.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_EVERY_S = 10
KEEPALIVE_PROBES = 3


@dataclass(frozen=True)
class LinkOptions:
    """Socket options of every connection of a link.

    Attributes:
        connections: data connections of a sender to begin with.
        max_connections: the link may find out by itself that more, or fewer, carry more; None keeps their number.
        congestion_control: a name of ``net.ipv4.tcp_available_congestion_control``; None: between hosts BBR where it
            may be used, within a host none that paces (``congestion_choice``).
        budget_bps: egress budget of the whole link; each data connection is paced to its share. None: unpaced.
        notsent_lowat_bytes: unsent bytes that the kernel may hold a connection. Small, so that an urgent chunk does
            not wait behind megabytes that were handed over before it.
        dscp: differentiated services code point, 0 to 63.
        sndbuf_bytes: a fixed send buffer for long paths; None leaves autotuning on.
        connect_timeout_s: for a TCP connect, and again for the handshake.
        resume_window_s: how long a sender that has lost every connection tries to come back with its transfers.
        encode: whether chunks may be compressed where that is sooner than sending them as they are.
        telemetry_log: a directory in which every link records what its sockets said, to be replayed.
        local_addresses: of this host, to leave from in turn (several network cards, several paths).
    """

    connections: int = 4
    max_connections: int | None = None
    congestion_control: str | None = None
    budget_bps: int | None = None
    notsent_lowat_bytes: int = 256 * KiB
    dscp: int = 0
    sndbuf_bytes: int | None = None
    connect_timeout_s: float = 5.0
    resume_window_s: float = 5.0
    encode: bool = False
    telemetry_log: Path | None = None
    local_addresses: tuple[str, ...] = ()

    def local_address(self, lane: int) -> str | None:
        """Where a connection should leave from; None leaves it to the routing table."""
        return self.local_addresses[lane % len(self.local_addresses)] if self.local_addresses else None

    def pacing_bytes_per_s(self, connections: int) -> int | None:
        """One data connection's share of the budget when there are so many, in the kernel's unit."""
        return None if self.budget_bps is None else max(1, self.budget_bps // 8 // max(1, connections))


def tune(sock: socket.socket, options: LinkOptions, *, data: bool) -> None:
    """Set a connection's options.

    Raises:
        ConfigError: the host does not know the congestion control, or may not use it.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if options.dscp:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, options.dscp << 2)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, options.dscp << 2)
    if options.congestion_control:
        try:
            name = options.congestion_control.encode()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        except OSError as error:
            raise ConfigError(
                f"congestion control {options.congestion_control!r} cannot be used",
                found=error.strerror,
                do="choose one of /proc/sys/net/ipv4/tcp_allowed_congestion_control",
            ) from error
    if not data:
        return
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, options.notsent_lowat_bytes)
    if options.budget_bps is not None:
        pace(sock, options, options.connections)
    if options.sndbuf_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.sndbuf_bytes)


def pace(sock: socket.socket, options: LinkOptions, connections: int) -> None:
    """Give a data connection its share of the link's budget; again whenever their number changes."""
    share = options.pacing_bytes_per_s(connections)
    rate = UNPACED if share is None else share
    sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(8, "little"))
