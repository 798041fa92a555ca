"""How much of a trace's prompts is reused, by retention interval and pool: the table of docs/cache.md.

The trace is Mooncake's conversation, the cache is the one that nodes run, the layout that of the paper's 1T model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from prfaas_net.cache.prefix import PrefixCache
from prfaas_net.cache.retention import choose_interval, snapshot_lengths
from prfaas_net.kv import KvKind
from prfaas_net.sim.requests import SimRequest, mooncake_conversation
from prfaas_net.units import GiB, MiB

TOKENS = 512  # the trace's blocks
# Paper, table 5: 173.92 MiB + 17,280 bytes a token.
GROUP_BYTES = {KvKind.FULL: 17_280 * TOKENS, KvKind.LINEAR: int(173.92 * MiB)}


def reuse(requests: Sequence[SimRequest], pool_bytes: int, interval: int | None, *, branches: bool) -> float:
    """Reused share of all prompt tokens. Rows and states that a prompt left are there when the next one comes."""
    block_bytes = GROUP_BYTES[KvKind.FULL]
    cache = PrefixCache(pool_bytes // block_bytes, block_bytes, GROUP_BYTES, TOKENS)
    for request in requests:
        n_tokens, now = request.prompt_tokens, request.at_s
        n = n_tokens // TOKENS
        keys = b"".join(block.to_bytes(16, "little") for block in request.block_ids[:n])
        hit = cache.match(keys, n_tokens=n_tokens, need_state=True, now=now)
        lengths = snapshot_lengths(
            n_tokens, TOKENS, interval,
            start_tokens=hit.length_tokens, known_tokens=hit.rows_tokens if branches else 0,
        )  # fmt: skip
        entries = cache.insert_rows(keys, 0, max(lengths, default=0) // TOKENS, now=now)
        states = [cache.insert_state(keys, length // TOKENS - 1, now=now) for length in lengths]
        cache.commit([*entries, *(state for state in states if state is not None)])
        cache.release(hit)
    return cache.stats.tokens_reused / cache.stats.tokens_asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--pool-gib", type=int, nargs="*", default=[64, 256, 1024])
    args = parser.parse_args()
    requests = mooncake_conversation()[: args.requests]
    print(f"| state kept at | {' | '.join(f'{pool} GiB' for pool in args.pool_gib)} |")
    print("|---|" + "---|" * len(args.pool_gib))
    chosen = choose_interval(GROUP_BYTES, TOKENS, 1 << 50)
    cases: list[tuple[str, int | None, bool]] = [("ends", None, False), ("ends, branches", None, True)]
    for interval in (84_992, chosen, 21_504, 8192, 2048):
        cases.append((f"ends, branches, every {interval:,}", interval, True))
    for name, interval, branches in [*cases, ("every block", TOKENS, True)]:
        shares = [reuse(requests, pool * GiB, interval, branches=branches) for pool in args.pool_gib]
        print(f"| {name} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
