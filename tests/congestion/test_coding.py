"""When encoding pays: on thin links with cores to spare, and never otherwise."""

from __future__ import annotations

import pytest

from prfaas_net.congestion.coding import CodingGovernor

MB = 1_000_000


def drive(send_rate: float, encode_rate: float, ratio: float, *, chunks: int = 400, backlog: bool = True) -> float:
    """Share of chunks that are encoded in the second half of a run on a link of fixed rates."""
    governor, encoded = CodingGovernor(), []
    for _ in range(chunks):
        wants = governor.wants(backlog=backlog)
        n_bytes = MB
        if wants:
            governor.encoded(MB, int(MB / ratio), MB / encode_rate)
            n_bytes = int(MB / ratio)
        governor.sent(n_bytes, n_bytes / send_rate)
        encoded.append(wants)
    return sum(encoded[chunks // 2 :]) / (chunks // 2)


@pytest.mark.parametrize(
    ("send_rate", "encode_rate", "ratio", "pays"),
    [
        (12.5 * MB, 500 * MB, 1.45, True),
        (31 * MB, 500 * MB, 1.45, True),
        (1250 * MB, 500 * MB, 1.45, False),
        (5000 * MB, 500 * MB, 1.45, False),
        (12.5 * MB, 500 * MB, 1.0, False),
        (125 * MB, 60 * MB, 1.45, False),
    ],
    ids=["100 Mbps", "1 Gbps over four", "10 Gbps", "loopback", "incompressible", "busy cores"],
)
def test_encoding_follows_the_link(send_rate: float, encode_rate: float, ratio: float, pays: bool) -> None:
    """Nearly all chunks where it is sooner; a probe in sixteen at most where it is not."""
    share = drive(send_rate, encode_rate, ratio)
    assert share > 0.9 if pays else share <= 1 / 16


def test_a_link_far_faster_than_the_codec_is_not_even_probed() -> None:
    """What a transfer loses to looking is nothing."""
    assert drive(5000 * MB, 500 * MB, 1.45) == 0.0


def test_a_send_buffer_does_not_deceive_it() -> None:
    """The first chunks vanish into memory at once; a few sends that wait are enough to see the path behind it."""
    governor = CodingGovernor()
    for _ in range(10):
        governor.sent(MB, MB / (5000 * MB))
    governor.encoded(MB, int(MB / 1.45), MB / (500 * MB))
    for _ in range(2):
        governor.sent(MB, MB / (5 * MB))
    assert governor.pays


def test_a_lone_chunk_goes_as_it_is() -> None:
    """Without a backlog only latency counts."""
    assert drive(12.5 * MB, 500 * MB, 1.45, backlog=False) == 0.0


def test_it_changes_its_mind_with_the_link() -> None:
    """A thin link that becomes fast is sent raw again."""
    governor = CodingGovernor()
    for rate in [12.5 * MB] * 100 + [2000 * MB] * 100:
        if governor.wants(backlog=True):
            governor.encoded(MB, int(MB / 1.45), MB / (500 * MB))
        governor.sent(MB, MB / rate)
    assert not governor.pays
