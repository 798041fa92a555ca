"""Links and listeners: the shells that move what :mod:`prfaas_net.wire` says, over real sockets."""

from prfaas_net.transport.arena import Arena, ArenaBlock
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.link import Outgoing, SenderLink
from prfaas_net.transport.listener import Incoming, KvListener
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.pool import LinkPool
from prfaas_net.transport.security import Security
from prfaas_net.transport.tls import TlsFiles

__all__ = [
    "Arena",
    "ArenaBlock",
    "Identity",
    "Incoming",
    "KvListener",
    "LinkOptions",
    "LinkPool",
    "Outgoing",
    "Security",
    "SenderLink",
    "TlsFiles",
]
