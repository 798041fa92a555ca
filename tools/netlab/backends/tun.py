"""The link in user space that the benches use: everywhere there is a TUN device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prfaas_net.bench.processes import Child
from tools.netlab.backends.base import End
from tools.netlab.settings import Counters, Way

__all__ = ["TunLink"]

_THERE_AND_BACK = {"ab": "there", "ba": "back"}
_START_LIMIT_S = 20.0


def _values(way: Way) -> dict[str, Any]:
    return {
        "rate_bps": way.rate_bps, "delay_s": way.delay_ms / 1e3, "jitter_s": way.jitter_ms / 1e3, "loss": way.loss,
        "queue_bytes": way.limit_bytes, "mark_bytes": way.mark_bytes,
    }  # fmt: skip


class TunLink:
    """Loses, drops and counts single segments, and needs no more than ``/dev/net/tun``."""

    name = "tun"

    def __init__(self) -> None:
        self._child: Child | None = None

    def start(self, router: str, ends: tuple[End, End]) -> None:
        places = [word for end in ends for word in (end.space, end.address)]
        self._child = Child("prfaas_net.bench.tunlink", *places, "inf", "0", "0", "inf")
        self._child.answer(timeout_s=_START_LIMIT_S)

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        assert self._child is not None
        return self._child.ask(do, timeout_s=_START_LIMIT_S, **request)

    def apply(self, ways: dict[str, Way]) -> None:
        for name, way in ways.items():
            self._ask("set", way=_THERE_AND_BACK[name], **_values(way))

    def counters(self) -> dict[str, Counters]:
        totals = self._ask("counters")
        names = {"packets": "segments", **{name: name for name in asdict(Counters()) if name != "packets"}}
        return {
            way: Counters(**{mine: int(totals[theirs][name]) for mine, name in names.items()})
            for way, theirs in _THERE_AND_BACK.items()
        }

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
