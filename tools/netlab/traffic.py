"""Flows over a link, led from here: what competes for it, and what the laboratory itself looks at."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tools.netlab.flows import Load

if TYPE_CHECKING:
    from tools.netlab.link import Link

__all__ = ["Traffic"]

FLOWS = "tools.netlab.flows"
_ANSWER_LIMIT_S = 20.0


class Traffic:
    """A number of alike flows along one way of a link; stopped when the context ends.

    Args:
        way: ``"ab"`` or ``"ba"``.
        read_bps, rcvbuf_bytes: of the receiving side, for each flow.
        seed: of the lengths of bursts.
    """

    def __init__(
        self,
        link: Link,
        way: str,
        load: Load,
        *,
        flows: int = 1,
        read_bps: float | None = None,
        rcvbuf_bytes: int | None = None,
        seed: int = 1,
    ) -> None:
        self._sink = link.child(way[1], FLOWS)
        self._source = link.child(way[0], FLOWS)
        self._numbers = itertools.count()
        self._seed = seed
        self._running: list[str] = []
        host = link.end(way[1]).address
        self._endpoint = self._ask_sink("listen", name="sink", host=host, read_bps=read_bps, rcvbuf_bytes=rcvbuf_bytes)[
            "endpoint"
        ]
        for _ in range(flows):
            self.add(load)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _ask_sink(self, do: str, **request: Any) -> dict[str, Any]:
        return self._sink.ask(do, timeout_s=_ANSWER_LIMIT_S, **request)

    def _ask_source(self, do: str, **request: Any) -> dict[str, Any]:
        return self._source.ask(do, timeout_s=_ANSWER_LIMIT_S, **request)

    def add(self, load: Load) -> None:
        """One more flow."""
        number = next(self._numbers)
        name = str(number)
        self._ask_source("start", name=name, endpoint=self._endpoint, load=asdict(load), seed=self._seed + number)
        self._running.append(name)

    def look(self) -> dict[str, dict[str, Any]]:
        """What the sender's kernel says of each flow: ``at_s`` and the fields of ``TcpInfo``."""
        flows: dict[str, dict[str, Any]] = self._ask_source("look")["flows"]
        return flows

    def received(self) -> tuple[float, int]:
        """(when, bytes that all flows have brought to the receiving application)."""
        looked = self._ask_sink("look")
        return looked["at_s"], looked["received_bytes"]["sink"]

    def stop(self) -> list[dict[str, Any]]:
        """End every flow; what the kernel said last of each."""
        said = [self._ask_source("stop", name=name) for name in self._running]
        self._running.clear()
        return said

    def close(self) -> None:
        """End both processes."""
        self._source.close()
        self._sink.close()
