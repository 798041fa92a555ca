"""A connection's bytes, in clear or inside TLS, for both lives of a connection: the handshake on the event loop, and
bulk in a thread.

TLS runs on memory buffers (``ssl.MemoryBIO``), not on an ``SSLSocket``: one receive then brings hundreds of KiB of
records instead of one record of 16 KiB, the same object works on the loop and in a thread, and the loop's own TLS
transport, which copies more, is not needed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Protocol

from prfaas_net.errors import AuthError, LinkError
from prfaas_net.units import KiB

__all__ = ["PlainStream", "Stream", "TlsStream", "tls_handshake"]

# Ciphertext taken from the kernel at a time.
TLS_READ_BYTES = 512 * KiB
# Plaintext encrypted at a time: stays in the L2 cache between encryption and the kernel's copy.
TLS_WRITE_BYTES = 128 * KiB
DRAIN_BYTES = 256 * KiB


class Stream(Protocol):
    """One connection. The coroutines are for a non-blocking socket on the loop, the rest for a blocking one."""

    sock: socket.socket

    async def send(self, data: bytes) -> None:
        """Write all of it."""
        ...

    async def receive(self, n_bytes: int) -> bytes:
        """At most so many bytes; empty at the end."""
        ...

    def encode(self, data: bytes) -> bytes:
        """What has to be written to the socket for these bytes; for the control connection."""
        ...

    def decode(self, data: bytes) -> bytes:
        """The bytes inside what was read from the socket."""
        ...

    def send_frames(self, parts: list[bytes | memoryview]) -> None:
        """Write headers and payloads, in turn; blocks."""
        ...

    def receive_into(self, view: memoryview) -> bool:
        """Fill the view; blocks. False if the peer closed before it was full."""
        ...

    def receive_both(self, first: memoryview, second: memoryview) -> bool:
        """Fill both views, which come one right after the other; blocks. False as above."""
        ...

    def drain(self, n_bytes: int) -> bool:
        """Read and forget; blocks. False as above."""
        ...


class PlainStream:
    """Bytes as they are."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def receive(self, n_bytes: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.sock, n_bytes)

    def encode(self, data: bytes) -> bytes:
        return data

    def decode(self, data: bytes) -> bytes:
        return data

    def send_frames(self, parts: list[bytes | memoryview]) -> None:
        sent = self.sock.sendmsg(parts)
        for part in parts:
            if sent >= len(part):
                sent -= len(part)
            else:
                self.sock.sendall(memoryview(part)[sent:])
                sent = 0

    def receive_both(self, first: memoryview, second: memoryview) -> bool:
        n, *_ = self.sock.recvmsg_into([first, second], 0, socket.MSG_WAITALL)
        if n == first.nbytes + second.nbytes:
            return True
        if n == 0:
            return False
        rest = second[max(0, n - first.nbytes) :]
        return (n >= first.nbytes or self.receive_into(first[n:])) and self.receive_into(rest)

    def receive_into(self, view: memoryview) -> bool:
        while view.nbytes:
            n = self.sock.recv_into(view, view.nbytes, socket.MSG_WAITALL)
            if n == 0:
                return False
            view = view[n:]
        return True

    def drain(self, n_bytes: int) -> bool:
        # MSG_TRUNC on Linux TCP throws the bytes away without copying them.
        scrap = bytearray(min(n_bytes, DRAIN_BYTES))
        while n_bytes:
            n = self.sock.recv_into(scrap, min(n_bytes, len(scrap)), socket.MSG_WAITALL | socket.MSG_TRUNC)
            if n == 0:
                return False
            n_bytes -= n
        return True


class TlsStream:
    """Bytes inside TLS 1.3. One thread at a time may use it; a data connection has one, in one direction."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, server_name: str | None) -> None:
        self.sock = sock
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_side=server, server_hostname=server_name)
        self._cipher = bytearray(TLS_READ_BYTES)
        # The first bytes that came: what the peer speaks, if not TLS.
        self.begins = b""

    # -- on the loop --------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Write what TLS has to say."""
        data = self._out.read()
        if data:
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def fill(self) -> bool:
        """Read some ciphertext; False at the end."""
        data = await asyncio.get_running_loop().sock_recv(self.sock, 64 * KiB)
        self.begins = self.begins or data[:4]
        self._in.write(data)
        return bool(data)

    async def send(self, data: bytes) -> None:
        self.tls.write(data)
        await self.flush()

    async def receive(self, n_bytes: int) -> bytes:
        while True:
            try:
                return self.tls.read(n_bytes)
            except ssl.SSLWantReadError:
                if not await self.fill():
                    return b""
            except ssl.SSLZeroReturnError:
                return b""

    def encode(self, data: bytes) -> bytes:
        self.tls.write(data)
        return self._out.read()

    def decode(self, data: bytes) -> bytes:
        self._in.write(data)
        plain = bytearray()
        try:
            while more := self.tls.read(64 * KiB):
                plain += more
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return bytes(plain)

    # -- in a thread --------------------------------------------------------------------------------------------

    def send_frames(self, parts: list[bytes | memoryview]) -> None:
        for part in parts:
            view = memoryview(part)
            for start in range(0, view.nbytes, TLS_WRITE_BYTES):
                self.tls.write(view[start : start + TLS_WRITE_BYTES])
                if self._out.pending >= TLS_WRITE_BYTES:
                    self.sock.sendall(self._out.read())
        self.sock.sendall(self._out.read())

    def receive_both(self, first: memoryview, second: memoryview) -> bool:
        return self.receive_into(first) and self.receive_into(second)

    def receive_into(self, view: memoryview) -> bool:
        while view.nbytes:
            try:
                n = int(self.tls.read(view.nbytes, view))  # into the view: returns how many bytes
            except ssl.SSLWantReadError:
                got = self.sock.recv_into(self._cipher)
                if got == 0:
                    return False
                self._in.write(memoryview(self._cipher)[:got])
                continue
            except ssl.SSLZeroReturnError:
                return False
            if n == 0:
                return False
            view = view[n:]
        return True

    def drain(self, n_bytes: int) -> bool:
        scrap = memoryview(bytearray(min(n_bytes, DRAIN_BYTES)))
        while n_bytes:
            n = min(n_bytes, len(scrap))
            if not self.receive_into(scrap[:n]):
                return False
            n_bytes -= n
        return True


async def tls_handshake(stream: TlsStream, where: str) -> None:
    """Run the TLS handshake; the caller bounds its time.

    Raises:
        AuthError: a certificate was refused, by either side.
        LinkError: the connection was closed, or the peer does not speak TLS.
    """
    while True:
        try:
            stream.tls.do_handshake()
            await stream.flush()
            return
        except ssl.SSLWantReadError:
            await stream.flush()
            if not await stream.fill():
                raise LinkError(
                    f"{where} closed the connection during the TLS handshake",
                    do="see its log; TLS must be on at both ends",
                ) from None
        except ssl.SSLCertVerificationError as error:
            await stream.flush()
            raise AuthError(
                f"the certificate of {where} is not accepted",
                found=error.verify_message,
                do="check kv.tls on both sides",
            ) from error
        except ssl.SSLError as error:
            await stream.flush()
            raise LinkError(
                f"the TLS handshake with {where} failed",
                found=error.reason or str(error),
                do="set kv.tls on both sides",
            ) from error
