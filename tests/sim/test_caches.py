"""What the gateway knows of simulated caches comes from their streams, a moment late, through the real manager."""

from __future__ import annotations

from random import Random

import pytest

from prfaas_net.sim.caches import FleetCaches
from prfaas_net.sim.case_study import paper_workload
from prfaas_net.sim.loop import Loop
from prfaas_net.sim.prefix import block_keys

BLOCK = 512
DELAY_S = 0.05


def keys_of(*block_ids: int) -> bytes:
    return block_keys(block_ids, len(block_ids) * BLOCK, BLOCK)


def make(pool_bytes: float = 1e12) -> tuple[Loop, FleetCaches]:
    loop = Loop()
    pools = {"prfaas": pool_bytes, "pd": pool_bytes}
    caches = FleetCaches(loop, paper_workload().kv, pools, BLOCK, delay_s=DELAY_S)
    loop.run()
    return loop, caches


def test_what_is_stored_is_heard_of_a_moment_later() -> None:
    """Until then the gateway believes what it knew."""
    loop, caches = make()
    caches.keep("pd", keys_of(1, 2, 3), 3 * BLOCK + 7, start_tokens=0, computed=True)
    prompt = keys_of(1, 2, 3, 4), 4 * BLOCK
    assert caches.held("pd", *prompt) == (3 * BLOCK, 3 * BLOCK)
    assert caches.heard(*prompt) == {}
    loop.run()
    assert loop.now == pytest.approx(2 * DELAY_S)
    assert caches.heard(*prompt) == {"pd": 3 * BLOCK}


def test_what_is_known_is_what_is_there_whatever_was_evicted() -> None:
    """Hundreds of prompts through pools too small for them: once all is heard, the manager answers as the pools do."""
    rng = Random(3)
    loop, caches = make(pool_bytes=6e9)
    prompts = [tuple(100 * (i % 7) + j for j in range(rng.randrange(1, 30))) for i in range(300)]
    for ids in prompts:
        cluster = rng.choice(["prfaas", "pd"])
        caches.keep(cluster, keys_of(*ids), len(ids) * BLOCK + 5, start_tokens=0, computed=rng.random() < 0.7)
        loop.run()
    assert caches.manager is not None
    assert caches.manager.counters["removed_blocks"] > 0
    assert not any(caches.manager.counters[name] for name in caches.manager.counters if name.startswith("resync"))
    for ids in prompts:
        heard = caches.heard(keys_of(*ids), len(ids) * BLOCK + 5)
        for cluster in ("prfaas", "pd"):
            assert heard.get(cluster, 0) == caches.held(cluster, keys_of(*ids), len(ids) * BLOCK + 5)[0]


def test_a_cluster_that_is_gone_holds_nothing_and_begins_anew() -> None:
    """What was on its way from before is not believed; after a snapshot the stream goes on."""
    loop, caches = make()
    caches.keep("pd", keys_of(1, 2), 2 * BLOCK + 1, start_tokens=0, computed=True)
    caches.lose("pd")
    caches.begin("pd")
    loop.run()
    assert caches.heard(keys_of(1, 2), 2 * BLOCK + 1) == {}
    caches.keep("pd", keys_of(1, 2, 3), 3 * BLOCK + 1, start_tokens=0, computed=True)
    loop.run()
    assert caches.heard(keys_of(1, 2, 3), 3 * BLOCK + 1) == {"pd": 3 * BLOCK}
