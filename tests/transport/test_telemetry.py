"""Links look at their sockets: verdicts, a log that replays to them, a pace that follows them."""

from __future__ import annotations

from pathlib import Path

from prfaas_net.congestion.detectors import replay
from prfaas_net.congestion.samples import LinkSample, LogHead, read_log
from prfaas_net.congestion.verdict import LinkState, Verdict
from prfaas_net.kv import ChunkTable
from prfaas_net.transport import KvListener, LinkBase
from prfaas_net.transport.stats import read_tcp_info
from prfaas_net.transport.telemetry import TelemetryLog
from tests.faults.ends import start_transfer
from tests.transport.conftest import Connect
from tests.waiting import until


async def test_a_link_says_what_it_is_doing(listener: KvListener, connect: Connect) -> None:
    """Something else than idle while it sends, idle again after; every change is told."""
    link = await connect(2, budget_bps=80_000_000)
    told: list[tuple[LinkBase, Verdict]] = []
    link.tell_verdicts_to(lambda source, verdict: told.append((source, verdict)))
    ends = start_transfer(listener, link, ChunkTable.split(4_000_000, 100_000))
    ends.seal()
    await ends.delivered(within_s=5)
    await until(lambda: told and told[-1][1].state is LinkState.IDLE)
    assert {source for source, _ in told} == {link}
    assert any(verdict.state in (LinkState.CLEAR, LinkState.APP_LIMITED) for _, verdict in told)
    assert LinkState.CONGESTED not in {verdict.state for _, verdict in told}
    assert link.stats().verdict is link.verdict


async def test_a_dead_link_is_down(listener: KvListener, connect: Connect) -> None:
    """Said when it is known, not when somebody asks."""
    link = await connect(1)
    told: list[LinkState] = []
    link.tell_verdicts_to(lambda source, verdict: told.append(verdict.state))
    await until(lambda: link.verdict.at_s > 0)
    await listener.close()
    await until(lambda: told and told[-1] is LinkState.DOWN)


async def test_a_recorded_log_replays_to_the_same_verdicts(
    listener: KvListener, connect: Connect, tmp_path: Path
) -> None:
    """Bit for bit what the link said while it was recorded."""
    link = await connect(2, telemetry_log=tmp_path / "logs")
    said: list[Verdict] = []
    observe = link.telemetry.look

    ends = start_transfer(listener, link, ChunkTable.split(8_000_000, 100_000))
    for _ in range(20):
        observe()
        said.append(link.verdict)
    ends.seal()
    await ends.delivered(within_s=5)
    await link.close()
    (path,) = (tmp_path / "logs").iterdir()
    with path.open("rb") as file:
        head, entries = read_log(file)
        replayed = list(replay("prfaas", head, entries))
    assert replayed[-1] == link.verdict
    assert set(said) <= set(replayed)


async def test_the_pace_of_every_connection_is_its_share_of_the_budget(connect: Connect) -> None:
    """Also after the budget has changed; the kernel says so."""
    link = await connect(2, budget_bps=80_000_000)
    for budget_bps in (80_000_000, 20_000_000):
        link._now.pace_to(budget_bps)
        infos = [read_tcp_info(stream.sock) for stream in link.streams]
        assert [info and info.paced_bps for info in infos] == [budget_bps // 2] * 2


def test_a_full_log_is_begun_anew_and_the_last_one_kept(tmp_path: Path) -> None:
    """Two files, each whole, however long it goes on."""
    log = TelemetryLog(tmp_path / "link.jsonl", LogHead("cubic"), limit_bytes=1000)
    for number in range(200):
        log.write(LinkSample(float(number), True, 0, ()))
    log.close()
    found: list[float] = []
    for name in ("link.old.jsonl", "link.jsonl"):
        with (tmp_path / name).open("rb") as file:
            _, entries = read_log(file)
            found += [entry.at_s for entry in entries]
    assert found == sorted(found)
    assert found[-1] == 199.0
    assert len(list(tmp_path.iterdir())) == 2
