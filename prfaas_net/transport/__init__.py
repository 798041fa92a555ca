"""Links and listeners: the shells that move what :mod:`prfaas_net.wire` says, over real sockets."""

from prfaas_net.transport.arena import Arena, ArenaBlock
from prfaas_net.transport.buffers import put, reserve_buffer
from prfaas_net.transport.gate import SenderGate
from prfaas_net.transport.identity import Identity
from prfaas_net.transport.incoming import Incoming
from prfaas_net.transport.link import SenderLink
from prfaas_net.transport.link_base import LinkBase
from prfaas_net.transport.listener import KvListener
from prfaas_net.transport.memory import MemoryLink, MemoryListener
from prfaas_net.transport.options import LinkOptions
from prfaas_net.transport.outgoing import Outgoing
from prfaas_net.transport.pool import LinkPool
from prfaas_net.transport.security import Security
from prfaas_net.transport.stats import LinkStats, TransferProgress
from prfaas_net.transport.tls import TlsFiles

__all__ = [
    "Arena",
    "ArenaBlock",
    "Identity",
    "Incoming",
    "KvListener",
    "LinkBase",
    "LinkOptions",
    "LinkPool",
    "LinkStats",
    "MemoryLink",
    "MemoryListener",
    "Outgoing",
    "Security",
    "SenderGate",
    "SenderLink",
    "TlsFiles",
    "TransferProgress",
    "put",
    "reserve_buffer",
]
