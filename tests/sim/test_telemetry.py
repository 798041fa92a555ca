"""The router hears of simulated links from the real detector, which sees what a kernel would show of them."""

from __future__ import annotations

from random import Random

import pytest

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.scheduling import LinkLoad, LinkSeen
from prfaas_net.sim.loop import Loop
from prfaas_net.sim.network import SimLink
from prfaas_net.sim.telemetry import LinkTelemetry

G = 1e9
RTT_S = 0.02


class Path:
    """A link of 10 Gbps that is looked at; transfers of any size on it."""

    def __init__(self, *, rivals: bool = False, budget_bps: float = 7 * G) -> None:
        self.loop = Loop()
        self.link = SimLink(self.loop, "far", "near", 10 * G, RTT_S)
        self.heard: list[tuple[float, LinkSeen]] = []
        self.telemetry = LinkTelemetry(
            self.loop, self.link, best_bps=10 * G, budget_bps=budget_bps, rivals=rivals, beat_s=0.25, rng=Random(1),
            told=lambda seen: self.heard.append((self.loop.now, seen)),
        )  # fmt: skip

    def send(self, at_s: float, bits: float, made_in_s: float = 0.0) -> None:
        def begin(_: object) -> None:
            self.link.send(bits, made_in_s, lambda tag: None, None)

        self.loop.at(at_s, begin)

    def carries(self, at_s: float, bps: float) -> None:
        self.loop.at(at_s, self.link.set_capacity, bps)

    def states(self, after_s: float, before_s: float) -> list[LinkState]:
        """All that held within a time, as the router heard it."""
        earlier = [seen.state for at, seen in self.heard if at <= after_s][-1:]
        return earlier + [seen.state for at, seen in self.heard if after_s < at < before_s]

    def counted_on_bps(self, at_s: float) -> float:
        """What a router counts on at a time."""
        load = LinkLoad("far", "near")
        for at, seen in self.heard:
            if at <= at_s:
                load.state, load.available_bps = seen.state, seen.available_bps or 0.0
                load.budget_bps, load.paced_bps = seen.budget_bps or 0.0, seen.paced_bps or 0.0
        return load.rate_bps


def test_a_link_that_carries_all_is_never_in_trouble() -> None:
    """Transfers that come and go, none as fast as the link: half a minute without an alarm."""
    path = Path()
    for i in range(60):
        path.send(i * 0.5, 1 * G, made_in_s=0.4)
    path.loop.run()
    found = {seen.state for _, seen in path.heard}
    assert found <= {LinkState.IDLE, LinkState.CLEAR, LinkState.APP_LIMITED} and LinkState.APP_LIMITED in found
    assert path.link.pace_bps == 7 * G


def test_a_link_that_is_never_used_is_never_looked_at() -> None:
    """It costs nothing."""
    path = Path()
    path.carries(5.0, G)
    path.loop.run()
    assert path.telemetry.looks == 0 and not path.heard


@pytest.mark.parametrize("rivals", [False, True])
def test_a_path_that_carries_less_is_found_out_within_half_a_second(rivals: bool) -> None:
    """The router then counts on what is left, give or take what pacing below it costs; and comes back afterwards."""
    path = Path(rivals=rivals)
    path.send(0.0, 130 * G)
    path.carries(5.0, 2 * G)
    path.carries(15.0, 10 * G)
    path.loop.run()
    assert set(path.states(2.0, 5.0)) == {LinkState.CLEAR}
    troubled = next(at for at, seen in path.heard if seen.state in (LinkState.BUILDING, LinkState.CONGESTED))
    assert 5.0 < troubled < 5.5
    assert 0.8 * G < path.counted_on_bps(10.0) < 2.5 * G
    assert path.counted_on_bps(25.0) > 6 * G


def test_pacing_gives_way_where_others_queue() -> None:
    """The budget falls to about what arrives, within its bounds, and is whole again in the end."""
    path = Path(rivals=True)
    paces: list[float] = []
    path.send(0.0, 100 * G)
    path.carries(5.0, 2 * G)
    path.carries(15.0, 10 * G)
    for at_s in range(6, 15):
        path.loop.at(at_s, lambda _: paces.append(path.link.pace_bps))
    path.loop.run()
    assert 0.05 * 7 * G - 1 <= min(paces) < 2.1 * G
    assert path.link.pace_bps == 7 * G


def test_an_outage_is_told_as_one_and_what_waited_goes_on() -> None:
    """Nothing comes back for three seconds: down; then everything lands."""
    path = Path()
    path.send(0.0, 50 * G)
    path.carries(2.0, 0.0)
    path.carries(5.0, 10 * G)
    path.loop.run()
    assert LinkState.DOWN in path.states(2.0, 4.0)
    assert path.heard[-1][1].state is not LinkState.DOWN
    assert path.link.sent_bits == pytest.approx(50 * G)


def test_the_same_seed_gives_the_same_verdicts() -> None:
    """Jitter and times of looks come from the source that was passed in."""

    def play() -> list[tuple[float, LinkSeen]]:
        path = Path(rivals=True)
        path.send(0.0, 60 * G)
        path.carries(3.0, G)
        path.carries(8.0, 10 * G)
        path.loop.run()
        return path.heard

    assert play() == play()
