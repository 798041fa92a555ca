"""TLS 1.3 with certificates on both sides: what it lets in, what it keeps out, and what an eavesdropper sees."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prfaas_net.errors import AuthError, ConfigError, LinkError, PrfaasError, ProtocolError
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import Identity, KvListener, LinkOptions, Security, SenderLink, TlsFiles
from tests.faults.ends import start_transfer
from tests.faults.proxy import fault_proxy
from tests.transport.certificates import Authority
from tests.transport.conftest import TIMERS, Connect
from tests.waiting import until

TABLE = ChunkTable.split(5_000_000, 300_000)
KEY = b"a key that both know"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def node(authority: Authority) -> TlsFiles:
    """A certificate that both ends use."""
    return authority.issue("node")


@pytest.fixture
def security(node: TlsFiles) -> Security:
    """Of both sides."""
    return Security(tls=node)


@pytest.fixture
async def attempt(listener: KvListener) -> Attempt:
    return Attempt(listener)


class Attempt:
    """A dial that must be refused."""

    def __init__(self, listener: KvListener) -> None:
        self.listener = listener

    async def refused(self, security: Security) -> tuple[PrfaasError, PrfaasError]:
        """What the dialler is told, and what the listener says of it."""
        before = self.listener.refused_connections
        async with asyncio.timeout(3):
            with pytest.raises(PrfaasError) as caught:
                await SenderLink.connect(
                    [self.listener.address],
                    identity=Identity("p0"),
                    security=security,
                    options=LinkOptions(connections=1, connect_timeout_s=2.0),
                )
        await until(lambda: self.listener.refused_connections > before)
        assert self.listener.last_refusal is not None
        assert self.listener.connections == 0
        return caught.value, self.listener.last_refusal


# -- what works ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 3])
async def test_a_transfer_lands_inside_tls(listener: KvListener, connect: Connect, connections: int) -> None:
    """Mutual authentication, every connection encrypted: delivered and identical."""
    link = await connect(connections)
    ends = start_transfer(listener, link, TABLE)
    ends.seal()
    await ends.delivered(within_s=10)


async def test_many_transfers_share_an_encrypted_link(listener: KvListener, connect: Connect) -> None:
    """Chunks of many transfers interleave on each TLS connection."""
    link = await connect(2)
    many = [start_transfer(listener, link, ChunkTable.split(50_000, 7_000), seed=seed) for seed in range(20)]
    for ends in many:
        ends.seal()
    for ends in many:
        await ends.delivered(within_s=10)


@pytest.mark.parametrize("window_s", [3.0], ids=["resuming"])
async def test_a_transfer_resumes_inside_tls(listener: KvListener, connect: Connect, window_s: float) -> None:
    """Every connection reset in the middle: new handshakes, the same ticket, only the rest is sent."""
    async with fault_proxy(listener.address) as proxy:
        proxy.rate_bytes_per_s = 8_000_000
        link = await connect(2, address=proxy.address)
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await until(lambda: ends.landed > 3)
        proxy.reset()
        await ends.delivered(within_s=6)


async def test_one_byte_at_a_time_is_the_same_tls_stream(listener: KvListener, connect: Connect) -> None:
    """Records cut anywhere, in handshakes, on control and on data connections."""
    async with fault_proxy(listener.address) as proxy:
        proxy.piece_bytes = 1
        link = await connect(1, address=proxy.address)
        ends = start_transfer(listener, link, ChunkTable.split(10_000, 1_000))
        ends.seal()
        await ends.delivered(within_s=10)


async def test_the_wire_shows_nothing_of_the_payload(listener: KvListener, connect: Connect) -> None:
    """An eavesdropper sees neither the bytes nor the frames; without TLS it would see both."""
    source = bytes(range(256)) * 4
    async with fault_proxy(listener.address) as proxy:
        proxy.record_bytes = 10_000_000
        link = await connect(1, address=proxy.address)
        ends = start_transfer(listener, link, ChunkTable.split(100_000, 50_000))
        ends.source[:1024] = np.frombuffer(source, dtype=np.uint8)
        ends.seal()
        await ends.delivered(within_s=5)
        seen = b"".join(bytes(wire.seen) for wire in proxy.wires)
    assert len(seen) > 100_000
    for plain in (source, b"PFKV", ends.incoming.ticket.transfer_id.encode(), bytes(ends.source[2000:2064])):
        assert plain not in seen


@pytest.mark.parametrize("security", [Security()])
async def test_without_tls_the_wire_shows_everything(
    listener: KvListener, connect: Connect, security: Security
) -> None:
    """That the eavesdropper of the last test is not simply blind."""
    async with fault_proxy(listener.address) as proxy:
        proxy.record_bytes = 10_000_000
        link = await connect(1, address=proxy.address)
        ends = start_transfer(listener, link, ChunkTable.split(100_000, 50_000))
        ends.seal()
        await ends.delivered(within_s=5)
        seen = b"".join(bytes(wire.seen) for wire in proxy.wires)
    assert ends.source.tobytes()[50_000:] in seen
    assert ends.incoming.ticket.transfer_id.encode() in seen


async def test_a_byte_changed_on_the_way_is_never_delivered(listener: KvListener, connect: Connect) -> None:
    """TLS notices what a checksum that an attacker can recompute would not; the connection is replaced."""
    async with fault_proxy(listener.address) as proxy:
        link = await connect(1, address=proxy.address)
        (wire,) = proxy.data_wires()
        wire.flip_at = wire.upstream_bytes + 100_000
        ends = start_transfer(listener, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=6)
        assert proxy.accepted == 3
    assert ends.incoming.transfer.corrupt_chunks == 0


# -- what does not ------------------------------------------------------------------------------------------------


async def test_a_certificate_of_another_authority_is_refused(attempt: Attempt, node: TlsFiles, tmp_path: Path) -> None:
    """A stranger's certificate, however sound in itself: AuthError or LinkError, naming kv.tls, on both sides."""
    stranger = replace(Authority(tmp_path, "stranger").issue("stranger"), ca=node.ca)
    told, said = await attempt.refused(Security(tls=stranger))
    assert "kv.tls" in told.line()
    assert "kv.tls" in said.line()
    assert isinstance(said, AuthError)


async def test_a_listener_of_another_authority_is_refused(attempt: Attempt, tmp_path: Path) -> None:
    """The dialler checks the listener in the same way, before it says anything of itself."""
    told, said = await attempt.refused(Security(tls=Authority(tmp_path, "stranger").issue("stranger")))
    assert isinstance(told, AuthError)
    assert "kv.tls" in told.line()
    assert "kv.tls" in said.line()


async def test_an_expired_certificate_is_refused(attempt: Attempt, authority: Authority) -> None:
    """The listener says that it has expired; the dialler that its certificate was not accepted."""
    told, said = await attempt.refused(Security(tls=authority.issue("old", expired=True)))
    assert isinstance(said, AuthError)
    assert "expired" in said.line()
    assert "kv.tls" in told.line()


async def test_a_listener_with_another_name_is_refused(attempt: Attempt, node: TlsFiles) -> None:
    """A certificate of our own authority, but of another host: AuthError at the dialler."""
    told, said = await attempt.refused(Security(tls=replace(node, server_name="decode.example")))
    assert isinstance(told, AuthError)
    assert "decode.example" in told.line()
    assert "kv.tls" in told.line()
    assert isinstance(said, PrfaasError)


async def test_a_name_that_was_configured_is_what_counts(authority: Authority) -> None:
    """Behind NAT the dialled address is not the certificate's name: server_name says which one is."""
    tls = authority.issue("nat", made_out_to="decode.example", server_name="decode.example")
    server = KvListener(identity=Identity("d0"), security=Security(tls=tls), timers=TIMERS)
    await server.start("127.0.0.1", 0)
    try:
        link = await SenderLink.connect(
            [server.address],
            identity=Identity("p0"),
            security=Security(tls=tls),
            options=LinkOptions(connections=1),
        )
        await link.close()
    finally:
        await server.close()


async def test_a_client_without_a_certificate_is_refused(attempt: Attempt, node: TlsFiles) -> None:
    """TLS alone is not enough: whoever shows no certificate is told so, and gets no further than the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(node.ca)
    security = Security(tls=node)
    security.__dict__["client"] = context
    told, said = await attempt.refused(security)
    assert "kv.tls" in told.line()
    assert "kv.tls" in said.line()


async def test_tls_below_1_3_is_refused(listener: KvListener, node: TlsFiles) -> None:
    """No downgrade: a client that speaks only 1.2 gets a protocol version alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_cert_chain(node.certificate, node.key)
    context.load_verify_locations(node.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection(*listener.address, ssl=context)
    await until(lambda: listener.refused_connections)


async def test_a_plain_dialler_to_a_tls_port_is_told(attempt: Attempt) -> None:
    """Not "this is not a KV stream", but what to set."""
    told, said = await attempt.refused(Security(key=KEY))
    assert isinstance(told, ProtocolError)
    assert "kv.tls" in told.line()
    assert "kv.tls" in said.line()


async def test_a_tls_dialler_to_a_plain_port_is_told(node: TlsFiles) -> None:
    """The other way round, the same clarity."""
    server = KvListener(identity=Identity("d0"), security=Security(key=KEY), timers=TIMERS)
    await server.start("127.0.0.1", 0)
    try:
        told, said = await Attempt(server).refused(Security(tls=node))
    finally:
        await server.close()
    assert isinstance(told, LinkError)
    assert isinstance(said, ProtocolError)
    assert "kv.tls" in told.line()
    assert "kv.tls" in said.line()


async def test_a_dialler_that_stops_in_the_tls_handshake_is_let_go(node: TlsFiles) -> None:
    """Half a ClientHello, then silence: closed after connect_timeout_s, and counted."""
    server = KvListener(
        identity=Identity("d0"), security=Security(tls=node), options=LinkOptions(connect_timeout_s=0.3), timers=TIMERS
    )
    await server.start("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00")
        async with asyncio.timeout(2):
            assert await reader.read() == b""
        writer.close()
        assert server.refused_connections == 1
        assert isinstance(server.last_refusal, LinkError)
    finally:
        await server.close()


@pytest.mark.parametrize("key", [KEY, None])
async def test_certificates_and_a_shared_key_hold_together(node: TlsFiles, key: bytes | None) -> None:
    """Both are asked for: with the right certificate and without the key nobody gets in."""
    server = KvListener(identity=Identity("d0"), security=Security(key=KEY, tls=node), timers=TIMERS)
    await server.start("127.0.0.1", 0)
    options = LinkOptions(connections=2)
    try:
        security = Security(key=key, tls=node)
        if key is None:
            with pytest.raises(AuthError, match=r"kv\.shared_key"):
                await SenderLink.connect(
                    [server.address], identity=Identity("p0"), security=security, options=options, timers=TIMERS
                )
            await until(lambda: server.refused_connections)
            return
        link = await SenderLink.connect(
            [server.address], identity=Identity("p0"), security=security, options=options, timers=TIMERS
        )
        ends = start_transfer(server, link, TABLE)
        ends.seal()
        await ends.delivered(within_s=10)
        await link.close()
    finally:
        await server.close()


async def test_tls_files_that_cannot_be_used_are_named(node: TlsFiles, tmp_path: Path) -> None:
    """At start, with the setting's name; never a traceback at the first connection."""
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    for files in (replace(node, ca=nonsense), replace(node, certificate=nonsense), replace(node, key=nonsense)):
        server = KvListener(identity=Identity("d0"), security=Security(tls=files))
        with pytest.raises(ConfigError, match=r"kv\.tls"):
            await server.start("127.0.0.1", 0)


async def test_tls_opens_other_addresses_than_loopback(node: TlsFiles) -> None:
    """Certificates are authentication: a listener may be reached from outside with them."""
    server = KvListener(identity=Identity("d0"), security=Security(tls=node))
    await server.start("0.0.0.0", 0)
    await server.close()


async def test_a_refused_dialler_leaves_no_socket(listener: KvListener, attempt: Attempt, tmp_path: Path) -> None:
    """Twenty refusals in a row: as many descriptors as before."""
    stranger = Security(tls=Authority(tmp_path, "stranger").issue("stranger"))

    def open_sockets() -> int:
        count = 0
        for entry in Path("/proc/self/fd").iterdir():
            try:
                count += str(entry.readlink()).startswith("socket:")
            except OSError:
                pass
        return count

    before = open_sockets()
    for _ in range(20):
        await attempt.refused(stranger)
    await until(lambda: open_sockets() <= before + 1)
