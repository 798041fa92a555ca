"""A real link over real netem: its verdict is told, and its pace follows."""

from __future__ import annotations

import asyncio

import pytest

from prfaas_net.congestion.verdict import LinkState
from prfaas_net.transport import Identity, KvListener, LinkOptions, Security, SenderLink
from prfaas_net.units import MiB
from tests.waiting import until
from tools.netlab import Link

pytestmark = [pytest.mark.netem, pytest.mark.timeout(120)]
RATE_BPS, BUDGET_BPS = 100_000_000, 60_000_000
KEY = Security(b"a key for the laboratory")


async def _keep_busy(sender: SenderLink) -> None:
    while True:
        await sender.probe(4 * MiB, chunk_bytes=MiB // 4, lifetime_s=60.0).wait()


async def test_the_pace_of_a_link_follows_its_path_down_and_up_again(netlab_link: Link) -> None:
    """A quarter of the rate is left: congested, and paced to about that; the rate is back: clear, and at its budget,
    by probes as well as by steps."""
    netlab_link.set(rate_bps=RATE_BPS, delay_ms=20, queue_bytes=500_000)
    told: list[LinkState] = []
    with netlab_link.inside("b"):
        listener = KvListener(identity=Identity("d0"), security=KEY)
        await listener.start(netlab_link.b.address, 0)
    with netlab_link.inside("a"):
        options = LinkOptions(connections=4, budget_bps=BUDGET_BPS, congestion_control="cubic")
        sender = await SenderLink.connect([listener.address], identity=Identity("p0"), security=KEY, options=options)
    sender.tell_verdicts_to(lambda source, verdict: told.append(verdict.state))
    busy = asyncio.create_task(_keep_busy(sender))
    try:
        await until(lambda: sender.verdict.state is LinkState.CLEAR, within_s=20)
        netlab_link.set("ab", rate_bps=RATE_BPS / 4)
        await until(lambda: (sender.telemetry.budget_bps or 0) < RATE_BPS / 3, within_s=20)
        assert LinkState.CONGESTED in told
        assert (sender.telemetry.budget_bps or 0) > RATE_BPS / 16
        netlab_link.set("ab", rate_bps=RATE_BPS)
        await until(lambda: sender.telemetry.budget_bps == BUDGET_BPS, within_s=30)
        probed = sender.telemetry.probed
        assert probed is not None
        assert 0 < probed.rate_bps < 1.1 * RATE_BPS
        assert 0 <= probed.error < 1
        await until(lambda: sender.verdict.state in (LinkState.CLEAR, LinkState.APP_LIMITED), within_s=20)
        assert sender.stats().budget_bps == BUDGET_BPS
    finally:
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await sender.close()
        await listener.close()
