"""TCP flows on a link: what competes there, and what is looked at.

Run on each side of a link as ``python -m tools.netlab.flows``; JSON lines in, JSON lines out. ``listen`` makes a sink;
``start`` and ``stop`` a flow towards one; ``look`` tells what the kernel says of every flow, and what the sinks got.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from prfaas_net.bench import congestion_flows
from prfaas_net.errors import ConfigError
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.stats import read_tcp_info
from prfaas_net.units import KiB

__all__ = ["Flow", "Load", "Sink"]

_BLOCK = bytes(256 * KiB)
# Pieces of a flow that its application limits, and of a reader that is slow.
_PIECE_BYTES = 16 * KiB
_JOIN_LIMIT_S = 5.0
# A ramp begins with so much of the rate, and is paced anew so often.
_RAMP_FROM, _RAMP_EVERY_S = 0.02, 0.02


@dataclass(frozen=True)
class Load:
    """How a flow sends.

    Attributes:
        cc: congestion control; None is the host's default.
        rate_bps: the kernel paces it to so much (SO_MAX_PACING_RATE); None: as fast as congestion control allows.
        write_bps: its application offers so much, in small pieces; None: it always has something to send.
        on_s, off_s: bursts and pauses, each drawn evenly between half and one and a half of it; 0: no pauses.
        ramp_s: the rate grows from 2 % to all of it over so long.
        sndbuf_bytes: a fixed send buffer.
    """

    cc: str | None = None
    rate_bps: float | None = None
    write_bps: float | None = None
    on_s: float = 0.0
    off_s: float = 0.0
    ramp_s: float = 0.0
    sndbuf_bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.on_s > 0) != (self.off_s > 0):
            raise ConfigError("bursts need on_s and off_s", found=f"on_s {self.on_s}, off_s {self.off_s}")
        if self.ramp_s and self.rate_bps is None:
            raise ConfigError("a ramp needs the rate it leads to", expected="rate_bps beside ramp_s")


class Flow(congestion_flows.Flow):
    """One connection, and the thread that sends on it, as its load says."""

    def __init__(self, endpoint: tuple[str, int], load: Load, seed: int) -> None:
        self._load = load
        self._random = random.Random(seed)
        self._stop = threading.Event()
        begins_bps = None if load.rate_bps is None else int(load.rate_bps * (_RAMP_FROM if load.ramp_s else 1.0))
        super().__init__(
            endpoint,
            LinkOptions(
                connections=1, congestion_control=load.cc, sndbuf_bytes=load.sndbuf_bytes, budget_bps=begins_bps
            ),
        )
        self._ramping = threading.Thread(target=self._ramp, daemon=True)
        if load.ramp_s:
            self._ramping.start()

    def _ramp(self) -> None:
        rate_bps, began_s = self._load.rate_bps or 0.0, time.monotonic()
        share = 0.0
        while share < 1.0 and not self._stop.wait(_RAMP_EVERY_S):
            share = min(1.0, (time.monotonic() - began_s) / self._load.ramp_s)
            self.pace(rate_bps * max(_RAMP_FROM, share))

    def _send(self) -> None:
        try:
            while not self._stop.is_set():
                self._burst(self._drawn(self._load.on_s) or None)
                self._stop.wait(self._drawn(self._load.off_s))
        except OSError:
            pass  # stopped

    def _drawn(self, mean_s: float) -> float:
        return mean_s * self._random.uniform(0.5, 1.5)

    def _burst(self, lasts_s: float | None) -> None:
        due_s = time.monotonic()
        ends_s = None if lasts_s is None else due_s + lasts_s
        while not self._stop.is_set() and (ends_s is None or time.monotonic() < ends_s):
            if self._load.write_bps is None:
                self.sock.sendall(_BLOCK)
                continue
            self.sock.sendall(_BLOCK[:_PIECE_BYTES])
            due_s += _PIECE_BYTES * 8 / self._load.write_bps
            self._stop.wait(max(0.0, due_s - time.monotonic()))

    def look(self) -> dict[str, Any]:
        """What the kernel says: fields of ``TcpInfo``, and when."""
        info = read_tcp_info(self.sock)
        return {"at_s": time.monotonic()} | ({} if info is None else info._asdict())

    def stop(self) -> None:
        """End it, and throw away what is not sent yet."""
        self._stop.set()
        if self._ramping.is_alive():
            self._ramping.join(_JOIN_LIMIT_S)
        super().stop()


class Sink:
    """Takes connections and throws away what they bring.

    Args:
        read_bps: of each connection, for a slow reader; None: at once.
        rcvbuf_bytes: a fixed receive buffer.
    """

    def __init__(self, host: str, *, read_bps: float | None = None, rcvbuf_bytes: int | None = None) -> None:
        self._read_bps = read_bps
        self.received_bytes = 0
        self._server = socket.create_server((host, 0), backlog=64)
        if rcvbuf_bytes is not None:
            # Connections inherit it; later would be too late for the window scale.
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf_bytes)
        self.endpoint: tuple[str, int] = self._server.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._server.accept()
            threading.Thread(target=self._drain, args=(sock,), daemon=True).start()

    def _drain(self, sock: socket.socket) -> None:
        buffer = bytearray(_PIECE_BYTES if self._read_bps else 512 * KiB)
        due_s = time.monotonic()
        with sock:
            try:
                while n := sock.recv_into(buffer):
                    self.received_bytes += n
                    if self._read_bps:
                        due_s = max(due_s, time.monotonic() - 1.0) + n * 8 / self._read_bps
                        time.sleep(max(0.0, due_s - time.monotonic()))
            except OSError:
                pass  # the sender has thrown away what it had


class _End:
    """Sinks and flows of one side, by the names that whoever leads gives them."""

    def __init__(self) -> None:
        self._sinks: dict[str, Sink] = {}
        self._flows: dict[str, Flow] = {}

    def listen(self, name: str, host: str, **options: Any) -> dict[str, Any]:
        sink = self._sinks[name] = Sink(host, **options)
        return {"endpoint": sink.endpoint}

    def start(self, name: str, endpoint: tuple[str, int], load: dict[str, Any], seed: int = 1) -> dict[str, Any]:
        self._flows[name] = Flow((endpoint[0], endpoint[1]), Load(**load), seed)
        return {}

    def stop(self, name: str) -> dict[str, Any]:
        flow = self._flows.pop(name)
        last = flow.look()
        flow.stop()
        return last

    def look(self) -> dict[str, Any]:
        return {
            "at_s": time.monotonic(),
            "flows": {name: flow.look() for name, flow in self._flows.items()},
            "received_bytes": {name: sink.received_bytes for name, sink in self._sinks.items()},
        }


def _main() -> None:
    end = _End()
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "listen": end.listen, "start": end.start, "stop": end.stop, "look": end.look,
    }  # fmt: skip
    for line in sys.stdin.buffer:
        request = orjson.loads(line)
        try:
            answer = commands[request.pop("do")](**request)
        except (OSError, TypeError, KeyError, ConfigError) as error:
            answer = {"error": str(error)}
        sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)  # threads may sit in system calls for as long as their peers like


if __name__ == "__main__":
    _main()
