"""Mooncake Transfer Engine over TCP with its connection pool, pieces written in batches into the receiver's memory."""

from __future__ import annotations

import importlib
import os
from typing import Any

from prfaas_net.bench.peers.harness import Peer, Windows, main

__all__ = ["Mooncake"]

SETTINGS = {
    "MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "WARNING", "GLOG_minloglevel": "1", "MC_TCP_ENABLE_CONNECTION_POOL": "1",
}  # fmt: skip
BATCH_BYTES = 64 << 20


class Mooncake(Peer):
    """One engine an end."""

    piece_bytes = 256 << 10

    def _start(self) -> None:
        os.environ.update({**SETTINGS, "MC_TCP_BIND_ADDRESS": self.here})
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        for code in (
            self._engine.initialize(self.here, "P2PHANDSHAKE", "tcp", ""),
            self._engine.register_memory(self.region.ctypes.data, self.region.nbytes),
        ):
            if code:
                raise RuntimeError(f"code {code}")

    def offer(self) -> dict[str, Any]:
        self._start()
        return {"port": self._engine.get_rpc_port(), "address": self.region.ctypes.data}

    def join(self, offer: dict[str, Any]) -> None:
        if not self.receives:
            self._start()
            self._target, self._far = f"{self.host}:{offer['port']}", offer["address"]

    def send(self, n_bytes: int) -> None:
        near, size = self.region.ctypes.data, self.piece_bytes
        for batch in Windows(self.pieces(n_bytes), BATCH_BYTES // size):
            code = self._engine.batch_transfer_sync_write(
                self._target, [near + at for at in batch], [self._far + at for at in batch], [size] * len(batch)
            )
            if code:
                raise RuntimeError(f"transfer code {code}")


if __name__ == "__main__":
    main(Mooncake)
