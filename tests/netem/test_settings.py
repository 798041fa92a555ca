"""Settings, schedules and scenarios as they are written; no laboratory needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prfaas_net.errors import ConfigError, UsageError
from tools import netlab
from tools.netlab import choosing
from tools.netlab.qdisc import burst_bytes, counters_of, lines_for
from tools.netlab.scenario import load_scenario, names
from tools.netlab.schedule import Event, Player, load_schedule
from tools.netlab.settings import Counters, Way, change

WANTED = {
    "clean", "delay-step", "loss-step", "rate-cut", "bursty-cross", "slow-receiver", "small-buffers", "app-limited",
    "black-hole", "ecn-marks", "reverse-loss",
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": 1.5}, {"rate_bps": 0}, {"delay_ms": -1}, {"queue_bytes": 0}, {"mark_bytes": 1000},
        {"rate_bps": 1e6, "queue_bytes": 1000, "mark_bytes": 1000},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    """With what was expected."""
    with pytest.raises(ConfigError):
        Way(**settings)  # type: ignore[arg-type]


def test_a_change_concerns_the_ways_that_it_names() -> None:
    """One, or both; and only settings that there are."""
    ways = {"ab": Way(), "ba": Way()}
    assert change(ways, None, {"loss": 0.1}) == {"ab": Way(loss=0.1), "ba": Way(loss=0.1)}
    assert change(ways, "ba", {"loss": 0.1}) == {"ab": Way(), "ba": Way(loss=0.1)}
    for way, changes in (("aa", {}), (None, {"speed": 1})):
        with pytest.raises(ConfigError, match="expected"):
            change(ways, way, changes)


def test_a_queue_is_a_round_trip_at_the_rate_unless_said() -> None:
    """And never too short for one super-packet."""
    assert Way(rate_bps=200e6, delay_ms=20).limit_bytes == 1_000_000
    assert Way(rate_bps=1e6, delay_ms=1).limit_bytes == 128 << 10
    assert Way(rate_bps=1e6, delay_ms=1, queue_bytes=5000).limit_bytes == 5000


def test_disciplines_are_changed_in_place_while_their_kinds_stay() -> None:
    """Only what changes a kind takes the packets that are under way."""
    shaped = Way(rate_bps=1e8, delay_ms=10)
    first = lines_for("d0", shaped, None)
    assert [line.split(" handle ")[1].split()[1] for line in first] == ["netem", "tbf"]
    assert not any(" del " in line for line in lines_for("d0", Way(rate_bps=5e7, delay_ms=20, loss=0.1), shaped))
    assert " del " in lines_for("d0", Way(delay_ms=10), shaped)[0]
    marking = lines_for("d0", Way(rate_bps=1e8, delay_ms=10, queue_bytes=1 << 20, mark_bytes=65536), shaped)
    assert " del " in marking[0]
    assert "red limit 1048576 min 65536 max 131072" in marking[-1]
    assert burst_bytes(1e9) == 250_000


def test_what_a_child_refused_is_not_lost_twice() -> None:
    """netem counts among its own drops those of the queue below it."""
    disciplines = [
        {"kind": "netem", "packets": 10, "bytes": 1000, "drops": 7},
        {"kind": "tbf", "drops": 4},
        {"kind": "red", "drops": 4, "marked": 2},
    ]
    assert counters_of(disciplines) == Counters(packets=10, bytes=1000, lost=3, dropped=4, marked=2)


def test_every_scenario_can_be_read() -> None:
    """Those that the project's own tests are about are there, and play in seconds."""
    assert set(names()) >= WANTED
    for name in names():
        scenario = load_scenario(name)
        assert 0 < scenario.duration <= 15
        assert all(step.changes() and step.t < scenario.duration for step in scenario.at)
        assert all(cross.start < cross.stop <= scenario.duration for cross in scenario.cross)
    with pytest.raises(ConfigError, match="one of app-limited"):
        load_scenario("nothing")


def test_a_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    """Units as people write them; a mistake is named with its place."""
    file = tmp_path / "schedule.toml"
    file.write_text('[[at]]\nt = "2s"\nway = "ab"\nrate = "25Mbps"\ndelay = "15ms"\nqueue = "64KiB"\n')
    (step,) = load_schedule(file)
    assert (step.t, step.way) == (2.0, "ab")
    assert step.changes() == {"rate_bps": 25e6, "delay_ms": 15.0, "queue_bytes": 65536}
    file.write_text('[[at]]\nt = "2s"\nspeed = "fast"\n')
    with pytest.raises(ConfigError, match="unknown key"):
        load_schedule(file)


def test_events_happen_in_the_order_of_their_times_and_a_failure_is_told() -> None:
    """However they were listed."""
    happened: list[str] = []

    def fail() -> None:
        raise ConfigError("it broke")

    events = [Event(at_s, name, lambda name=name: happened.append(name)) for at_s, name in ((0.02, "b"), (0.0, "a"))]  # type: ignore[misc]
    with Player(events) as player:
        player.wait(5.0)
    assert happened == ["a", "b"]
    assert [what for _, _, what in player.done] == ["a", "b"]
    with Player([Event(0.0, "c", fail)]) as player, pytest.raises(UsageError, match="it broke"):
        player.wait(5.0)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every backend, and before anything is made."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need" in (netlab.why_not() or "") and "root" in (netlab.why_not() or "")
    assert all("root" in (reason or "") for reason in netlab.available().values())
    with pytest.raises(ConfigError, match="root"), netlab.link():
        raise AssertionError("there is a link")


def test_the_truest_backend_is_chosen_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """netem, then uml, then tun; a wish is followed or refused."""
    cans: list[tuple[dict[str, str | None], str]] = [
        ({"netem": None, "uml": None, "tun": None}, "netem"),
        ({"netem": "too old", "uml": None, "tun": None}, "uml"),
        ({"netem": "too old", "uml": "not installed", "tun": None}, "tun"),
    ]
    monkeypatch.delenv(choosing.VARIABLE, raising=False)
    for can, name in cans:
        monkeypatch.setattr(choosing, "available", lambda can=can: can)
        choice = choosing.choose()
        assert choice.name == name
        assert all(reason in choice.line() for reason in can.values() if reason)
    assert choosing.choose("tun").name == "tun"
    with pytest.raises(ConfigError, match="not installed"):
        choosing.choose("uml")
    with pytest.raises(ConfigError, match="no such backend"):
        choosing.choose("magic")
