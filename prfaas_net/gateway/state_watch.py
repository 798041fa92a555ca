"""The gateway's ear at every prefill node's queue and links: what it hears, the router is told at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.gateway.follower import Follower
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.scheduling import LinkBook, LinkReport, LinkSeen, QueueSeen, parse_links

__all__ = ["StateWatch"]


class StateWatch(Follower):
    """Follows the state of a fleet's prefill nodes.

    Args:
        observe: told of every change, as an event of the router.
        own_tokens: prompt tokens that this gateway has in a node's queue.
    """

    path = "/v1/state/events"
    max_line_bytes: ClassVar[int] = 1 << 20

    def __init__(
        self,
        nodes: Sequence[WatchedNode],
        client: NodeClient,
        observe: Callable[[LinkSeen | QueueSeen], None],
        own_tokens: Callable[[str], int],
    ) -> None:
        super().__init__(nodes, client)
        self.links: dict[str, list[LinkReport]] = {}
        self._book = LinkBook()
        self._observe = observe
        self._own_tokens = own_tokens
        self._foreign: dict[str, int] = {}

    def wants(self, info: NodeInfo) -> bool:
        return info.role == "prefill" or info.convertible

    def take(self, info: NodeInfo, event: dict[str, Any]) -> str | None:
        queue, links = event.get("queue_tokens"), parse_links(event.get("links"))
        if event["event"] != "state" or type(queue) is not int or queue < 0 or links is None:
            return "not a state"
        self.links[info.node_id] = links
        self._note_role(info.node_id, event)
        self._note_queue(info.node_id, max(0, queue - self._own_tokens(info.node_id)))
        self._note_links(info, links)
        return None

    def lost(self, info: NodeInfo) -> None:
        self.links.pop(info.node_id, None)
        self._note_queue(info.node_id, 0)
        self._note_links(info, [])

    def _note_role(self, node_id: str, event: dict[str, Any]) -> None:
        """A node that has another role than it said, or is about to, is asked at once and not when its turn comes."""
        for node in self.nodes:
            info = node.info
            if info is None or info.node_id != node_id or not info.convertible:
                continue
            if (event.get("role"), event.get("next_role")) != (info.role, info.next_role):
                node.wake.set()

    def _note_queue(self, node_id: str, foreign_tokens: int) -> None:
        if self._foreign.get(node_id, 0) != foreign_tokens:
            self._foreign[node_id] = foreign_tokens
            self._observe(QueueSeen(node_id, foreign_tokens))

    def _note_links(self, info: NodeInfo, links: list[LinkReport]) -> None:
        clusters = {node.info.node_id: node.info.cluster for node in self.nodes if node.info is not None}
        between = [(clusters[link["peer"]], link) for link in links if link["peer"] in clusters]
        across = [(cluster, link) for cluster, link in between if cluster != info.cluster]
        for seen in self._book.note(info.node_id, info.cluster, across):
            self._observe(seen)
