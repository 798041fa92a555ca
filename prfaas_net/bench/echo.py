"""Bare TCP round trips: what the kernel and two wake-ups cost without any protocol."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

from prfaas_net.bench.meters import percentile

__all__ = ["echo", "serve_echo"]


def serve_echo(host: str) -> socket.socket:
    """Answer each block with one byte, in threads; a connection says its block size first (4 bytes)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
    threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return server


def _accept(server: socket.socket) -> None:
    while True:
        try:
            sock, _ = server.accept()
        except OSError:
            return  # closed
        threading.Thread(target=_answer, args=(sock,), daemon=True).start()


def _answer(sock: socket.socket) -> None:
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
        block = bytearray(size)
        while sock.recv_into(block, size, socket.MSG_WAITALL) == size:
            sock.sendall(b"k")


def _round_trips(endpoint: tuple[str, int], block: memoryview, n: int) -> list[float]:
    """From a thread with a blocking socket: the floor."""
    took_s = []
    with socket.create_connection((endpoint[0], endpoint[1])) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(block.nbytes.to_bytes(4, "little"))
        for _ in range(n):
            began_s = time.perf_counter()
            sock.sendall(block)
            sock.recv(1)
            took_s.append(time.perf_counter() - began_s)
    return took_s


async def _loop_round_trips(endpoint: tuple[str, int], block: memoryview, n: int) -> list[float]:
    """From the event loop: what an asyncio program pays at least."""
    loop = asyncio.get_running_loop()
    took_s = []
    with socket.create_connection((endpoint[0], endpoint[1])) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        await loop.sock_sendall(sock, block.nbytes.to_bytes(4, "little"))
        for _ in range(n):
            began_s = time.perf_counter()
            await loop.sock_sendall(sock, block)
            await loop.sock_recv(sock, 1)
            took_s.append(time.perf_counter() - began_s)
    return took_s


async def echo(endpoint: tuple[str, int], block: memoryview, n: int) -> dict[str, Any]:
    """Both kinds, in seconds."""
    blocking = await asyncio.to_thread(_round_trips, endpoint, block, n)
    looped = await _loop_round_trips(endpoint, block, n)
    return {
        "p50_s": percentile(blocking, 0.5),
        "p99_s": percentile(blocking, 0.99),
        "loop_p50_s": percentile(looped, 0.5),
        "loop_p99_s": percentile(looped, 0.99),
    }
