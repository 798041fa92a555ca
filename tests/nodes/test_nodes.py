"""Nodes over real HTTP and a real KV stream: equal tokens, and nothing left behind whatever happens."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from prfaas_net.errors import ConfigError, PrfaasError
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode import DecodeNode
from prfaas_net.nodes.engine_api import Sampling
from tests.faults.proxy import FaultProxy, fault_proxy
from tests.nodes.conftest import Event, Hand, Nodes
from tests.nodes.hash_engine import HashEngine

PROMPT = [(7 * i + 3) % 1000 for i in range(300)]
SAMPLING = Sampling(max_tokens=8)


async def run(hand: Hand, prompt: list[int], **changes: Any) -> tuple[list[Event], list[Event]]:
    """One request through both nodes; returns the events of decode and of prefill."""
    async with hand.decode(len(prompt), **changes) as decode:
        ticket = (await decode.next())["ticket"]
        async with hand.prefill(prompt, ticket, **changes) as prefill:
            return await decode.all(), await prefill.all()


def tokens(events: list[Event]) -> list[int]:
    return [event["token"] for event in events if event["event"] == "token"]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 300])
async def test_output_equals_a_single_process_run(nodes: Nodes, length: int) -> None:
    """Around every boundary of window and chunk, token for token."""
    async with nodes() as hand:
        decoded, prefilled = await run(hand, PROMPT[:length])
        assert tokens(decoded) == HashEngine().generate(PROMPT[:length], SAMPLING)
        assert decoded[-1] == {"event": "finish", "reason": "length", "output_tokens": 8}
        report = prefilled[-1]["report"]
        assert prefilled[-1]["event"] == "done"
        assert report["kv_bytes"] == {
            "full": length * (32 + 32 + 24) * 4,
            "window": min(length, 8) * 8 * 4,
            "linear": 4 * 8 * 4,
        }
        await hand.settled()


async def test_memory_is_reused_and_what_it_held_does_not_matter(nodes: Nodes) -> None:
    """Twenty requests of different lengths, four at a time, in an arena for a few: all equal."""
    async with nodes() as hand:
        gate = asyncio.Semaphore(4)

        async def one(length: int) -> bool:
            async with gate:
                decoded, _ = await run(hand, PROMPT[:length], request_id=f"r{length}")
                return tokens(decoded) == HashEngine().generate(PROMPT[:length], SAMPLING)

        assert all(await asyncio.gather(*(one(5 + 13 * i) for i in range(20))))
        await hand.settled()


async def test_the_first_token_comes_before_the_kvcache_has_landed(nodes: Nodes) -> None:
    """The seal overtakes the bytes: frozen data connections do not delay the first token."""
    async with nodes() as hand:
        decoded, _ = await run(hand, PROMPT)
        names = [event["event"] for event in decoded]
        assert names.index("token") < names.index("landed")


async def test_a_request_for_one_token_ends_with_the_prefill(nodes: Nodes) -> None:
    """max_tokens 1: one token, marked as the last."""
    async with nodes() as hand:
        decoded, _ = await run(hand, PROMPT, sampling={"max_tokens": 1})
        assert next(e for e in decoded if e["event"] == "token")["finish"] == "length"
        assert decoded[-1] == {"event": "finish", "reason": "length", "output_tokens": 1}
        await hand.settled()


async def test_progress_is_told_while_the_prompt_runs(nodes: Nodes) -> None:
    """One progress event a chunk, the last one the whole prompt."""
    async with nodes() as hand:
        _, prefilled = await run(hand, PROMPT)
        assert [e["tokens"] for e in prefilled if e["event"] == "progress"] == [64, 128, 192, 256, 300]


async def test_a_caller_that_leaves_the_decode_call_frees_both_nodes(nodes: Nodes) -> None:
    """Closing one response is all it takes; the prefill stops between layers."""
    async with nodes(HashEngine(chunk_seconds=0.1)) as hand:
        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, ticket) as prefill:
                await prefill.until("progress")
                decode.response.close()
                assert (await prefill.until("done"))["event"] == "error"
        await hand.settled()


async def test_a_caller_that_leaves_the_prefill_call_frees_both_nodes(nodes: Nodes) -> None:
    """The decode side gets a typed error at once."""
    async with nodes(HashEngine(chunk_seconds=0.1)) as hand:
        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, ticket) as prefill:
                await prefill.until("progress")
                prefill.response.close()
                event = await decode.until("finish")
        assert event["error"]["error"] == "CancelledByPeer"
        await hand.settled()


async def test_an_engine_that_fails_fails_the_request_on_both_sides(nodes: Nodes) -> None:
    """InternalError here, a reason there, memory back; the next request is served."""
    engine = HashEngine(fail_at_token=200)
    async with nodes(engine) as hand:
        decoded, prefilled = await run(hand, PROMPT)
        assert prefilled[-1]["error"]["error"] == "InternalError"
        assert "the engine broke" in prefilled[-1]["error"]["found"]
        assert decoded[-1]["event"] == "error"
        await hand.settled()
        engine.fail_at_token = None
        decoded, _ = await run(hand, PROMPT)
        assert tokens(decoded) == HashEngine().generate(PROMPT, SAMPLING)


async def test_an_engine_that_leaves_a_layer_out_is_found_out(nodes: Nodes) -> None:
    """A layer that is never emitted is an error that names it, not a cache with a hole."""
    async with nodes(HashEngine(forget_layer=3)) as hand:
        decoded, prefilled = await run(hand, PROMPT)
        assert "missing chunks by layer: {3: 5}" in prefilled[-1]["error"]["found"]
        assert decoded[-1]["event"] == "error"
        await hand.settled()


async def test_a_link_that_dies_comes_back_with_its_transfer(nodes: Nodes) -> None:
    """RST on every connection in the middle of a prefill: the request does not notice."""
    async with nodes(HashEngine(chunk_seconds=0.05)) as hand, fault_proxy(hand.decode_node.listener.address) as proxy:
        hand.decode_node.config.kv.advertise["prfaas"] = proxy.address
        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, ticket) as prefill:
                await prefill.until("progress")
                proxy.reset()
                assert (await prefill.until("done"))["event"] == "done"
                assert tokens(await decode.all()) == HashEngine().generate(PROMPT, SAMPLING)
        await hand.settled()


async def test_a_link_that_stays_dead_fails_the_request_and_the_next_one_dials_again(nodes: Nodes) -> None:
    """The path is gone for good: LinkError on both sides when the window has passed; the node recovers by itself."""
    window = {"kv": {"resume_window": "300ms", "arena": "8MiB"}}
    async with nodes(HashEngine(chunk_seconds=0.05), prefill=window, decode=window) as hand:
        proxy = FaultProxy(hand.decode_node.listener.address)
        await proxy.start()
        hand.decode_node.config.kv.advertise["prfaas"] = proxy.address
        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, ticket) as prefill:
                await prefill.until("progress")
                await proxy.close()
                async with asyncio.timeout(2):
                    events = [await prefill.until("done"), await decode.until("finish")]
        assert [event["error"]["error"] for event in events] == ["LinkError", "LinkError"]
        await hand.settled()
        del hand.decode_node.config.kv.advertise["prfaas"]
        decoded, _ = await run(hand, PROMPT)
        assert tokens(decoded) == HashEngine().generate(PROMPT, SAMPLING)


async def test_a_decode_node_behind_a_nat_dials_the_sender(nodes: Nodes) -> None:
    """The prefill node cannot dial; the decode node dials its gate, and the KVCache flows the other way."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        gate = "{}:{}".format(*free.getsockname())
    decode: Event = {"kv": {"arena": "8MiB", "dial": {"prfaas": [gate]}}}
    async with nodes(prefill={"kv": {"arena": "8MiB", "gate": gate}}, decode=decode) as hand:
        decoded, prefilled = await run(hand, PROMPT)
        assert prefilled[-1]["event"] == "done"
        assert tokens(decoded) == HashEngine().generate(PROMPT, SAMPLING)
        base = "http://{}:{}".format(*hand.prefill_node.control.address)
        async with hand.session.get(base + "/metrics") as response:
            assert 'prfaas_link_acked_bytes_total{peer="d0"}' in await response.text()
        await hand.settled()


async def test_a_decode_node_that_restarts_makes_old_tickets_void(nodes: Nodes) -> None:
    """A ticket of the process before is refused with what to do; no data goes to the new one."""
    async with nodes() as hand:
        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
        await hand.settled()
        ticket["boot_id"] = "f" * 32
        async with hand.prefill(PROMPT, ticket) as prefill:
            error = (await prefill.until("done"))["error"]
        assert error["error"] == "LinkError"
        assert "reserve again" in error["do"]


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"layout": "0" * 32}, 502, "another model"),
        ({"prompt_tokens": 4090}, 400, "exceed the model's length"),
        ({"prompt_tokens": 0}, 400, "prompt_tokens"),
        ({"chunk_tokens": "many"}, 400, "chunk_tokens"),
        ({"sampling": {"max_tokens": 0}}, 400, "max_tokens"),
        ({"deadline_s": -1}, 400, "deadline_s"),
    ],
)
async def test_a_bad_decode_call_is_refused_with_a_status(nodes: Nodes, changes: Event, status: int, text: str) -> None:
    """Nothing is reserved, and the answer says what is wrong."""
    async with nodes() as hand:
        async with hand.decode(len(PROMPT), **changes) as decode:
            assert decode.response.status == status
            assert text in await decode.response.text()
        await hand.settled()


async def test_more_than_the_arena_holds_is_busy_or_refused(nodes: Nodes) -> None:
    """Never sent, never half reserved."""
    async with nodes(decode={"kv": {"arena": "2MiB"}}) as hand:
        async with hand.decode(3000) as decode:
            assert (await decode.next())["event"] == "reserved"
            async with hand.decode(3000, request_id="r2") as second:
                assert second.response.status == 503
                assert "BusyError" in await second.response.text()
        await hand.settled()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"signature": "0" * 64}, "not one of ours"),
        ({"transfer_id": "0" * 32}, "not one of ours"),
        ({"manifest": {}}, "do not run the same model"),
        ({"table": "0" * 16}, "another chunk table"),
        ({"endpoints": "x"}, "endpoints"),
        ({"endpoints": [["127.0.0.1", 1]]}, "cannot reach"),
    ],
)
async def test_a_damaged_ticket_moves_nothing(nodes: Nodes, damage: Event, text: str) -> None:
    """Whatever was changed, the prefill fails with the reason and holds nothing."""
    async with nodes() as hand:
        async with hand.decode(len(PROMPT)) as decode:
            ticket = (await decode.next())["ticket"]
            async with hand.prefill(PROMPT, {**ticket, **damage}) as prefill:
                assert text in await prefill.response.text()
        await hand.settled()


async def test_a_prompt_that_does_not_fit_its_ticket_is_refused(nodes: Nodes) -> None:
    """Lengths are compared before anything runs."""
    async with nodes() as hand, hand.decode(len(PROMPT)) as decode:
        ticket = (await decode.next())["ticket"]
        async with hand.prefill(PROMPT[:-1], ticket) as prefill:
            assert prefill.response.status == 400
            assert "another length" in await prefill.response.text()


async def test_a_call_ends_at_its_deadline(nodes: Nodes) -> None:
    """Nobody comes with the ticket: DeadlineError, memory back."""
    async with nodes() as hand:
        async with hand.decode(len(PROMPT), deadline_s=0.2) as decode:
            event = await decode.until("finish")
        assert event["error"]["error"] == "DeadlineError"
        await hand.settled()


async def test_a_node_key_guards_the_control_port(nodes: Nodes) -> None:
    """Without it 401 and nothing is done; health stays open for probes."""
    async with nodes(decode={"node_key": "a secret of the fleet"}) as hand:
        async with hand.decode(len(PROMPT)) as decode:
            assert decode.response.status == 401
        base = "http://{}:{}".format(*hand.decode_node.control.address)
        for path, status in (("/health", 200), ("/metrics", 200), ("/v1/node", 401)):
            async with hand.session.get(base + path) as response:
                assert response.status == status


@pytest.mark.parametrize("place", ["listen", "kv"])
async def test_an_open_port_without_a_key_is_refused(place: str) -> None:
    """Beyond loopback nothing listens unauthenticated."""
    change: Event = {"listen": "0.0.0.0:0"} if place == "listen" else {"kv": {"listen": "0.0.0.0:0"}}
    node = DecodeNode(NodeConfig.model_validate({"role": "decode", **change}), HashEngine())
    with pytest.raises(ConfigError, match="without authentication"):
        await node.start()
    await node.close()


async def test_a_port_in_use_is_named(nodes: Nodes) -> None:
    """One line with the address and what to do."""
    async with nodes() as hand:
        host, port = hand.decode_node.control.address
        config = NodeConfig.model_validate({"role": "decode", "listen": f"{host}:{port}"})
        other = DecodeNode(config, HashEngine())
        with pytest.raises(PrfaasError, match=f"port in use: cannot listen on {host}:{port}"):
            await other.start()
        await other.close()
