"""The two ends of a link, each in a process of its own: JSON lines in, JSON lines out.

Run as ``python -m prfaas_net.bench.ends receive`` and ``... send``. Whoever started one leads; an end lives until its
stdin is closed. An end that does nothing (``idle``) shows what the machine alone does to an event loop.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from prfaas_net.bench.certificates import tls_files
from prfaas_net.bench.echo import echo, serve_echo
from prfaas_net.bench.meters import Lateness, cpu_s, percentile
from prfaas_net.bench.processes import obey
from prfaas_net.bench.region import Region
from prfaas_net.bench.switches import switch_checksums
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, Incoming, KvListener, LinkOptions, Security, SenderLink
from prfaas_net.wire import Ticket

__all__ = ["IdleEnd", "ReceivingEnd", "SendingEnd"]

Answer = dict[str, Any]
LIFETIME_S = 300.0


def _security(key: str, certificates: str | None) -> Security:
    return Security(key.encode(), tls_files(Path(certificates)) if certificates else None)


class IdleEnd:
    """Answers commands, and measures its own loop when asked to."""

    def __init__(self) -> None:
        self.commands: dict[str, Callable[..., Awaitable[Answer]]] = {
            "watch_loop": self.watch_loop,
            "loop_lateness": self.loop_lateness,
            "checksums": self.checksums,
        }
        self._lateness: Lateness | None = None

    async def watch_loop(self) -> Answer:
        """Begin to measure."""
        self._lateness = Lateness()
        return {}

    async def loop_lateness(self) -> Answer:
        """What was measured since."""
        late_s = self._lateness.stop() if self._lateness else []
        self._lateness = None
        return {"p50_s": percentile(late_s, 0.5), "p99_s": percentile(late_s, 0.99), "n": len(late_s)}

    async def checksums(self, on: bool) -> Answer:
        """Hash payloads, or not."""
        switch_checksums(on)
        return {}

    async def close(self) -> None:
        """Nothing is open."""


class ReceivingEnd(IdleEnd):
    """Listens, reserves, and tells when and how a transfer has landed."""

    def __init__(self) -> None:
        super().__init__()
        self.commands |= {"listen": self.listen, "reserve": self.reserve, "landed": self.landed, "echo": self.echo}
        self.commands |= {"reserve_many": self.reserve_many, "landed_many": self.landed_many}
        self._region = Region()
        # By whether they speak TLS.
        self._listeners: dict[bool, KvListener] = {}
        self._landing: dict[str, asyncio.Task[Answer]] = {}
        self._echo: socket.socket | None = None

    async def listen(self, host: str, key: str, certificates: str | None = None) -> Answer:
        """Open a KV port: with ``certificates``, a directory, another one inside TLS."""
        listener = KvListener(identity=Identity("bench-receiver"), security=_security(key, certificates))
        await listener.start(host, 0)
        self._listeners[certificates is not None] = listener
        return {"endpoint": listener.address}

    async def reserve(self, total_bytes: int, chunk_bytes: int, tls: bool = False, clear: bool = True) -> Answer:
        """Room for one transfer; its CPU time counts from here."""
        listener = self._listeners[tls]
        table = ChunkTable.split(total_bytes, chunk_bytes)
        if clear:
            self._region.clear()
        incoming = listener.reserve(
            table, self._region.views(table), lifetime_s=LIFETIME_S, endpoints=[listener.address]
        )
        task = asyncio.create_task(self._land(incoming, cpu_s()))
        self._landing[incoming.ticket.transfer_id] = task
        return {"ticket": incoming.ticket.to_json()}

    async def reserve_many(self, n: int, n_bytes: int) -> Answer:
        """Room for many transfers of one chunk each."""
        return {"tickets": [(await self.reserve(n_bytes, n_bytes, clear=False))["ticket"] for _ in range(n)]}

    async def landed_many(self, transfers: list[str]) -> Answer:
        """When each had landed."""
        return {"at_s": [(await self._landing.pop(transfer))["at_s"] for transfer in transfers]}

    async def _land(self, incoming: Incoming, cpu_before_s: float) -> Answer:
        await incoming.landed()
        return {"at_s": time.monotonic(), "cpu_s": cpu_s() - cpu_before_s}

    async def landed(self, transfer: str, total_bytes: int) -> Answer:
        """When it has: at what time, for how much CPU, and what lies in memory."""
        answer = await self._landing.pop(transfer)
        return answer | {"digest": self._region.digest(total_bytes)}

    async def echo(self, host: str) -> Answer:
        """A bare TCP port that answers each block with one byte."""
        self._echo = serve_echo(host)
        return {"endpoint": self._echo.getsockname()[:2]}

    async def close(self) -> None:
        if self._echo is not None:
            self._echo.close()
        for listener in self._listeners.values():
            await listener.close()


class SendingEnd(IdleEnd):
    """Connects and sends."""

    def __init__(self) -> None:
        super().__init__()
        self.commands |= {
            "connect": self.connect, "send": self.send, "prefill": self.prefill, "hang_up": self.hang_up,
            "echo": self.echo, "send_many": self.send_many,
        }  # fmt: skip
        self._region = Region()
        self._region.fill()
        self._link: SenderLink | None = None

    async def connect(
        self, endpoint: tuple[str, int], key: str, options: dict[str, Any], certificates: str | None = None
    ) -> Answer:
        """A fresh link."""
        host, port = endpoint
        self._link = await SenderLink.connect(
            [(host, port)],
            identity=Identity("bench-sender"),
            security=_security(key, certificates),
            options=LinkOptions(**options),
        )
        control = self._link.streams[0].sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return {"congestion_control": control.split(b"\0")[0].decode()}

    async def send(self, ticket: dict[str, Any], chunk_bytes: int) -> Answer:
        """Everything at once; the time ends when the receiver has confirmed that it landed and was verified."""
        assert self._link is not None
        parsed = Ticket.from_json(ticket)
        table = ChunkTable.split(parsed.total_bytes, chunk_bytes)
        views = self._region.views(table)
        cpu_before_s, began_s = cpu_s(), time.monotonic()
        outgoing = self._link.open(parsed, table, views)
        outgoing.ready_all()
        outgoing.seal({})
        await outgoing.wait()
        ended_s = time.monotonic()
        return {
            "began_at_s": began_s,
            "took_s": ended_s - began_s,
            "cpu_s": cpu_s() - cpu_before_s,
            "digest": self._region.digest(parsed.total_bytes),
        }

    async def send_many(self, tickets: list[dict[str, Any]]) -> Answer:
        """Transfers of one chunk each, one after the other."""
        assert self._link is not None
        began_s, took_s = [], []
        for each in tickets:
            ticket = Ticket.from_json(each)
            table = ChunkTable([ticket.total_bytes])
            views = self._region.views(table)
            began_s.append(time.monotonic())
            outgoing = self._link.open(ticket, table, views)
            outgoing.ready_all()
            outgoing.seal({})
            await outgoing.wait()
            took_s.append(time.monotonic() - began_s[-1])
        return {"began_at_s": began_s, "took_s": took_s}

    async def prefill(self, ticket: dict[str, Any], chunk_bytes: int, prefill_s: float) -> Answer:
        """Chunks become ready evenly over ``prefill_s``, as a chunked, layer-wise prefill makes them."""
        assert self._link is not None
        parsed = Ticket.from_json(ticket)
        table = ChunkTable.split(parsed.total_bytes, chunk_bytes)
        outgoing = self._link.open(parsed, table, self._region.views(table))
        began_s = time.monotonic()
        for chunk in range(len(table)):
            due_s = began_s + prefill_s * (chunk + 1) / len(table)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            outgoing.ready(chunk)
        ended_s = time.monotonic()
        outgoing.seal({})
        await outgoing.wait()
        return {
            "prefill_s": ended_s - began_s,
            "exposed_s": time.monotonic() - ended_s,
            "digest": self._region.digest(parsed.total_bytes),
        }

    async def hang_up(self) -> Answer:
        """End the link."""
        if self._link is not None:
            await self._link.close()
            self._link = None
        return {}

    async def echo(self, endpoint: tuple[str, int], block_bytes: int, n: int) -> Answer:
        """Bare TCP round trips: a block there, a byte back."""
        return await echo(endpoint, self._region.memory[:block_bytes], n)

    async def close(self) -> None:
        await self.hang_up()


async def _main(role: str) -> None:
    ends = {"receive": ReceivingEnd, "send": SendingEnd, "idle": IdleEnd}
    end = ends[role]()
    await obey(end.commands)
    await end.close()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1]))
