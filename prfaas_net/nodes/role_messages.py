"""What is said about roles over HTTP: ``POST /v1/role`` and ``POST /v1/lease`` of a node that can change its role.

``POST /v1/role`` (a :class:`RoleCall`) answers with

    {"event": "draining", "role": "prefill", "next_role": "decode", "held": 3}     again whenever that changes
    {"event": "done", "role": "decode", "changed": true, "held": 0, "took_s": 4.2}

The open answer owns the change, as with every call: whoever closes it calls the change off, and the node goes on in the
role that it has. ``changed`` is false where the node had that role already, or did not drain in time (``held`` calls
were left): then too it goes on as it was. No call that it holds is ever ended for a change of role.

``POST /v1/lease`` (a :class:`LeaseCall`) answers with a :class:`LeaseAnswer`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prfaas_net.nodes.messages import Message

__all__ = ["LeaseAnswer", "LeaseCall", "RoleCall"]

# A day: beyond any drain, and bounds what one caller can do to a node.
MAX_DRAIN_S = 86_400.0
# A planner that died keeps others waiting for so long at most.
MAX_LEASE_S = 600.0


class RoleCall(Message):
    """Take this role.

    Attributes:
        deadline_s: from now; what the node holds must have ended by then, or it keeps its role.
        holder: the planner that asks, where planners hold a lease (:class:`LeaseCall`); nobody for a person.
    """

    role: Literal["prefill", "decode"]
    deadline_s: float = Field(gt=0, le=MAX_DRAIN_S)
    holder: str | None = Field(None, min_length=1, max_length=128)


class LeaseCall(Message):
    """Let only this planner change the node's role, for so long.

    Attributes:
        ttl_s: from now; 0 gives the lease back.
    """

    holder: str = Field(min_length=1, max_length=128)
    ttl_s: float = Field(ge=0, le=MAX_LEASE_S)


class LeaseAnswer(Message):
    """Who holds the lease; said as an event, as everything that nodes say to gateways.

    Attributes:
        granted: whether that is who asked (or nobody, where it was given back).
        left_s: for how long, unless it is asked for again.
    """

    event: Literal["done"] = "done"
    granted: bool
    holder: str | None = None
    left_s: float = 0.0
