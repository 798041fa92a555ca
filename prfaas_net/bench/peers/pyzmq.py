"""pyzmq PUSH and PULL without copies in the library, and the one into the landing place that KVCache needs."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from prfaas_net.bench.peers.harness import Peer, main

__all__ = ["PyZmq"]

IN_FLIGHT_BYTES = 64 << 20


class PyZmq(Peer):
    """One socket for pieces, one for the confirmation."""

    def _socket(self, kind: str) -> Any:
        zmq: Any = importlib.import_module("zmq")
        sock = zmq.Context.instance().socket(getattr(zmq, kind))
        sock.set_hwm(max(2, IN_FLIGHT_BYTES // self.piece_bytes))
        sock.setsockopt(zmq.LINGER, 0)
        return sock

    def offer(self) -> dict[str, Any]:
        self._pieces, self._done = self._socket("PULL"), self._socket("PUSH")
        where = f"tcp://{self.host}"
        return {"pieces": self._pieces.bind_to_random_port(where), "done": self._done.bind_to_random_port(where)}

    def join(self, offer: dict[str, Any]) -> None:
        if self.receives:
            return
        self._pieces, self._done = self._socket("PUSH"), self._socket("PULL")
        self._pieces.connect(f"tcp://{self.host}:{offer['pieces']}")
        self._done.connect(f"tcp://{self.host}:{offer['done']}")

    def receive(self, n_bytes: int) -> None:
        for at in self.pieces(n_bytes):
            frame = self._pieces.recv(copy=False)
            np.copyto(self.region[at : at + self.piece_bytes], np.frombuffer(frame.buffer, np.uint8))
        self._done.send(b"k")

    def send(self, n_bytes: int) -> None:
        memory = memoryview(self.region)  # type: ignore[arg-type]
        for at in self.pieces(n_bytes):
            self._pieces.send(memory[at : at + self.piece_bytes], copy=False)
        self._done.recv()


if __name__ == "__main__":
    main(PyZmq)
