"""Accepting connections and shaking hands with them, without letting strangers crowd out friends."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable

from prfaas_net.config import is_loopback
from prfaas_net.errors import ConfigError, PrfaasError
from prfaas_net.kv.codecs import Codec
from prfaas_net.transport.congestion_choice import choose_congestion_control
from prfaas_net.transport.handshaking import accept_handshake
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.options import LinkOptions, tune
from prfaas_net.transport.security import Security
from prfaas_net.transport.streams import Stream
from prfaas_net.wire import Acceptor, Hello

__all__ = ["CODECS", "Accepting"]

# All that this side can decode.
CODECS = (Codec.ZSTD, Codec.BF16_PLANES)
# Connections that have not shaken hands yet. When there are more the oldest is closed: whoever opens ten thousand of
# them costs no more than this, and an honest dialler, who needs a few round trips, still gets through.
MAX_PENDING_HANDSHAKES = 256


class Accepting:
    """A listening socket.

    Args:
        role: what the dialler must be: ``"sender"`` or ``"receiver"``.
        on_ready: takes over each connection whose handshake is complete.

    Attributes:
        refused_connections: strangers, and those that left or were too slow.
        last_refusal: why the last of them was refused.
    """

    def __init__(
        self,
        identity: Identity,
        security: Security,
        options: LinkOptions,
        *,
        role: str,
        on_ready: Callable[[Hello, Stream], Awaitable[None]],
    ) -> None:
        self.address: tuple[str, int] = ("", 0)
        self.refused_connections = 0
        self.last_refusal: PrfaasError | None = None
        self._identity = identity
        self._security = security
        self._options = options
        self._role = role
        self._on_ready = on_ready
        self._pending: dict[asyncio.Task[None], None] = {}  # in the order of their coming
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken or not ours, or is open to others without a shared key.
        """
        if not self._security.authenticates and not is_loopback(host):
            raise ConfigError(
                f"will not listen on {host} without authentication",
                expected="a loopback address, a shared key or certificates",
                do="set kv.shared_key or kv.tls on both sides",
            )
        _ = self._security.server  # bad certificate files are found now, not by the first dialler
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=4096)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}", found=error.strerror, do="choose another kv.listen"
            ) from error
        self._socket.setblocking(False)
        self.address = self._socket.getsockname()[:2]
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop listening; handshakes under way are cut."""
        tasks = [*self._pending, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            if self._socket is not None:
                self._socket.close()

    async def _accept(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket, readable.set)
        try:
            while True:
                await readable.wait()
                # Not loop.sock_accept: cancelled after it has succeeded, it would lose the connection.
                try:
                    sock, _ = self._socket.accept()
                except BlockingIOError:
                    readable.clear()
                    continue
                except OSError:
                    loop.remove_reader(self._socket)
                    await asyncio.sleep(0.05)  # out of descriptors: let some close
                    loop.add_reader(self._socket, readable.set)
                    continue
                self._greet(sock)
                # There may be many more: let the others run in between.
                await asyncio.sleep(0)
        finally:
            loop.remove_reader(self._socket)

    def _greet(self, sock: socket.socket) -> None:
        if len(self._pending) >= MAX_PENDING_HANDSHAKES:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            oldest.cancel()
        sock.setblocking(False)
        task = asyncio.create_task(self._welcome(sock))
        self._pending[task] = None
        task.add_done_callback(lambda done: self._welcomed(done, sock))

    def _welcomed(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        self._pending.pop(task, None)
        if task.cancelled():
            sock.close()  # perhaps before its first step

    async def _welcome(self, sock: socket.socket) -> None:
        acceptor = Acceptor(
            node=self._identity.node,
            boot_id=self._identity.boot_id,
            nonce=secrets.token_hex(16),
            key=self._security.key,
            features=tuple(codec.feature for codec in CODECS),
            role=self._role,
        )
        try:
            stream, hello = await accept_handshake(
                sock, acceptor, self._security, timeout_s=self._options.connect_timeout_s
            )
            # Where receivers dial, data leaves on what was accepted.
            sends_data = self._role == "receiver" and hello.lane > 0
            tune(sock, self._options, data=sends_data)
            if sends_data and self._options.congestion_control is None:
                choose_congestion_control(sock)
            await self._on_ready(hello, stream)
        except BaseException as error:
            sock.close()
            self.refused_connections += 1
            if isinstance(error, PrfaasError):
                self.last_refusal = error
            elif not isinstance(error, OSError):
                raise
