"""Running a handshake over a fresh socket, within a time."""

from __future__ import annotations

import asyncio
import socket

import aiohappyeyeballs

from prfaas_net.errors import LinkError, PrfaasError
from prfaas_net.transport.options import LinkOptions, tune
from prfaas_net.wire.frames import HEADER_BYTES, Frame, FrameParser, Header
from prfaas_net.wire.handshake import Acceptor, Dialer, Hello, PeerIdentity

__all__ = ["accept_handshake", "dial"]

# How long a refused peer may take to read why.
PARTING_S = 0.5


async def _read_frame(sock: socket.socket) -> Frame:
    """Exactly one frame, so that nothing which follows it is taken from the socket."""
    loop = asyncio.get_running_loop()

    async def read(n_bytes: int) -> bytes:
        data = b""
        while len(data) < n_bytes:
            more = await loop.sock_recv(sock, n_bytes - len(data))
            if not more:
                raise LinkError("the connection was closed during the handshake")
            data += more
        return data

    header = await read(HEADER_BYTES)
    payload = await read(Header.unpack(header).payload_bytes)
    return next(FrameParser().feed(header + payload))


async def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=0.25)
    except TimeoutError as error:
        raise LinkError(f"cannot reach {where}", found=f"no answer in {timeout_s:g} s") from error
    except OSError as error:
        raise LinkError(f"cannot reach {where}", found=error.strerror or str(error)) from error


async def dial(
    endpoint: tuple[str, int], hello: Hello, key: bytes | None, options: LinkOptions
) -> tuple[socket.socket, PeerIdentity]:
    """Connect and shake hands; the socket is still non-blocking.

    Raises:
        LinkError: unreachable, or closed during the handshake.
        PrfaasError: the acceptor refused, with its reason.
    """
    host, port = endpoint
    sock = await _connect(host, port, options.connect_timeout_s)
    loop = asyncio.get_running_loop()
    try:
        tune(sock, options, data=hello.lane > 0)
        async with asyncio.timeout(options.connect_timeout_s):
            dialer = Dialer(hello, key)
            await loop.sock_sendall(sock, dialer.begin())
            while dialer.peer is None:
                answer = dialer.receive(await _read_frame(sock))
                if answer:
                    await loop.sock_sendall(sock, answer)
            return sock, dialer.peer
    except BaseException as error:
        sock.close()
        where = f"{host}:{port}"
        if isinstance(error, TimeoutError):
            found = f"no handshake in {options.connect_timeout_s:g} s"
            raise LinkError(f"{where} does not answer", found=found, do="check that it is a KV port") from error
        if isinstance(error, OSError):
            raise LinkError(f"lost {where} during the handshake", found=error.strerror) from error
        raise


async def _part(sock: socket.socket) -> None:
    """Close our half and read what is still coming: closing with unread bytes would reset the connection, and
    the refusal would be lost with it."""
    sock.shutdown(socket.SHUT_WR)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(PARTING_S):
            for _ in range(64):
                if not await loop.sock_recv(sock, 65536):
                    return
    except TimeoutError:
        pass


async def accept_handshake(sock: socket.socket, acceptor: Acceptor, *, timeout_s: float) -> Hello:
    """Shake hands with whoever connected; tells it why when it is refused.

    Raises:
        PrfaasError: it was refused, left, or took too long. The socket is the caller's to close.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            while acceptor.hello is None:
                try:
                    answer = acceptor.receive(await _read_frame(sock))
                except PrfaasError as error:
                    await loop.sock_sendall(sock, acceptor.refuse(error))
                    await _part(sock)
                    raise
                await loop.sock_sendall(sock, answer)
            return acceptor.hello
    except TimeoutError as error:
        raise LinkError(f"no handshake in {timeout_s:g} s") from error
    except OSError as error:
        raise LinkError("lost the connection during the handshake", found=error.strerror) from error
