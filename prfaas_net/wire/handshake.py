"""The handshake of one connection: four frames that settle version, session, purpose and identity.

    dialer                                   acceptor
    HELLO   versions, session, lane, nonce ->
                                           <- WELCOME  version, boot id, nonce, proof
    CONFIRM proof                          ->
                                           <- READY    or ERROR

A session is one control connection (lane 0) and any number of data connections (lanes 1, 2, ...) whose
handshakes name the same session id. With a shared key each side proves that it knows the key, over both nonces
and everything that was said, so neither a replayed nor an altered handshake passes; the key itself never
travels. Without a key the proofs are empty.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import orjson

from prfaas_net.errors import AuthError, IncompatibleError, PrfaasError, ProtocolError, error_from_wire
from prfaas_net.wire.frames import VERSION, Frame, FrameType, encode, encode_json
from prfaas_net.wire.states import ACCEPTOR, DIALER, Hand, HandEvent, Machine

__all__ = ["MAX_LANES", "Acceptor", "Dialer", "Hello", "PeerIdentity"]

# Data connections of one session at a time. Lane numbers are not used again, so they grow beyond it.
MAX_LANES = 64
MAX_LANE_NUMBER = 0xFFFF
_HEX_ID = 32
ROLES = ("sender", "receiver")


@dataclass(frozen=True)
class Hello:
    """What a dialer says of itself.

    Attributes:
        session: 128 random bits as hex, the same for all connections of a session.
        lane: 0 for the control connection, 1 and up for data connections.
        node: a name for people.
        boot_id: new at every start of the process.
        nonce: 128 random bits as hex, new for every connection.
        role: ``"sender"`` if the dialler will send, ``"receiver"`` if it will receive: whichever side can dial dials.
        features: what this side can do beyond the version; the acceptor answers with those that it can do too.
    """

    session: str
    lane: int
    node: str
    boot_id: str
    nonce: str
    features: tuple[str, ...] = ()
    role: str = "sender"

    def to_json(self) -> dict[str, Any]:
        return {
            "versions": [VERSION], "features": list(self.features), "role": self.role, "session": self.session,
            "lane": self.lane, "node": self.node, "boot_id": self.boot_id, "nonce": self.nonce,
        }  # fmt: skip

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Hello:
        """
        Raises:
            ProtocolError: a field is missing or out of bounds.
            IncompatibleError: no common version, or a role that this side does not play.
        """
        versions = body.get("versions")
        if not isinstance(versions, list) or VERSION not in versions:
            raise IncompatibleError(
                "no common version of the KV stream", expected=VERSION, found=versions,
                do="run versions of prfaas-net that share a protocol version",
            )  # fmt: skip
        role = body.get("role")
        if role not in ROLES:
            raise IncompatibleError("a dialer is a sender or a receiver", expected=ROLES, found=repr(role)[:40])
        session, lane, nonce = body.get("session"), body.get("lane"), body.get("nonce")
        if not (_is_id(session) and _is_id(nonce)):
            raise ProtocolError("bad HELLO", expected="session and nonce of 32 hex digits")
        if not isinstance(lane, int) or not 0 <= lane <= MAX_LANE_NUMBER:
            raise ProtocolError("bad HELLO", expected=f"a lane from 0 to {MAX_LANE_NUMBER}", found=repr(lane)[:40])
        node, boot_id = str(body.get("node", ""))[:128], str(body.get("boot_id", ""))[:128]
        return cls(str(session), lane, node, boot_id, str(nonce), _features(body.get("features")), str(role))


@dataclass(frozen=True)
class PeerIdentity:
    """Who answered: the acceptor as the dialer knows it."""

    node: str
    boot_id: str
    features: frozenset[str] = frozenset()


def _features(names: object) -> tuple[str, ...]:
    """Names that a peer gives; those we do not know mean nothing to us."""
    return tuple(str(name)[:64] for name in names[:64]) if isinstance(names, list) else ()


def _is_id(text: object) -> bool:
    return isinstance(text, str) and len(text) == _HEX_ID and all(c in "0123456789abcdef" for c in text)


def _proof(key: bytes | None, side: bytes, *transcript: bytes) -> str:
    if key is None:
        return ""
    digest = hmac.new(key, b"prfaas kv stream 1 " + side, hashlib.sha256)
    for part in transcript:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _check(expected: str, given: object, who: str) -> None:
    if not isinstance(given, str) or not hmac.compare_digest(expected.encode(), given.encode()):
        raise AuthError(
            f"the {who} could not prove that it knows the shared key",
            expected="a proof" if expected else "no proof: this side has no shared key",
            found="a proof of another key" if given else "no proof",
            do="give both sides the same kv.shared_key",
        )


class Dialer:
    """The dialling side's handshake: ``begin()``, then ``receive`` each frame until ``peer`` is set."""

    def __init__(self, hello: Hello, key: bytes | None) -> None:
        self._hello = hello
        self._key = key
        self._machine = Machine("dialer", DIALER, Hand.START)
        self._said = b""
        self._peer: PeerIdentity | None = None

    @property
    def peer(self) -> PeerIdentity | None:
        """The acceptor, once the handshake is complete."""
        return self._peer if self._machine.state is Hand.ESTABLISHED else None

    def begin(self) -> bytes:
        """The first bytes to send."""
        self._machine.advance(HandEvent.BEGIN)
        frame = encode_json(FrameType.HELLO, self._hello.to_json())
        self._said = frame
        return frame

    def receive(self, frame: Frame) -> bytes:
        """Take one frame; return what to send (may be empty).

        Raises:
            PrfaasError: the acceptor refused (its own error), broke the protocol or could not prove itself.
        """
        if frame.type is FrameType.ERROR:
            self._machine.advance(HandEvent.FAIL)
            raise error_from_wire(frame.json())
        if frame.type is FrameType.WELCOME:
            self._machine.advance(HandEvent.WELCOME)
            body = frame.json()
            if body.get("version") != VERSION:
                raise IncompatibleError("the peer chose a version that was not offered", found=body.get("version"))
            nonce = str(body.get("nonce", ""))
            _check(_proof(self._key, b"acceptor", self._said, nonce.encode()), body.get("proof"), "acceptor")
            agreed = frozenset(_features(body.get("features"))) & frozenset(self._hello.features)
            self._peer = PeerIdentity(str(body.get("node", ""))[:128], str(body.get("boot_id", ""))[:128], agreed)
            proof = _proof(self._key, b"dialer", self._said, frame.payload)
            return encode_json(FrameType.CONFIRM, {"proof": proof})
        if frame.type is FrameType.READY:
            self._machine.advance(HandEvent.READY)
            return b""
        raise ProtocolError("unexpected frame in a handshake", found=frame.type.name)


class Acceptor:
    """The accepting side's handshake: ``receive`` each frame until ``hello`` is set."""

    def __init__(
        self,
        *,
        node: str,
        boot_id: str,
        nonce: str,
        key: bytes | None,
        features: tuple[str, ...] = (),
        role: str = "sender",
    ) -> None:
        self._node, self._boot_id, self._nonce, self._key = node, boot_id, nonce, key
        self._features = features
        self._role = role
        self._machine = Machine("acceptor", ACCEPTOR, Hand.AWAIT_HELLO)
        self._expected_proof = ""
        self._hello: Hello | None = None

    @property
    def agreed(self) -> list[str]:
        """Features that both sides have."""
        offered = self._hello.features if self._hello is not None else ()
        return [name for name in offered if name in self._features]

    @property
    def hello(self) -> Hello | None:
        """What the dialer said, once the handshake is complete."""
        return self._hello if self._machine.state is Hand.ESTABLISHED else None

    def receive(self, frame: Frame) -> bytes:
        """Take one frame; return what to send.

        Raises:
            PrfaasError: the dialer cannot be served; send :meth:`refuse` and close.
        """
        if frame.type is FrameType.HELLO:
            self._machine.advance(HandEvent.HELLO)
            self._hello = Hello.from_json(frame.json())
            if self._hello.role != self._role:
                raise IncompatibleError(
                    f"this port is for {self._role}s", expected=self._role, found=self._hello.role,
                    do="dial the other side's port, or let it dial",
                )  # fmt: skip
            said = frame.header.pack() + frame.payload
            welcome = orjson.dumps(
                {
                    "version": VERSION, "features": self.agreed, "node": self._node, "boot_id": self._boot_id,
                    "nonce": self._nonce, "proof": _proof(self._key, b"acceptor", said, self._nonce.encode()),
                }
            )  # fmt: skip
            self._expected_proof = _proof(self._key, b"dialer", said, welcome)
            return encode(FrameType.WELCOME, welcome)
        if frame.type is FrameType.CONFIRM:
            _check(self._expected_proof, frame.json().get("proof"), "dialer")
            self._machine.advance(HandEvent.CONFIRM)
            return encode_json(FrameType.READY, {})
        raise ProtocolError("unexpected frame in a handshake", found=frame.type.name)

    def refuse(self, error: PrfaasError) -> bytes:
        """The last bytes for a dialer that cannot be served."""
        self._machine.advance(HandEvent.FAIL)
        return encode_json(FrameType.ERROR, error.to_wire())
