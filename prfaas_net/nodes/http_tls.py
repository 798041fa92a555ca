"""Certificates of a daemon's HTTP."""

from __future__ import annotations

import ssl
from pathlib import Path

from prfaas_net.config import Section
from prfaas_net.errors import ConfigError

__all__ = ["ClientTlsSection", "HttpTlsSection"]


def _load(what: str, load: object, *files: Path) -> None:
    assert callable(load)
    try:
        load(*files)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls: cannot use the {what} in {', '.join(map(str, files))}",
            found=str(error),
            do="check the PEM files and who may read them",
        ) from error


class HttpTlsSection(Section):
    """PEM files with which HTTP is served.

    Attributes:
        certificate: the chain; ``key`` the private key to it.
        client_ca: if given, only clients with a certificate of this authority are let in.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """For a listener.

        Raises:
            ConfigError: a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.read_into(context)
        if self.client_ca is not None:
            _load("clients' authority", context.load_verify_locations, self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def read_into(self, context: ssl.SSLContext) -> None:
        """Read certificate and key, perhaps anew: connections from then on are shown them.

        Raises:
            ConfigError: a file cannot be used; the context stays as it was.
        """
        # A pair that does not fit would leave half of it in the context.
        probe = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for into in (probe, context):
            _load("certificate and key", into.load_cert_chain, self.certificate, self.key)


class ClientTlsSection(Section):
    """PEM files with which another daemon is called. Its certificate and its name are always verified.

    Attributes:
        ca: the authority that signed its certificate; None: those that this host trusts.
        certificate, key: to be shown, if it asks for one.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext | bool:
        """For aiohttp's ``ssl``; True is its own, which verifies by what this host trusts.

        Raises:
            ConfigError: a file cannot be used.
        """
        if self.ca is None and self.certificate is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is None:
            context.load_default_certs()
        else:
            _load("authority", context.load_verify_locations, self.ca)
        if self.certificate is not None:
            _load("certificate and key", context.load_cert_chain, *filter(None, (self.certificate, self.key)))
        return context
