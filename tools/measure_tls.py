#!/usr/bin/env python3
"""What TLS costs: processor time of both ends for each GiB, and goodput, against the same link in clear.

    python tools/measure_tls.py [--rounds 5] [--mebibytes 512] [--json]

Sender and receiver are processes of their own; rounds are interleaved (clear, TLS, clear, TLS, ...), figures are
medians, ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from prfaas_net.bench.certificates import make_certificates, tls_files
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener, LinkOptions, Security, SenderLink
from prfaas_net.units import MiB
from prfaas_net.wire import Ticket

KEY = b"a key that both know"


def _views(table: ChunkTable, memory: bytearray) -> list[memoryview]:
    flat = memoryview(memory)
    return [flat[o : o + n] for o, n in zip(table.offsets, table.lengths, strict=True)]


def _security(directory: str, tls: bool) -> Security:
    return Security(KEY, tls_files(Path(directory)) if tls else None)


async def _receive(pipe: Connection, table: ChunkTable, directory: str) -> None:
    listeners = []
    for tls in (False, True):
        listener = KvListener(identity=Identity("d0"), security=_security(directory, tls))
        await listener.start("127.0.0.1", 0)
        listeners.append(listener)
    pipe.send([listener.address for listener in listeners])
    memory = bytearray(table.total_bytes)
    while (tls := await asyncio.to_thread(pipe.recv)) is not None:
        before = time.process_time()
        incoming = listeners[tls].reserve(table, _views(table, memory), lifetime_s=120)
        pipe.send(incoming.ticket.to_json())
        await incoming.landed()
        pipe.send(time.process_time() - before)
    for listener in listeners:
        await listener.close()


def receiver(pipe: Connection, table: ChunkTable, directory: str) -> None:
    uvloop.run(_receive(pipe, table, directory))


async def one(pipe: Connection, link: SenderLink, table: ChunkTable, source: bytearray, tls: bool) -> dict[str, float]:
    """One transfer's figures."""
    pipe.send(tls)
    ticket = Ticket.from_json(await asyncio.to_thread(pipe.recv))
    started, before = time.perf_counter(), time.process_time()
    outgoing = link.open(ticket, table, _views(table, source), lifetime_s=120)
    outgoing.ready_all()
    outgoing.seal({})
    await outgoing.wait()
    took_s, sender_s = time.perf_counter() - started, time.process_time() - before
    gib = table.total_bytes / (1024 * MiB)
    receiver_s = await asyncio.to_thread(pipe.recv)
    return {
        "goodput_gib_per_s": gib / took_s,
        "sender_cpu_s_per_gib": sender_s / gib,
        "receiver_cpu_s_per_gib": receiver_s / gib,
    }


async def measure(rounds: int, table: ChunkTable, directory: str) -> list[dict[str, Any]]:
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=receiver, args=(theirs, table, directory), daemon=True)
    process.start()
    addresses = await asyncio.to_thread(pipe.recv)
    source = bytearray(os.urandom(MiB) * (table.total_bytes // MiB))
    rows = []
    for connections in (1, 2):
        links = [
            await SenderLink.connect(
                [addresses[tls]],
                identity=Identity("p0"),
                security=_security(directory, tls),
                options=LinkOptions(connections=connections),
            )
            for tls in (False, True)
        ]
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(rounds + 1):
            for tls in (False, True):
                figures = await one(pipe, links[tls], table, source, tls)
                if number:  # the first round warms up
                    found[tls].append(figures)
        for link in links:
            await link.close()
        row: dict[str, Any] = {"connections": connections}
        for name in found[False][0]:
            clear, secret = ([f[name] for f in found[tls]] for tls in (False, True))
            row[name] = {
                "clear": statistics.median(clear),
                "tls": statistics.median(secret),
                "ratio": statistics.median(s / c for s, c in zip(secret, clear, strict=True)),
            }
        rows.append(row)
    pipe.send(None)
    process.join(5)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_certificates(Path(directory))
        rows = uvloop.run(measure(args.rounds, ChunkTable.split(args.mebibytes * MiB, MiB), directory))
    if args.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        print(f"{row.pop('connections')} connection(s)")
        for name, values in row.items():
            print(f"  {name:<24} clear {values['clear']:6.2f}   tls {values['tls']:6.2f}   ratio {values['ratio']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
