"""Links and listeners: the shells that move what :mod:`prfaas_net.wire` says, over real sockets."""

from prfaas_net.transport.arena import Arena, ArenaBlock
from prfaas_net.transport.link import Identity, Outgoing, SenderLink
from prfaas_net.transport.listener import Incoming, KvListener
from prfaas_net.transport.options import LinkOptions

__all__ = [
    "Arena",
    "ArenaBlock",
    "Identity",
    "Incoming",
    "KvListener",
    "LinkOptions",
    "Outgoing",
    "SenderLink",
]
