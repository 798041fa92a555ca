"""Addresses of daemons, as URLs."""

from __future__ import annotations

from urllib.parse import urlsplit

__all__ = ["base_url"]


def base_url(url: str) -> str:
    """The address of a daemon's HTTP, without a slash at its end.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError("not the address of a daemon, expected a URL such as http://127.0.0.1:9001")
    return url.rstrip("/")
