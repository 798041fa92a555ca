"""What a prefill node is doing, told the moment it changes: prompt tokens in its queue, and what its links are worth.

    {"event": "state", "queue_tokens": 4096,
     "links": [{"peer": "pd-decode-0", "state": "clear", "available_bps": 9.1e9, "budget_bps": 1e10,
                "rtt_s": 0.04, "queueing_delay_s": 0.001, "goodput_bps": 8.8e9, "retransmitted_share": 0.0, ...}]}

A link's entry is its :class:`~prfaas_net.congestion.verdict.Verdict`. A node that can change its role says besides
which one it has (``"role"``) and which one it is about to take (``"next_role"``, or null). One line is the whole state:
a listener that missed any is right again with the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prfaas_net.nodes.feed import Listener

__all__ = ["STATE_BEAT_S", "NodeState"]

# How often the state is told though nothing happened: rates move without any verdict changing.
STATE_BEAT_S = 0.25


class NodeState:
    """A source for a :class:`~prfaas_net.nodes.feed.Feed`. On the event loop.

    Args:
        links: the entries of the links that are up.

    Attributes:
        also: more to say.
    """

    def __init__(self, links: Callable[[], list[dict[str, Any]]]) -> None:
        self.queue_tokens = 0
        self.also: Callable[[], dict[str, Any]] = dict
        self._links = links
        self._listeners: list[Listener] = []

    def describe(self) -> dict[str, Any]:
        """The whole state, as an event."""
        return {"event": "state", "queue_tokens": self.queue_tokens, "links": self._links(), **self.also()}

    @contextmanager
    def queued(self, n_tokens: int) -> Iterator[None]:
        """So many prompt tokens wait, or are being run, in this block."""
        self._move(n_tokens)
        try:
            yield
        finally:
            self._move(-n_tokens)

    def changed(self) -> None:
        """Tell it now."""
        if self._listeners:
            event = self.describe()
            for listener in self._listeners:
                listener(event)

    def listen(self, listener: Listener) -> dict[str, Any]:
        self._listeners.append(listener)
        return self.describe()

    def unlisten(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def _move(self, n_tokens: int) -> None:
        self.queue_tokens += n_tokens
        self.changed()
