"""torch.distributed on gloo: isend and irecv of uint8 tensors, four in flight."""

from __future__ import annotations

import datetime
import importlib
import os
import socket
from typing import Any

from prfaas_net.bench.peers.harness import Peer, main

__all__ = ["Gloo"]

IN_FLIGHT = 4
LIMIT = datetime.timedelta(seconds=60)


class Gloo(Peer):
    """Both ends are ranks of one group."""

    def offer(self) -> dict[str, Any]:
        with socket.create_server((self.host, 0)) as server:
            return {"port": server.getsockname()[1]}

    def join(self, offer: dict[str, Any]) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("PRFAAS_BENCH_DEVICE", "lo"))
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        self._group: Any = importlib.import_module("torch.distributed")
        self._group.init_process_group(
            "gloo", init_method=f"tcp://{self.host}:{offer['port']}", rank=0 if self.receives else 1, world_size=2,
            timeout=LIMIT,
        )  # fmt: skip
        self._tensor = torch.from_numpy(self.region)
        self._token = torch.zeros(1, dtype=torch.uint8)
        # The first exchange connects the ranks.
        if self.receives:
            self._group.recv(self._token, 1)
        else:
            self._group.send(self._token, 0)

    def _move(self, n_bytes: int) -> None:
        under_way: list[Any] = []
        for at in self.pieces(n_bytes):
            piece = self._tensor[at : at + self.piece_bytes]
            work = self._group.irecv(piece, 1) if self.receives else self._group.isend(piece, 0)
            under_way.append(work)
            if len(under_way) >= IN_FLIGHT:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()

    def receive(self, n_bytes: int) -> None:
        self._move(n_bytes)
        self._group.send(self._token, 1)

    def send(self, n_bytes: int) -> None:
        self._move(n_bytes)
        self._group.recv(self._token, 0)


if __name__ == "__main__":
    main(Gloo)
