"""TLS 1.3 with certificates on both sides."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from prfaas_net.errors import ConfigError

__all__ = ["TlsFiles", "client_context", "server_context"]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one process.

    Attributes:
        certificate: its own chain; ``key`` the private key to it.
        ca: the authority that signed the peers' certificates. Nobody else is let in.
        server_name: what a dialled peer's certificate must be made out to, if not the host that was dialled.
    """

    certificate: Path
    key: Path
    ca: Path
    server_name: str | None = None


def _context(files: TlsFiles, purpose: int) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    what = "certificate and key"
    try:
        context.load_cert_chain(files.certificate, files.key)
        what = "authority"
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"kv.tls: cannot use the {what}", found=str(error), do="check the PEM files and who may read them"
        ) from error
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a listener: every dialler must show a certificate.

    Raises:
        ConfigError: a file cannot be used.
    """
    context = _context(files, ssl.PROTOCOL_TLS_SERVER)
    # Session tickets would be written into data connections that nobody reads on the other side.
    context.num_tickets = 0
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a dialler.

    Raises:
        ConfigError: a file cannot be used.
    """
    return _context(files, ssl.PROTOCOL_TLS_CLIENT)
