"""How much a bench measures: enough for a figure to mean something, within a time that somebody waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prfaas_net.bench.figures import Case
from prfaas_net.errors import ConfigError
from prfaas_net.units import GiB, KiB, MiB, parse_duration, parse_rate

__all__ = ["FULL", "QUICK", "Path", "Plan", "parse_path"]


@dataclass(frozen=True)
class Path:
    """An emulated path.

    Attributes:
        ends: what is tried on it: connections, and whether the kernel's buffers are raised to fit (or are the host's).
    """

    rate_bps: int
    rtt_s: float
    loss: float
    ends: tuple[tuple[int, bool], ...] = ((4, True),)

    @property
    def bdp_bytes(self) -> int:
        """Bandwidth-delay product: what is under way when the path is full."""
        return int(self.rate_bps / 8 * self.rtt_s)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        cases: on loopback, each beside iperf3.
        run_bytes: of one loopback run.
        paths: emulated paths; ``path_s``: how long a transfer over one takes at its rate.
        exposures: of each path: seconds of prefill, and KVCache as a share of what the path carries meanwhile.
    """

    cases: tuple[Case, ...]
    rounds: int
    run_bytes: int
    lateness_runs: int
    first_byte_runs: int
    paths: tuple[Path, ...]
    path_rounds: int
    path_s: float
    exposures: tuple[tuple[float, float], ...]
    peer_rounds: int
    peer_bytes: int
    peers_on_paths: bool

    def with_path(self, path: Path) -> Plan:
        """The same over another path."""
        return replace(self, paths=(replace(path, ends=self.paths[0].ends),))


def _cases(connections: tuple[int, ...], chunk_bytes: tuple[int, ...], tls: tuple[int, ...]) -> tuple[Case, ...]:
    """Every size with and without checksums; TLS with 1 MiB, which is what it is used with."""
    cases = [Case(n, size, checksum) for n in connections for size in chunk_bytes for checksum in (True, False)]
    cases += [Case(n, MiB, True, tls=True) for n in tls]
    return tuple(sorted(cases, key=lambda case: (case.connections, case.tls)))


QUICK = Plan(
    cases=_cases((1, 2), (MiB,), tls=(2,)),
    rounds=5,
    run_bytes=GiB,
    lateness_runs=3,
    first_byte_runs=200,
    paths=(Path(10**9, 0.08, 0.001),),
    path_rounds=1,
    path_s=3.0,
    exposures=((2.0, 1.5),),
    peer_rounds=1,
    peer_bytes=GiB,
    peers_on_paths=False,
)
FULL = Plan(
    cases=_cases((1, 2, 4), (64 * KiB, 256 * KiB, MiB, 4 * MiB), tls=(1, 2, 4)),
    rounds=5,
    run_bytes=2 * GiB,
    lateness_runs=5,
    first_byte_runs=1000,
    paths=(
        Path(10**9, 0.08, 0.001, ends=((4, False), (1, True), (4, True))),
        Path(2 * 10**8, 0.04, 0.0, ends=((4, False),)),
    ),
    path_rounds=3,
    path_s=3.0,
    exposures=((2.0, 0.8), (2.0, 1.5)),
    peer_rounds=5,
    peer_bytes=2 * GiB,
    peers_on_paths=True,
)


def parse_path(text: str) -> Path:
    """``"1Gbps,80ms,0.1%"``; the loss may be left out.

    Raises:
        ConfigError: it is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (2, 3):
        raise ConfigError("not a path", expected="RATE,RTT,LOSS such as 1Gbps,80ms,0.1%", found=repr(text))
    loss = 0.0
    if len(parts) == 3:
        try:
            loss = float(parts[2].removesuffix("%")) / (100 if parts[2].endswith("%") else 1)
        except ValueError:
            loss = -1.0
    if not 0 <= loss < 1:
        raise ConfigError("not a loss", expected="a share such as 0.001, or 0.1%", found=repr(parts[-1]))
    return Path(parse_rate(parts[0]), parse_duration(parts[1]), loss)
