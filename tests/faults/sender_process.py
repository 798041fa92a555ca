"""A sender in a process of its own: one transfer, described on the command line, reported on standard output.

    {"ticket", "chunk_bytes", "seed", "connections", "window_s", "hold_after", "timers"}

With ``hold_after`` only so many chunks are ever ready, and the process waits to be killed. Lines it prints:
``opened``, ``landed N``, then ``delivered SENT`` or ``failed ERROR line``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from prfaas_net.errors import PrfaasError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, LinkOptions, SenderLink
from prfaas_net.wire import Ticket, Timers
from tests.waiting import until
from tests.wire.pair import cut, random_bytes


def say(*words: object) -> None:
    print(*words, flush=True)


async def main(spec: dict[str, Any]) -> None:
    ticket = Ticket.from_json(spec["ticket"])
    table = ChunkTable.split(ticket.total_bytes, spec["chunk_bytes"])
    source = random_bytes(table.total_bytes, spec["seed"])
    link = await SenderLink.connect(
        ticket.endpoints,
        identity=Identity("p0"),
        options=LinkOptions(connections=spec.get("connections", 2), resume_window_s=spec.get("window_s", 0.0)),
        timers=Timers(**spec.get("timers", {})),
    )
    outgoing = link.open(ticket, table, cut(source, table))
    held = spec.get("hold_after")
    try:
        for chunk in range(len(table) if held is None else held):
            outgoing.ready(chunk)
        if held is not None:
            await until(lambda: outgoing.transfer.acked.count >= held, within_s=10)
            say("landed", held)
            await asyncio.sleep(30)
        outgoing.seal({"first_token": 9})
        await outgoing.wait()
        say("delivered", outgoing.transfer.sent_before.count)
    except PrfaasError as error:
        say("failed", type(error).__name__, error.line())
    await link.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
