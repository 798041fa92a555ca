"""Running a handshake over a fresh socket, within a time."""

from __future__ import annotations

import asyncio
import socket
import ssl

import aiohappyeyeballs

from prfaas_net.errors import LinkError, PrfaasError, ProtocolError
from prfaas_net.transport.congestion_choice import choose_congestion_control
from prfaas_net.transport.options import LinkOptions, tune
from prfaas_net.transport.security import Security
from prfaas_net.transport.streams import PlainStream, Stream, TlsStream, tls_handshake
from prfaas_net.wire.frames import MAGIC, Frame, FrameParser
from prfaas_net.wire.handshake import Acceptor, Dialer, Hello, PeerIdentity

__all__ = ["accept_handshake", "dial"]

# How long a refused peer may take to read why.
PARTING_S = 0.5
# First bytes of a TLS ClientHello, and of an alert: what a plain peer of a TLS port gets.
_TLS_RECORDS = (b"\x16\x03", b"\x15\x03")


class _FrameReader:
    """Frames of a handshake; takes nothing of what follows them from the stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._parser = FrameParser()

    async def next(self) -> Frame:
        while True:
            data = await self._stream.receive(self._parser.missing)
            if not data:
                raise LinkError("the connection was closed during the handshake")
            if data.startswith(_TLS_RECORDS):
                raise ProtocolError("the peer speaks TLS and this side does not", do="set kv.tls on both sides")
            for frame in self._parser.feed(data):
                return frame


async def _connect(host: str, port: int, options: LinkOptions, lane: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    where = f"{host}:{port}"
    local = options.local_address(lane)
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            local_infos = None
            if local is not None:
                local_infos = await loop.getaddrinfo(local, 0, type=socket.SOCK_STREAM)
            return await aiohappyeyeballs.start_connection(
                addresses, local_addr_infos=local_infos, happy_eyeballs_delay=0.25
            )
    except TimeoutError as error:
        raise LinkError(f"cannot reach {where}", found=f"no answer in {options.connect_timeout_s:g} s") from error
    except OSError as error:
        raise LinkError(f"cannot reach {where}", found=error.strerror or str(error)) from error


async def _secure(sock: socket.socket, security: Security, host: str, where: str) -> Stream:
    context = security.client
    if context is None or security.tls is None:
        return PlainStream(sock)
    stream = TlsStream(sock, context, server=False, server_name=security.tls.server_name or host)
    await tls_handshake(stream, where)
    return stream


async def dial(
    endpoint: tuple[str, int], hello: Hello, security: Security, options: LinkOptions
) -> tuple[Stream, PeerIdentity]:
    """Connect and shake hands; the socket is still non-blocking.

    Raises:
        LinkError: unreachable, or closed during the handshake.
        PrfaasError: the acceptor refused, with its reason.
    """
    host, port = endpoint
    where = f"{host}:{port}"
    sock = await _connect(host, port, options, hello.lane)
    try:
        tune(sock, options, data=hello.lane > 0)
        if hello.lane > 0 and options.congestion_control is None:
            choose_congestion_control(sock)
        async with asyncio.timeout(options.connect_timeout_s):
            stream = await _secure(sock, security, host, where)
            dialer = Dialer(hello, security.key)
            reader = _FrameReader(stream)
            await stream.send(dialer.begin())
            while dialer.peer is None:
                answer = dialer.receive(await reader.next())
                if answer:
                    await stream.send(answer)
            return stream, dialer.peer
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            found = f"no handshake in {options.connect_timeout_s:g} s"
            raise LinkError(f"{where} does not answer", found=found, do="check that it is a KV port") from error
        if isinstance(error, ssl.SSLError):
            # TLS 1.3: a server refuses a client's certificate only after the client believes to be through.
            found = error.reason or str(error)
            raise LinkError(f"{where} ended the TLS session", found=found, do="check kv.tls on both sides") from error
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


async def accept_handshake(
    sock: socket.socket, acceptor: Acceptor, security: Security, *, timeout_s: float
) -> tuple[Stream, Hello]:
    """Shake hands with whoever connected; tells it why when it is refused.

    Raises:
        PrfaasError: it was refused, left, or took too long. The socket is the caller's to close.
    """
    stream: Stream = PlainStream(sock)
    try:
        async with asyncio.timeout(timeout_s):
            if security.server is not None:
                stream = TlsStream(sock, security.server, server=True, server_name=None)
                try:
                    await tls_handshake(stream, "the dialler")
                except PrfaasError as error:
                    failure = error
                    if stream.begins == MAGIC:
                        # It does not speak TLS at all, so no alert would reach it.
                        failure = ProtocolError("this port speaks TLS and the dialler does not", do="set kv.tls")
                        await PlainStream(sock).send(acceptor.refuse(failure))
                    await _part(sock)
                    raise failure from error
            reader = _FrameReader(stream)
            while acceptor.hello is None:
                try:
                    answer = acceptor.receive(await reader.next())
                except PrfaasError as error:
                    await stream.send(acceptor.refuse(error))
                    await _part(sock)
                    raise
                await stream.send(answer)
            return stream, acceptor.hello
    except TimeoutError as error:
        raise LinkError(f"no handshake in {timeout_s:g} s") from error
    except OSError as error:
        raise LinkError("lost the connection during the handshake", found=error.strerror) from error
