"""Handshakes: who may join a session, and what the others are told."""

from __future__ import annotations

import pytest

from prfaas_net.errors import AuthError, IncompatibleError, PrfaasError, ProtocolError
from prfaas_net.wire import Acceptor, Dialer, Frame, FrameParser, Hello
from prfaas_net.wire.frames import FrameType, encode_json

HELLO = Hello(session="5" * 32, lane=1, node="p0", boot_id="boot-p", nonce="a" * 32)


def acceptor(key: bytes | None = None, nonce: str = "b" * 32) -> Acceptor:
    return Acceptor(node="d0", boot_id="boot-d", nonce=nonce, key=key)


def one(data: bytes) -> Frame:
    (frame,) = FrameParser().feed(data)
    return frame


def shake(dialer: Dialer, other: Acceptor) -> None:
    """Carry the frames between the two."""
    data = dialer.begin()
    while data:
        answer = other.receive(one(data))
        data = dialer.receive(one(answer))


@pytest.mark.parametrize("key", [None, b"correct horse battery"])
def test_both_sides_know_each_other_afterwards(key: bytes | None) -> None:
    """With the same key, or with none on both sides, the handshake completes."""
    dialer, other = Dialer(HELLO, key), acceptor(key)
    shake(dialer, other)
    assert dialer.peer is not None
    assert (dialer.peer.node, dialer.peer.boot_id) == ("d0", "boot-d")
    assert other.hello == HELLO


@pytest.mark.parametrize(("ours", "theirs"), [(b"a" * 16, b"b" * 16), (None, b"b" * 16), (b"a" * 16, None)])
def test_a_wrong_or_missing_key_is_refused_with_a_hint(ours: bytes | None, theirs: bytes | None) -> None:
    """Neither side completes, and the error says what to set."""
    dialer, other = Dialer(HELLO, ours), acceptor(theirs)
    with pytest.raises(AuthError, match=r"kv\.shared_key"):
        shake(dialer, other)
    assert dialer.peer is None
    assert other.hello is None


def test_a_replayed_handshake_is_refused() -> None:
    """What an eavesdropper recorded proves nothing to a new nonce."""
    key = b"correct horse battery"
    dialer, other = Dialer(HELLO, key), acceptor(key)
    hello = dialer.begin()
    confirm = dialer.receive(one(other.receive(one(hello))))
    victim = acceptor(key, nonce="c" * 32)
    victim.receive(one(hello))
    with pytest.raises(AuthError):
        victim.receive(one(confirm))


def test_an_altered_hello_is_refused() -> None:
    """A man in the middle cannot move a connection to another session or lane."""
    key = b"correct horse battery"
    dialer, other = Dialer(HELLO, key), acceptor(key)
    dialer.begin()
    other_lane = Hello(HELLO.session, 2, HELLO.node, HELLO.boot_id, HELLO.nonce)
    welcome = other.receive(one(Dialer(other_lane, key).begin()))
    with pytest.raises(AuthError):
        dialer.receive(one(welcome))


def test_a_refusal_reaches_the_dialer_as_the_same_error() -> None:
    """ERROR carries type and text."""
    dialer, other = Dialer(HELLO, None), acceptor()
    dialer.begin()
    with pytest.raises(IncompatibleError, match="no common version"):
        dialer.receive(one(other.refuse(IncompatibleError("no common version"))))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"versions": [2, 3]}, IncompatibleError),
        ({"versions": 1}, IncompatibleError),
        ({"role": "receiver"}, IncompatibleError),
        ({"session": "xyz"}, ProtocolError),
        ({"session": 7}, ProtocolError),
        ({"nonce": ""}, ProtocolError),
        ({"lane": 65536}, ProtocolError),
        ({"lane": -1}, ProtocolError),
        ({"lane": "1"}, ProtocolError),
    ],
)
def test_a_bad_hello_is_refused(change: dict[str, object], error: type[PrfaasError]) -> None:
    """Every field is checked before anything is kept."""
    with pytest.raises(error):
        acceptor().receive(one(encode_json(FrameType.HELLO, HELLO.to_json() | change)))


@pytest.mark.parametrize("kind", [FrameType.CONFIRM, FrameType.READY, FrameType.OPEN, FrameType.PING])
def test_anything_but_hello_first_is_refused(kind: FrameType) -> None:
    """The order of the handshake is the order of the table."""
    with pytest.raises(ProtocolError):
        acceptor().receive(one(encode_json(kind, {"proof": ""})))
