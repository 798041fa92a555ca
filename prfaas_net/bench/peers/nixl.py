"""NIXL on UCX over TCP: prepared descriptor lists, WRITE into the receiver's memory, two batches in flight."""

from __future__ import annotations

import base64
import importlib
import os
import time
from typing import Any

from prfaas_net.bench.peers.harness import REGION_BYTES, Peer, Windows, main

__all__ = ["Nixl"]

SETTINGS = {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error", "CUDA_VISIBLE_DEVICES": ""}
BATCH_BYTES = 64 << 20
IN_FLIGHT = 2
# Waiting is polling; without a pause it takes a whole core.
POLL_S = 0.0002


class Nixl(Peer):
    """One agent an end."""

    piece_bytes = 256 << 10

    def _start(self, name: str) -> None:
        os.environ.update({**SETTINGS, "UCX_NET_DEVICES": os.environ.get("PRFAAS_BENCH_DEVICE", "lo")})
        api: Any = importlib.import_module("nixl._api")
        config = api.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=["UCX"])
        self._agent: Any = api.nixl_agent(name, config)
        self._memory = self._agent.register_memory([(self.region.ctypes.data, REGION_BYTES, 0, "")], "DRAM")

    def _list(self, name: str, base: int) -> Any:
        size = self.piece_bytes
        pieces = [(base + at, size, 0) for at in range(0, REGION_BYTES, size)]
        return self._agent.prep_xfer_dlist(name, pieces, "DRAM")

    def offer(self) -> dict[str, Any]:
        self._start("receiver")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.region.ctypes.data}

    def join(self, offer: dict[str, Any]) -> None:
        if self.receives:
            return
        self._start("sender")
        name = self._agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._near = self._list("NIXL_INIT_AGENT", self.region.ctypes.data)
        self._far = self._list(self._peer, offer["address"])
        self._wait(self._write([0]))  # connects

    def _write(self, pieces: list[int]) -> Any:
        handle = self._agent.make_prepped_xfer("WRITE", self._near, pieces, self._far, pieces, b"")
        self._agent.transfer(handle)
        return handle

    def _wait(self, handle: Any) -> None:
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("transfer failed")
            time.sleep(POLL_S)
        self._agent.release_xfer_handle(handle)

    def send(self, n_bytes: int) -> None:
        under_way: list[Any] = []
        for batch in Windows(self.pieces(n_bytes), BATCH_BYTES // self.piece_bytes):
            under_way.append(self._write([at // self.piece_bytes for at in batch]))
            if len(under_way) == IN_FLIGHT:
                self._wait(under_way.pop(0))
        for handle in under_way:
            self._wait(handle)


if __name__ == "__main__":
    main(Nixl)
