"""Fuzzing for seconds: arbitrary bytes, JSON and mutated honest streams into everything that reads from a peer."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prfaas_net.wire import FrameParser, FrameType, Header
from prfaas_net.wire.frames import MAX_CONTROL_BYTES
from tests.wire.fuzzing import TARGETS, honest_streams, mutate
from tests.wire.pair import Pair

CORPUS = Path(__file__).parent / "corpus"
MUTATED = [name for name, (_, stream) in TARGETS.items() if stream is not None]
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
KEYS = st.sampled_from(
    ["versions", "role", "session", "lane", "nonce", "features", "ticket", "transfer_id", "boot_id", "endpoints",
     "total_bytes", "n_chunks", "table", "lifetime_s", "manifest", "signature", "code", "message", "ids", "do"]
)  # fmt: skip
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=8)
)


@pytest.mark.parametrize("name", TARGETS)
@given(data=st.binary(max_size=400))
@QUICK
def test_arbitrary_bytes(name: str, data: bytes) -> None:
    """Nothing but a PrfaasError comes out, whole and byte at a time."""
    TARGETS[name][0](data)


@pytest.mark.parametrize("name", MUTATED)
@given(seed=st.integers(0, 2**32))
@QUICK
def test_mutated_honest_streams(name: str, seed: int) -> None:
    """Frames dropped, doubled, moved, damaged and damaged with right checksums."""
    target, stream = TARGETS[name]
    target(mutate(honest_streams()[stream or ""], random.Random(seed)))


@given(body=JSON)
@settings(max_examples=200, deadline=None)
def test_arbitrary_json(body: object) -> None:
    """Whatever a peer's JSON says where a HELLO, a ticket or an error should be."""
    TARGETS["bodies"][0](orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS))


@pytest.mark.parametrize("stream", ["forward", "backward"])
def test_the_honest_streams_are_honest(stream: str) -> None:
    """That the mutations start from something which is understood to its end."""
    frames = list(FrameParser(sequenced=True).feed(honest_streams()[stream]))
    assert frames[-1].type is (FrameType.SEAL if stream == "forward" else FrameType.DONE)


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.bin")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_fixed(path: Path) -> None:
    """Inputs that broke a promise before; the target is the first word of the name."""
    TARGETS[path.stem.split("-")[0]][0](path.read_bytes())


def test_a_parser_holds_one_frame_at_most() -> None:
    """A hundred megabytes of garbage that claims to be long frames, in small pieces: a few megabytes are held."""
    pair = Pair()
    endless = Header(FrameType.PING, 0, 0, MAX_CONTROL_BYTES, 0, 0, 0, 1).pack()
    tracemalloc.start()
    pair.receiver.receive(endless, now=pair.now)
    for _ in range(1_600):
        pair.receiver.receive(bytes(65_536), now=pair.now)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pair.receiver.error is not None
    assert peak < 4 * MAX_CONTROL_BYTES
