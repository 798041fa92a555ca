"""Scenarios: a link, what is sent over it, what happens to it, what competes; one TOML file each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from prfaas_net.config import Bytes, Duration, Rate, Section, load_config
from prfaas_net.errors import ConfigError
from tools.netlab.flows import Load
from tools.netlab.link import Link, link
from tools.netlab.schedule import Event, Player, Step, WaySection
from tools.netlab.settings import WAYS
from tools.netlab.traffic import Traffic

__all__ = ["SCENARIOS", "Scenario", "Stage", "load_scenario", "names", "set_up"]

SCENARIOS = Path(__file__).with_name("scenarios")


class LinkSection(WaySection):
    """``[link]``: how the link is at the start; ``[link.ab]`` and ``[link.ba]`` over it for one way."""

    ab: WaySection = WaySection()
    ba: WaySection = WaySection()
    ecn: bool = False

    def by_way(self) -> dict[str, dict[str, Any]]:
        """Changes to a link without any impairment, by way."""
        return {way: self.changes() | getattr(self, way).changes() for way in WAYS}


class TrafficSection(Section):
    """``[traffic]``: what is looked at, from a to b.

    Attributes:
        flows: connections; ``rate`` and ``write`` are of all of them together.
        rate: the kernel paces them to so much; ``write``: their application offers so much.
        read: the receiving application takes so much from all of them; ``rcvbuf``, ``sndbuf``: fixed buffers of each.
    """

    cc: str = "cubic"
    flows: int = Field(4, ge=1)
    rate: Rate | None = None
    write: Rate | None = None
    read: Rate | None = None
    rcvbuf: Bytes | None = None
    sndbuf: Bytes | None = None

    def load(self) -> Load:
        """One flow's share."""
        return Load(
            cc=self.cc,
            rate_bps=None if self.rate is None else self.rate / self.flows,
            write_bps=None if self.write is None else self.write / self.flows,
            sndbuf_bytes=self.sndbuf,
        )


class CrossSection(Section):
    """``[[cross]]``: what competes, from one time to another."""

    start: Duration
    stop: Duration
    way: str = "ab"
    cc: str = "cubic"
    flows: int = Field(1, ge=1)
    rate: Rate | None = None
    on: Duration = 0.0
    off: Duration = 0.0
    ramp: Duration = 0.0

    def load(self) -> Load:
        """One flow's share."""
        rate_bps = None if self.rate is None else self.rate / self.flows
        return Load(cc=self.cc, rate_bps=rate_bps, on_s=self.on, off_s=self.off, ramp_s=self.ramp)


class Scenario(Section):
    """A file of ``tools/netlab/scenarios``.

    Attributes:
        title: what happens, in a line; ``about``: what should be seen, and why.
        duration: how long it is played.
    """

    title: str
    about: str
    duration: Duration
    link: LinkSection
    traffic: TrafficSection = TrafficSection()
    at: tuple[Step, ...] = ()
    cross: tuple[CrossSection, ...] = ()


def names() -> list[str]:
    """Of the scenarios that come along."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def load_scenario(name: str) -> Scenario:
    """A scenario that comes along, or the one in a file.

    Raises:
        ConfigError: there is none, or the file cannot be understood.
    """
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if not path.exists():
        raise ConfigError("no such scenario", expected=f"a .toml file, or one of {', '.join(names())}", found=name)
    return load_config(Scenario, path)


@dataclass
class Stage:
    """A scenario's link, ready to be played: bring your own traffic, or start what the scenario says."""

    scenario: Scenario
    link: Link
    rivals: tuple[Traffic, ...]

    def start_traffic(self) -> Traffic:
        """The scenario's own flows."""
        plan = self.scenario.traffic
        read_bps = None if plan.read is None else plan.read / plan.flows
        return self.link.traffic("ab", plan.load(), flows=plan.flows, read_bps=read_bps, rcvbuf_bytes=plan.rcvbuf)

    def events(self) -> list[Event]:
        """Everything that happens to the link, and the competition."""
        events = [Event(step.t, step.line(), _setter(self.link, step)) for step in self.scenario.at]
        for plan, rival in zip(self.scenario.cross, self.rivals, strict=True):
            events.append(Event(plan.start, "competitor comes", _starter(rival, plan)))
            events.append(Event(plan.stop, "competitor goes", rival.stop))
        return events

    def play(self) -> Player:
        """Begin now; a context manager."""
        return Player(self.events())


def _setter(link: Link, step: Step) -> Any:
    return lambda: link.set(step.way, **step.changes())


def _starter(rival: Traffic, plan: CrossSection) -> Any:
    def start() -> None:
        for _ in range(plan.flows):
            rival.add(plan.load())

    return start


@contextlib.contextmanager
def set_up(scenario: Scenario, on: Link | None = None, *, backend: str | None = None) -> Iterator[Stage]:
    """The scenario's link, with its settings in force and its competitors waiting.

    Args:
        on: a link to use, which is brought to the scenario's settings; without one a new link is made.
        backend: of a new link.

    Raises:
        ConfigError: this machine does not allow it.
    """
    with contextlib.ExitStack() as stack:
        if on is None:
            on = stack.enter_context(link(backend=backend))
        on.reset(ecn=scenario.link.ecn, **scenario.link.by_way())
        # Their processes are there before they are needed: a competitor comes when it is due, not when Python is up.
        rivals = tuple(stack.enter_context(on.traffic(plan.way, flows=0)) for plan in scenario.cross)
        yield Stage(scenario, on, rivals)
