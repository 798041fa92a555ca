"""The profile that a node tells schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from prfaas_net.errors import ConfigError
from prfaas_net.nodes.messages import ProfileModel
from prfaas_net.nodes.profile_file import read_profile
from tests.nodes.conftest import Nodes
from tests.nodes.hash_engine import LAYOUT

GOOD: dict[str, Any] = {
    "version": 1,
    "layout": LAYOUT.fingerprint,
    "prefill": [{"tokens": 512, "seconds": 0.5}, {"tokens": 128, "seconds": 0.1}],
    "decode": [{"batch": 1, "context_tokens": 512, "step_seconds": 0.01}, {"batch": 8, "step_seconds": 0.02}],
}


def write(path: Path, body: object) -> Path:
    path.write_bytes(body if isinstance(body, bytes) else orjson.dumps(body))
    return path


async def test_a_node_says_what_its_profile_file_says(nodes: Nodes, tmp_path: Path) -> None:
    """In ``GET /v1/node``, beside the size of its KVCache."""
    path = str(write(tmp_path / "profile.json", GOOD))
    async with nodes(prefill={"kv": {"arena": "8MiB"}, "profile": path}) as hand:
        info = hand.prefill_node.info()
        assert info.profile == ProfileModel(prefill=((128, 0.1), (512, 0.5)), decode_step_s=0.02, max_batch=8)
        assert info.kv_size is not None
        assert info.kv_size.model_dump() == {
            "constant_bytes": 4 * 8 * 4, "bytes_per_token": (32 + 32 + 24) * 4, "window_bytes_per_token": 8 * 4,
            "window_tokens": 8,
        }  # fmt: skip
        assert hand.decode_node.info().profile is None


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"not json", "cannot be read"),
        ({**GOOD, "layout": "another"}, "another model"),
        ({**GOOD, "prefill": []}, "cannot be read"),
        ({**GOOD, "decode": [{"batch": 0, "step_seconds": 1}]}, "cannot be read"),
        ({"layout": LAYOUT.fingerprint}, "cannot be read"),
    ],
)
def test_a_profile_that_is_none_is_refused_at_the_start(tmp_path: Path, body: object, text: str) -> None:
    """With what to do."""
    with pytest.raises(ConfigError, match=text) as caught:
        read_profile(write(tmp_path / "p.json", body), LAYOUT.fingerprint)
    assert "python -m engine profile" in (caught.value.do or "")


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_profile(tmp_path / "nowhere.json", LAYOUT.fingerprint)
