"""A prefill node says what its links are doing: when it changes, when asked, and in its metrics."""

from __future__ import annotations

from prfaas_net.congestion.verdict import Verdict
from tests.nodes.conftest import Nodes
from tests.waiting import until


async def test_a_node_shows_the_verdict_of_every_link(nodes: Nodes) -> None:
    """``GET /v1/links``, ``/metrics``, and whoever listens inside the node."""
    prompt = list(range(300))
    async with nodes() as hand:
        told: list[tuple[str, Verdict]] = []
        hand.prefill_node.on_verdict = lambda peer, verdict: told.append((peer, verdict))
        async with hand.decode(len(prompt)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(prompt, ticket) as prefill:
                await decode.all()
                await prefill.all()
        await until(lambda: told and told[-1][1].state.value == "idle")
        assert {peer for peer, _ in told} == {"d0"}
        base = "http://{}:{}".format(*hand.prefill_node.control.address)
        async with hand.session.get(base + "/v1/links") as response:
            (row,) = await response.json()
        assert row["peer"] == "d0"
        assert row["state"] == "idle"
        assert row["available_bps"] is None
        assert row["budget_bps"] is None
        async with hand.session.get(base + "/metrics") as response:
            text = await response.text()
        assert 'prfaas_link_state{peer="d0",state="idle"} 1.0' in text
        assert 'prfaas_link_verdicts_total{state="idle"}' in text
        await hand.settled()
