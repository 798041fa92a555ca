"""How a gateway proves to a node that it may give it work.

Both hold one secret, the node key. The gateway sends a value derived from it, so the key itself never crosses
the network and is never the same string as the one that guards anything else.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["check_control_token", "control_token"]

# Binds the derived value to its purpose and version.
_CONTEXT = b"prfaas node control v1"
_SCHEME = "Bearer "


def control_token(key: str) -> str:
    """The bearer token for control calls, as hex: HMAC-SHA256 of a fixed context under the node key."""
    return hmac.new(key.encode(), _CONTEXT, hashlib.sha256).hexdigest()


def check_control_token(header: str | None, key: str) -> bool:
    """Whether an ``Authorization`` header carries the token of this key; takes the same time either way."""
    given = header[len(_SCHEME) :] if header is not None and header.startswith(_SCHEME) else ""
    return hmac.compare_digest(given.strip().encode(), control_token(key).encode())
