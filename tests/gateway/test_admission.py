"""Whoever cannot be served in time is told so at once, and when to come back."""

from __future__ import annotations

import pytest

from prfaas_net.config import load_config
from prfaas_net.errors import ConfigError
from prfaas_net.gateway.api_errors import error_response
from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.scheduling.admission import overloaded

from .conftest import open_bench


@pytest.mark.parametrize(("soonest_s", "retry_after"), [(10.4, "1"), (12.3, "3"), (500.0, "60")])
def test_a_refusal_is_429_and_says_when_to_come_back(soonest_s: float, retry_after: str) -> None:
    """In whole seconds, at least one, at most a minute."""
    response = error_response(overloaded("r1", limit_s=10.0, soonest_s=soonest_s))
    assert response.status == 429
    assert response.headers["Retry-After"] == retry_after
    assert b"within 10.0 s" in response.body  # type: ignore[operator]


def test_the_limit_is_off_unless_it_is_set() -> None:
    """And is a duration like every other."""
    flags = {"model": "m", "nodes": [{"url": "http://127.0.0.1:1"}]}
    assert load_config(GatewayConfig, flags=flags).ttft_limit is None
    assert load_config(GatewayConfig, flags={**flags, "ttft_limit": "1500ms"}).ttft_limit == 1.5
    with pytest.raises(ConfigError, match="ttft_limit"):
        load_config(GatewayConfig, flags={**flags, "ttft_limit": 0})


async def test_a_gateway_serves_by_prediction_and_refuses_what_would_be_late() -> None:
    """Policy ``earliest-finish`` answers and explains; with a limit that nobody can meet, 429 comes at once."""
    async with open_bench(policy="earliest-finish") as bench:
        answer = await bench.complete(prompt="x" * 200, explain=True)
        assert answer["prfaas"]["policy"] == "earliest-finish"
        assert any("ready in" in reason for reason in answer["prfaas"]["reasons"])
        await bench.fleet.all_idle()
        bench.assert_nothing_held()
    async with open_bench(policy="earliest-finish", ttft_limit=1e-4) as bench:
        status, body, headers = await bench.post("/v1/completions", {"prompt": "x" * 200})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["type"] == "rate_limit_error"
        bench.assert_nothing_held()
