"""What a node and a gateway say to each other when the node joins by itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from prfaas_net.nodes.messages import Message
from prfaas_net.nodes.urls import base_url

__all__ = ["JOIN_PATH", "LEAVE_PATH", "JoinAnswer", "JoinCall", "LeaveCall"]

JOIN_PATH, LEAVE_PATH = "/v1/fleet/join", "/v1/fleet/leave"


_Url = Annotated[str, Field(max_length=512), AfterValidator(base_url)]
_Name = Annotated[str, Field(min_length=1, max_length=128)]


class JoinCall(Message):
    """``POST /v1/fleet/join``: once, and then again before the lease ends.

    Attributes:
        url: of the node's control port, as the gateway can reach it.
        boot_id: of the node's process: another one is another node.
    """

    url: _Url
    node_id: _Name
    boot_id: _Name
    role: Literal["prefill", "decode"]
    cluster: _Name


class JoinAnswer(Message):
    """The node belongs to the fleet until the lease ends.

    Attributes:
        lease_s: from now.
        renew_s: after which the node should ask again.
    """

    lease_s: float
    renew_s: float


class LeaveCall(Message):
    """``POST /v1/fleet/leave``."""

    url: _Url
    boot_id: _Name
