"""A receiver in a process of its own: one reservation, described on the command line, reported on standard output.

    {"total_bytes", "chunk_bytes", "lifetime_s", "grace_s", "port", "timers"}

It prints the ticket as one line of JSON, then ``landed DIGEST`` or ``failed ERROR line``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from prfaas_net.errors import PrfaasError
from prfaas_net.kv import ChunkTable, checksum
from prfaas_net.transport import Identity, KvListener
from prfaas_net.wire import Timers
from tests.wire.pair import cut


async def main(spec: dict[str, Any]) -> None:
    listener = KvListener(
        identity=Identity("d0"), timers=Timers(**spec.get("timers", {})), link_grace_s=spec.get("grace_s", 0.0)
    )
    await listener.start("127.0.0.1", spec.get("port", 0))
    table = ChunkTable.split(spec["total_bytes"], spec["chunk_bytes"])
    memory = np.zeros(table.total_bytes, dtype=np.uint8)
    incoming = listener.reserve(
        table, cut(memory, table), lifetime_s=spec.get("lifetime_s", 20.0), endpoints=[listener.address]
    )
    print(json.dumps(incoming.ticket.to_json()), flush=True)
    try:
        await incoming.landed()
        print("landed", f"{checksum(memory.tobytes()):016x}", flush=True)
    except PrfaasError as error:
        print("failed", type(error).__name__, error.line(), flush=True)
    await asyncio.sleep(30)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
