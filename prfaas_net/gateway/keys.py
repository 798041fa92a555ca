"""API keys: random, hashed in the configuration, checked in a time that tells nothing of them.

A key is made by ``prfaas key new``, never chosen by a person: 256 random bits cannot be guessed however fast a guess is
checked, so a salted HMAC-SHA256 guards its hash as well as a slow password hash would, and a stranger with wrong keys
costs microseconds. The salt keeps equal keys of two files from looking equal. (NIST SP 800-63B, 5.1.2.2: look-up
secrets of at least 112 bits may be hashed without a work factor.)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from prfaas_net.errors import ConfigError

__all__ = ["Key", "KeyHash", "KeyRing", "new_key"]

_KEY_PREFIX = "pfs-"
_KEY_BYTES, _SALT_BYTES = 32, 16
# Verdicts remembered: each key that is in use, several times over.
_REMEMBERED = 4096


@dataclass(frozen=True)
class KeyHash:
    """What is kept of a key: ``hmac-sha256:SALT:DIGEST``, both in hex."""

    SCHEME: ClassVar[str] = "hmac-sha256"

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, key: str, salt: bytes | None = None) -> KeyHash:
        """The hash of a key, with a fresh salt unless one is given."""
        salt = secrets.token_bytes(_SALT_BYTES) if salt is None else salt
        return cls(salt, hmac.digest(salt, key.encode(), "sha256"))

    @classmethod
    def parse(cls, text: str) -> KeyHash:
        """The inverse of ``str()``.

        Raises:
            ConfigError: it is not a hash. What was found is not shown: it may be a key that was put there by mistake.
        """
        scheme, _, rest = text.strip().partition(":")
        salt, _, digest = rest.partition(":")
        try:
            parsed = cls(bytes.fromhex(salt), bytes.fromhex(digest))
        except ValueError:
            parsed = cls(b"", b"")
        if scheme != cls.SCHEME or len(parsed.salt) < _SALT_BYTES or len(parsed.digest) != hashlib.sha256().digest_size:
            raise ConfigError(
                "not the hash of a key",
                expected=f"{cls.SCHEME}:SALT:DIGEST",
                do="make a key and its hash: prfaas key new",
            )
        return parsed

    def matches(self, key: bytes) -> bool:
        """Whether it is this key's; takes the same time either way."""
        return hmac.compare_digest(self.digest, hmac.digest(self.salt, key, "sha256"))

    def __str__(self) -> str:
        return f"{self.SCHEME}:{self.salt.hex()}:{self.digest.hex()}"


@dataclass(frozen=True)
class Key:
    """Whoever holds a key, by the name that logs and records show.

    Attributes:
        max_concurrent_requests: of all who hold it together; None: as many as the gateway takes.
        admin: whether it may change the gateway.
    """

    name: str
    hash: KeyHash
    max_concurrent_requests: int | None = None
    admin: bool = False


class KeyRing:
    """The keys that a gateway knows."""

    def __init__(self, keys: Sequence[Key] = ()) -> None:
        self.keys = tuple(keys)
        # Good keys by a digest under a secret of this process, so that the table itself is worth nothing and the time
        # of a look-up says nothing of a key. Bad ones are not remembered: they would only push the good ones out.
        self._pepper = secrets.token_bytes(_SALT_BYTES)
        self._known: OrderedDict[bytes, Key] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, presented: str) -> Key | None:
        """Whose key this is; None if it is nobody's."""
        key = presented.encode(errors="replace")
        at = hmac.digest(self._pepper, key, "sha256")
        known = self._known.get(at)
        if known is not None:
            return known
        # Every key is compared, so that the time taken tells nothing of which one came close.
        matching = [candidate for candidate in self.keys if candidate.hash.matches(key)]
        if not matching:
            return None
        self._known[at] = matching[0]
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return matching[0]


def new_key() -> str:
    """A key of 256 random bits."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
