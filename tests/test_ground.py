"""The ground floor: errors, units, configuration, metrics, and awaiting to the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net import errors
from prfaas_net.aio import see_through
from prfaas_net.clock import ManualClock
from prfaas_net.config import load_config, parse_address
from prfaas_net.errors import BusyError, ConfigError, PeerError, PrfaasError, error_from_wire
from prfaas_net.metrics import Metrics
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_duration,
    parse_rate,
)

LEAVES = [getattr(errors, name) for name in errors.__all__ if getattr(getattr(errors, name), "code", 0)]
BRANCHES = [errors.PrfaasError, errors.LocalError, errors.RemoteError, errors.ResourceError]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_an_error_reads_the_same_on_the_other_side(leaf: type[PrfaasError]) -> None:
    """Type, text and ids survive the wire; the line has what, expected, found, what to do."""
    error = leaf("it broke", expected=1, found=2, do="mend it", request="r1", chunk=7)
    again = error_from_wire(error.to_wire())
    assert type(again) is leaf
    assert again.line() == error.line() == "it broke; expected 1; found 2; mend it (request r1, chunk 7)"


def test_wire_codes_are_unique_and_branches_are_not_raised() -> None:
    """Each leaf has its own number; a branch is only for catching."""
    assert len({leaf.code for leaf in LEAVES}) == len(LEAVES)
    for branch in BRANCHES:
        with pytest.raises(TypeError, match="branch"):
            branch("no")


@given(st.recursive(st.none() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_any_description_of_a_failure_becomes_a_failure(body: object) -> None:
    """A bad description never hides that there was a failure, and never raises."""
    assert isinstance(error_from_wire(body), PrfaasError)
    described = {"code": body, "message": body, "ids": {"message": body, "do": body, "x": body}}
    assert isinstance(error_from_wire(described), PrfaasError)


def test_an_error_of_an_unknown_kind_is_a_peer_error() -> None:
    """A newer peer's code does not confuse an older one."""
    assert isinstance(error_from_wire({"code": 9999, "message": "new"}), PeerError)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("64MiB", 64 << 20), ("1 GB", 10**9), (17, 17), ("1.5KiB", 1536), ("3", 3)]
)
def test_sizes(text: str | int, n_bytes: int) -> None:
    """Binary and decimal units as written."""
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(("text", "rate_bps"), [("10Gbps", 10**10), ("2.5 gbit/s", 25 * 10**8), (9, 9)])
def test_rates(text: str | int, rate_bps: int) -> None:
    """Bits per second, decimal."""
    assert parse_rate(text) == rate_bps


@pytest.mark.parametrize(("text", "duration_s"), [("250ms", 0.25), ("2min", 120.0), (1.5, 1.5)])
def test_durations(text: str | float, duration_s: float) -> None:
    """Seconds."""
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize("text", ["", "fast", "10 parsecs", "-3MiB", "1e3", "MiB"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    """With an example of what is one."""
    for parse in (parse_bytes, parse_rate, parse_duration):
        with pytest.raises(ConfigError, match="such as"):
            parse(text)


def test_quantities_are_shown_with_three_digits() -> None:
    """Short enough for a table."""
    assert [format_bytes(n) for n in (0, 1536, 10 << 20, 3 << 40)] == ["0 B", "1.50 KiB", "10.0 MiB", "3.00 TiB"]
    assert [format_rate(n) for n in (999, 1e9, 12.5e9)] == ["999 bps", "1.00 Gbps", "12.5 Gbps"]
    assert [format_duration(s) for s in (5e-5, 0.0123, 0.25, 2, 75)] == [
        "50 us",
        "12.3 ms",
        "250 ms",
        "2.00 s",
        "75.0 s",
    ]


def test_file_then_environment_then_flags(tmp_path: Path) -> None:
    """The later one wins, table by table."""
    file = tmp_path / "node.toml"
    file.write_text('role = "decode"\nnode_id = "file"\n[kv]\narena = "1GiB"\nconnections = 2\n')
    environ = {"P__NODE_ID": "env", "P__KV__CONNECTIONS": "3", "OTHER": "x"}
    config = load_config(
        NodeConfig, file, flags={"node_id": "flag", "kv": {"arena": None}}, env_prefix="P__", environ=environ
    )
    assert (config.node_id, config.kv.connections, config.kv.arena) == ("flag", 3, 1 << 30)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('role = "decode"\n[kv]\nconections = 2', "unknown key kv.conections; did you mean 'connections'?"),
        ('role = "decode"\nspeed = 2', "unknown key speed; known here: role, "),
        ('role = "both"', "role: Input should be 'prefill' or 'decode'; found 'both'"),
        ("", "role: Field required"),
        ('role = "decode"\n[kv]\narena = "lots"', "kv.arena: not a size; expected a number with a unit, such as 64MiB"),
        ('role = "decode"\nlisten = "here"', "listen: not an address"),
        ("role = ", "is not valid TOML"),
    ],
)
def test_a_bad_configuration_is_one_line_with_the_place(tmp_path: Path, text: str, complaint: str) -> None:
    """File, key, what is wrong, what is near."""
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(NodeConfig, file)
    assert complaint in caught.value.line()
    assert str(file) in caught.value.line()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Never a traceback."""
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.toml; found No such file"):
        load_config(NodeConfig, tmp_path / "nowhere.toml")


def test_addresses() -> None:
    """IPv4, names and IPv6 in brackets."""
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("node.example:0") == ("node.example", 0)
    for text in ("80", "host:", ":80", "host:99999", "host:x"):
        with pytest.raises(ConfigError):
            parse_address(text)


def test_metrics_have_prefix_and_unit() -> None:
    """What /metrics shows."""
    metrics = Metrics()
    metrics.counter("kv_sent_bytes", "x", ("kind",)).labels("full").inc(5)
    metrics.histogram("prefill_seconds", "x").observe(0.3)
    text = metrics.render().decode()
    assert 'prfaas_kv_sent_bytes_total{kind="full"} 5.0' in text
    assert 'prfaas_prefill_seconds_bucket{le="0.5"} 1.0' in text


def test_a_manual_clock_moves_only_when_told() -> None:
    """And never backwards."""
    clock = ManualClock(5.0)
    assert clock.advance(1.5) == clock.now() == 6.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


async def test_see_through_finishes_the_work_however_often_it_is_cancelled() -> None:
    """The work is whole, and the cancellation arrives afterwards."""
    steps: list[int] = []

    async def work() -> str:
        for step in range(5):
            await asyncio.sleep(0.001)
            steps.append(step)
        return "done"

    assert await see_through(work()) == "done"
    task = asyncio.create_task(see_through(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == [0, 1, 2, 3, 4] * 2


async def test_see_through_passes_errors_on() -> None:
    """What the work raises is raised."""

    async def work() -> None:
        raise BusyError("no")

    with pytest.raises(BusyError):
        await see_through(work())
