#!/usr/bin/env python3
"""Goodput of an honest transfer beside an attack, as a share of what it is alone.

    python tools/measure_hostile.py [--rounds 5] [--mebibytes 512] [--gbps 10] [--json]

Rounds are interleaved: alone, beside an attack, beside a load, alone, beside the next attack; the figures are medians.
An attacker sits on another host, but here its own work takes processor time from the transfer. So there are two shares:
``share``, against the rounds alone around it, with the attacker's work in it; and ``share_of_loaded``, against a round
beside a process that attacks nobody and spends as much processor time as the attacker did: what the receiver loses by
being attacked. Attackers and load run at nice 19; ``--gbps`` paces the link and leaves the cores some room. Attacks:
half-open connections as fast as they can be made, junk and resets, handshakes with a wrong key, and (from a peer that
has the key) a flood of pings.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener, LinkOptions, Security, SenderLink
from prfaas_net.transport.handshaking import dial
from prfaas_net.units import MiB
from prfaas_net.wire import Dialer, FrameType, Hello, Ticket
from prfaas_net.wire.frames import encode

KEY = b"what honest peers know"
# Of each round beside something: enough for the processor time of that something to be measured.
TRANSFERS = 3
Address = tuple[str, int]


def _views(table: ChunkTable, memory: bytearray) -> list[memoryview]:
    flat = memoryview(memory)
    return [flat[o : o + n] for o, n in zip(table.offsets, table.lengths, strict=True)]


async def _receive(pipe: Connection, table: ChunkTable) -> None:
    listener = KvListener(identity=Identity("d0"), security=Security(KEY))
    await listener.start("127.0.0.1", 0)
    memory = bytearray(table.total_bytes)
    pipe.send(listener.address)
    while await asyncio.to_thread(pipe.recv):
        incoming = listener.reserve(table, _views(table, memory), lifetime_s=120)
        pipe.send((incoming.ticket.to_json(), listener.refused_connections))
        await incoming.landed()
    await listener.close()


def receiver(pipe: Connection, table: ChunkTable) -> None:
    uvloop.run(_receive(pipe, table))


# -- attacks ------------------------------------------------------------------------------------------------------


def half_open(address: Address) -> None:
    """Connections that say nothing, four thousand held at a time."""
    held: list[socket.socket] = []
    while True:
        sock = socket.socket()
        sock.settimeout(5.0)
        with contextlib.suppress(OSError):
            sock.connect(address)
        held.append(sock)
        if len(held) > 4_000:
            held.pop(0).close()


def junk(address: Address) -> None:
    """Bytes of another protocol, then a reset."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5.0) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def wrong_key(address: Address) -> None:
    """Whole handshakes that prove nothing."""
    while True:
        hello = Dialer(Hello(secrets.token_hex(16), 0, "x", "x", secrets.token_hex(16)), None).begin()
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5.0) as sock:
            sock.sendall(hello + encode(FrameType.CONFIRM, b'{"proof":"00"}'))
            sock.recv(65536)


def ping_flood(address: Address) -> None:
    """A peer with the key that sends nothing but pings, and reads the answers."""

    async def flood() -> None:
        hello = Hello(secrets.token_hex(16), 0, "flood", "boot", secrets.token_hex(16))
        stream, _ = await dial(address, hello, Security(KEY), LinkOptions())
        sequence = 0

        async def drain() -> None:
            while await stream.receive(1 << 20):
                pass

        draining = asyncio.create_task(drain())
        while not draining.done():
            batch = bytearray()
            for _ in range(200):
                sequence += 1
                batch += encode(FrameType.PING, b"12345678", sequence=sequence)
            await stream.send(bytes(batch))

    while True:
        with contextlib.suppress(Exception):
            uvloop.run(flood())


ATTACKS: dict[str, Callable[[Address], None]] = {
    "half-open": half_open, "junk": junk, "wrong-key": wrong_key, "ping-flood": ping_flood,
}  # fmt: skip


def attacker(attack: Callable[[Address], None], address: Address) -> None:
    os.nice(19)
    attack(address)


def load(share: float) -> None:
    """Spends this share of a core, in slices of 5 ms, on nothing."""
    os.nice(19)
    spent_before, began = time.process_time(), time.perf_counter()
    while True:
        if time.process_time() - spent_before < share * (time.perf_counter() - began):
            sum(range(2_000))
        else:
            time.sleep(0.005)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- measuring ----------------------------------------------------------------------------------------------------


class Bench:
    """An honest link and a receiver, for the time of all rounds."""

    def __init__(self, table: ChunkTable) -> None:
        self.table = table
        self.source = bytearray(os.urandom(1 * MiB) * (table.total_bytes // MiB))
        self.pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=receiver, args=(theirs, table), daemon=True)
        self.process.start()
        self.address: Address = self.pipe.recv()
        self.refused = 0

    async def goodput_bps(self, link: SenderLink) -> float:
        self.pipe.send(True)
        ticket, self.refused = await asyncio.to_thread(self.pipe.recv)
        started = time.perf_counter()
        outgoing = link.open(Ticket.from_json(ticket), self.table, _views(self.table, self.source), lifetime_s=120)
        outgoing.ready_all()
        outgoing.seal({})
        await outgoing.wait()
        return self.table.total_bytes * 8 / (time.perf_counter() - started)

    async def beside(self, link: SenderLink, target: Callable[..., None], *args: Any) -> tuple[float, float]:
        """Goodput beside a process, and which share of a core that process had meanwhile."""
        process = multiprocessing.Process(target=target, args=args, daemon=True)
        process.start()
        assert process.pid is not None
        await asyncio.sleep(0.5)
        spent_s, began_s = cpu_s(process.pid), time.perf_counter()
        goodput = statistics.median([await self.goodput_bps(link) for _ in range(TRANSFERS)])
        share = (cpu_s(process.pid) - spent_s) / (time.perf_counter() - began_s)
        process.kill()
        process.join()
        return goodput, share


async def measure(rounds: int, table: ChunkTable, budget_bps: int | None) -> dict[str, Any]:
    bench = Bench(table)
    link = await SenderLink.connect(
        [bench.address],
        identity=Identity("p0"),
        security=Security(KEY),
        options=LinkOptions(connections=2, budget_bps=budget_bps),
    )
    await bench.goodput_bps(link)
    alone: list[float] = []
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ATTACKS}
    for _ in range(rounds):
        for name, attack in ATTACKS.items():
            before = await bench.goodput_bps(link)
            attacked, cores = await bench.beside(link, attacker, attack, bench.address)
            loaded, _ = await bench.beside(link, load, cores)
            after = await bench.goodput_bps(link)
            alone.append(before)
            found[name].append((2 * attacked / (before + after), attacked / loaded, cores))
    await link.close()
    bench.pipe.send(False)
    bench.process.join(5)
    return {
        "alone_bps": statistics.median(alone),
        "refused_connections": bench.refused,
        "attacks": [_row(name, *zip(*rows, strict=True)) for name, rows in found.items()],
    }


def _row(name: str, shares: Sequence[float], of_loaded: Sequence[float], cores: Sequence[float]) -> dict[str, Any]:
    return {
        "name": name,
        "share": statistics.median(shares),
        "share_range": [min(shares), max(shares)],
        "share_of_loaded": statistics.median(of_loaded),
        "share_of_loaded_range": [min(of_loaded), max(of_loaded)],
        "attacker_cores": statistics.median(cores),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--gbps", type=float, help="pace the link to so much; without it the processors are the limit")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    budget_bps = int(args.gbps * 1e9) if args.gbps else None
    result = uvloop.run(measure(args.rounds, ChunkTable.split(args.mebibytes * MiB, MiB), budget_bps))
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"alone: {result['alone_bps'] / 1e9:.2f} Gbps; refused {result['refused_connections']} connections")
    for row in result["attacks"]:
        low, high = row["share_range"]
        least, most = row["share_of_loaded_range"]
        print(
            f"beside {row['name']:<11} {row['share']:.2f} of it ({low:.2f} to {high:.2f}); "
            f"{row['share_of_loaded']:.2f} ({least:.2f} to {most:.2f}) of what it is beside a load of "
            f"{row['attacker_cores']:.2f} cores"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
