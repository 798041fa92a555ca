"""How the two ends of a link prove who they are."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property

from prfaas_net.transport.tls import TlsFiles, client_context, server_context

__all__ = ["Security"]


@dataclass(frozen=True)
class Security:
    """A shared key, certificates, both, or (on loopback only) neither.

    Attributes:
        key: proven in the handshake, never sent.
        tls: certificate files; with them every connection runs inside TLS 1.3.
    """

    key: bytes | None = None
    tls: TlsFiles | None = None

    @property
    def authenticates(self) -> bool:
        """Whether a stranger is kept out."""
        return self.key is not None or self.tls is not None

    @cached_property
    def server(self) -> ssl.SSLContext | None:
        return None if self.tls is None else server_context(self.tls)

    @cached_property
    def client(self) -> ssl.SSLContext | None:
        return None if self.tls is None else client_context(self.tls)
