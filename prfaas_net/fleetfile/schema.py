"""The fleet file: clusters, the links between them, the nodes, and the gateways' settings.

Every setting stands in it once. A node's table is what the node would be told in a file of its own, over the table
``[node]`` that all nodes share; ``[gateway]`` is what a gateway would be told, but for the nodes and clusters, which it
takes from the rest of the file; a link's table is written into the nodes that send over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr

from prfaas_net.config import Section
from prfaas_net.gateway.config import ClusterSection, NodeSection
from prfaas_net.nodes.config import LinkSection, NodeConfig
from prfaas_net.nodes.urls import base_url

__all__ = ["FleetFile", "FleetLink", "FleetNode", "FleetTable", "pairs_of"]


class FleetLink(LinkSection):
    """``[[links]]``: all that is sent from one cluster to another.

    Attributes:
        source, destination: clusters (``from`` and ``to``).
        budget: of the whole link. Every pair of nodes on it is paced to an equal share.
        tls: the nodes at both ends must have certificates (``kv.tls``).
    """

    source: str = Field(alias="from", min_length=1)
    destination: str = Field(alias="to", min_length=1)
    tls: bool = False

    @property
    def name(self) -> str:
        return f"{self.source} > {self.destination}"


class FleetNode(NodeConfig):
    """``[[nodes]]``: a node of ours.

    Attributes:
        node_id: its name in the file, and in the fleet.
        url: of its control port as gateways can reach it; by default made from ``listen``.
    """

    kind: Literal["prfaas"] = "prfaas"
    node_id: str = Field(min_length=1, max_length=128)
    url: Annotated[str | None, AfterValidator(lambda url: None if url is None else base_url(url))] = None

    @property
    def prefills(self) -> bool:
        """Whether it may ever run prompts for others."""
        return self.role == "prefill" or self.convertible

    @property
    def decodes(self) -> bool:
        """Whether it may ever take KVCache in."""
        return self.role == "decode" or self.convertible


class FleetTable(Section):
    """The file itself, before its parts are put together.

    Attributes:
        model: Hugging Face directory, on every host.
        node_key: shared by nodes and gateways.
        node: what all nodes share.
    """

    model: str | None = None
    node_key: SecretStr | None = Field(None, min_length=16)
    gateway: dict[str, Any]
    node: dict[str, Any] = Field(default_factory=dict)
    clusters: tuple[ClusterSection, ...] = ()
    links: tuple[FleetLink, ...] = ()
    nodes: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class FleetFile:
    """A fleet, as its file describes it.

    Attributes:
        nodes: of ours, by name; each with its links in it.
        engines: vLLM and SGLang servers.
        gateway: what a gateway is told, as a tree to be merged with its environment and flags.
    """

    path: Path
    model: str | None
    clusters: tuple[ClusterSection, ...]
    links: tuple[FleetLink, ...]
    nodes: dict[str, FleetNode]
    engines: tuple[NodeSection, ...]
    gateway: dict[str, Any]
    node_trees: dict[str, dict[str, Any]]

    def pairs(self, link: FleetLink) -> list[tuple[FleetNode, FleetNode]]:
        """Who sends to whom over a link."""
        return pairs_of(link, tuple(self.nodes.values()))


def pairs_of(link: FleetLink, nodes: tuple[FleetNode, ...]) -> list[tuple[FleetNode, FleetNode]]:
    senders = [node for node in nodes if node.cluster == link.source and node.prefills]
    receivers = [node for node in nodes if node.cluster == link.destination and node.decodes]
    return [(sender, receiver) for sender in senders for receiver in receivers if sender is not receiver]
