"""Following what every node tells in an endless answer, and starting anew whenever anything breaks."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from prfaas_net.errors import PrfaasError
from prfaas_net.gateway.calls import NodeClient
from prfaas_net.gateway.fleet import WatchedNode
from prfaas_net.nodes.messages import NodeInfo

__all__ = ["Follower"]

log = logging.getLogger(__name__)

# A node says something at least every two seconds (prfaas_net.nodes.feed).
SILENCE_S = 10.0
RETRY_S = 0.5


class Follower(ABC):
    """One task for each node of a fleet.

    Args:
        nodes: as the fleet watches them.
    """

    path: ClassVar[str]
    max_line_bytes: ClassVar[int]

    def __init__(self, nodes: Sequence[WatchedNode], client: NodeClient) -> None:
        self.nodes = nodes
        self._client = client
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Of nodes that are gone, until they have ended.
        self._ending: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to listen."""
        for node in self.nodes:
            self.follow(node)

    async def stop(self) -> None:
        """Stop listening."""
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    def follow(self, node: WatchedNode) -> None:
        """Listen to a node that has come."""
        self._tasks[node.url] = asyncio.create_task(self._follow(node), name=f"{self.path} {node.url}")

    def unfollow(self, node: WatchedNode) -> None:
        """Listen no more to a node that has gone."""
        task = self._tasks.pop(node.url, None)
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    @abstractmethod
    def wants(self, info: NodeInfo) -> bool:
        """Whether there is anything to hear from this node."""

    @abstractmethod
    def take(self, info: NodeInfo, event: dict[str, Any]) -> str | None:
        """One event. Returns why the node must be listened to anew, if it must."""

    @abstractmethod
    def lost(self, info: NodeInfo) -> None:
        """What was known of this node is not known any more."""

    async def _follow(self, node: WatchedNode) -> None:
        while True:
            info = node.info
            if info is not None and node.up and node.engine is None and self.wants(info):
                try:
                    reason = await self._listen(node, info)
                    log.warning("%s of node %s is asked for again: %s", self.path, info.node_id, reason)
                except PrfaasError as error:
                    log.info("%s of node %s is lost: %s", self.path, info.node_id, error.line())
                except Exception:
                    log.exception("listening to %s of node %s failed", self.path, info.node_id)
                finally:
                    self.lost(info)
            await asyncio.sleep(RETRY_S)

    async def _listen(self, node: WatchedNode, info: NodeInfo) -> str:
        """Until something is out of order."""
        stream = await self._client.watch(
            info.node_id, node.url, self.path, limit_bytes=self.max_line_bytes, silence_s=SILENCE_S
        )
        try:
            while True:
                event = await stream.next()
                if event["event"] != "beat" and (reason := self.take(info, event)) is not None:
                    return reason
        finally:
            stream.close()
