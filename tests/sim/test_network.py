"""Shared links: fair shares, nothing sent before it is made, nothing lost."""

from __future__ import annotations

from random import Random

import pytest

from prfaas_net.sim.loop import Loop
from prfaas_net.sim.network import SimLink

G = 1e9


def play(sends: list[tuple[float, float, float]], *, fair: bool = True, rtt_s: float = 0.0) -> dict[object, float]:
    """Landing times of transfers given as (begin, bits, made within)."""
    loop = Loop()
    landed: dict[object, float] = {}
    link = SimLink(loop, "a", "b", G, rtt_s, fair)

    def begin(send: tuple[int, float, float]) -> None:
        number, bits, made_s = send
        link.send(bits, made_s, lambda tag: landed.__setitem__(tag, loop.now), number)

    for i, (at_s, bits, made_s) in enumerate(sends):
        loop.at(at_s, begin, (i, bits, made_s))
    loop.run()
    assert link.sent_bits == pytest.approx(sum(bits for _, bits, _ in sends), rel=1e-6)
    return landed


def test_a_lone_transfer_takes_its_size_over_the_rate() -> None:
    """And lands half a round trip later."""
    assert play([(1.0, G, 0.0)], rtt_s=0.1)[0] == pytest.approx(2.05)


def test_two_transfers_share_a_link() -> None:
    """Both have half while both are there; the first then leaves the whole to the second."""
    landed = play([(0.0, G, 0.0), (0.0, 2 * G, 0.0)])
    assert landed[0] == pytest.approx(2.0)
    assert landed[1] == pytest.approx(3.0)


def test_the_first_transfer_goes_first() -> None:
    """Unless shares are fair: the second waits, and ends no later than it would have."""
    landed = play([(0.0, G, 0.0), (0.0, 2 * G, 0.0)], fair=False)
    assert landed[0] == pytest.approx(1.0)
    assert landed[1] == pytest.approx(3.0)


def test_a_transfer_is_never_faster_than_it_is_made() -> None:
    """With a fast link, layer-wise transfer ends with the prefill."""
    assert play([(0.0, G, 10.0)])[0] == pytest.approx(10.0)


def test_a_slow_link_takes_as_long_as_the_bytes_do() -> None:
    """With a slow link, TTFT is S / B: the prefill is hidden behind it."""
    assert play([(0.0, 20 * G, 10.0)])[0] == pytest.approx(20.0)


def test_what_one_does_not_make_the_other_may_send() -> None:
    """A transfer made at a tenth of the rate leaves nine tenths."""
    landed = play([(0.0, G, 10.0), (0.0, 4.5 * G, 0.0)])
    assert landed[1] == pytest.approx(5.0)
    assert landed[0] == pytest.approx(10.0)


def test_a_transfer_that_fell_behind_catches_up() -> None:
    """Made in 4 s at 0.5 G/s; held to a third by others at first; done with the making or soon after."""
    landed = play([(0.0, 2 * G, 4.0), (0.0, 0.5 * G, 0.0), (0.0, 0.5 * G, 0.0)])
    assert landed[1] == landed[2] == pytest.approx(1.5)
    assert landed[0] == pytest.approx(4.0)


def test_a_change_of_capacity_counts_from_its_moment() -> None:
    """Half is sent at the full rate, half at a tenth."""
    loop, landed = Loop(), []
    link = SimLink(loop, "a", "b", G)
    link.send(2 * G, 0.0, lambda tag: landed.append(loop.now), None)
    loop.at(1.0, link.set_capacity, 0.1 * G)
    loop.run()
    assert landed == [pytest.approx(11.0)]


def test_a_cancelled_transfer_frees_its_share() -> None:
    """The other one has the link for itself from then on."""
    loop = Loop()
    landed: list[float] = []
    link = SimLink(loop, "a", "b", G, fair=True)
    flow = link.send(10 * G, 0.0, lambda tag: landed.append(-1.0), None)
    link.send(2 * G, 0.0, lambda tag: landed.append(loop.now), None)
    loop.at(2.0, lambda _: link.cancel(flow))
    loop.run()
    assert landed == [pytest.approx(3.0)]


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_transfers_all_land_no_sooner_than_possible(seed: int, fair: bool) -> None:
    """Whatever comes when: nobody beats the link alone, nor the making; all of it arrives."""
    rng = Random(seed)
    sends = [(rng.uniform(0, 20), rng.uniform(0.01, 3) * G, rng.choice([0.0, rng.uniform(0, 8)])) for _ in range(40)]
    landed = play(sends, fair=fair)
    assert len(landed) == len(sends)
    for i, (at_s, bits, made_s) in enumerate(sends):
        assert landed[i] >= at_s + max(bits / G, made_s) - 1e-6
    first = min(at_s for at_s, _, _ in sends)
    assert max(landed.values()) >= first + sum(bits for _, bits, _ in sends) / G - 20.1
