"""Can this model go cross-datacenter: sizes from configurations, answers from the throughput model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine.families import model_spec
from engine.jsonfile import JsonObject
from prfaas_net.cli.plan import plan
from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import Estimate, kv_size_of_config
from prfaas_net.sim.case_study import GBPS, paper, paper_workload, profile
from prfaas_net.sim.catalogue import PAPER_MODEL, load_model, load_profile, model_names
from prfaas_net.sim.sizing import Sizing, default_price, parse_lengths, size
from tests.engine.recipes import CONFIGS

GQA = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 128}
RUNNER = CliRunner()
APP = typer.Typer()
APP.command()(plan)


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "constant_mib"),
    [
        ("MiniMax-M2.5", 62 * 2 * 8 * 128 * 2, 0),
        ("Qwen3-235B", 94 * 2 * 4 * 128 * 2, 0),
        ("Kimi-Linear", 7 * 576 * 2, 41.4),
        ("Kimi-K3", 24 * 576 * 2, 428.6),
        ("Ring-2.5-1T", 10 * 576 * 2, 280.0),
        ("Qwen3.5-397B", 15 * 2 * 2 * 256 * 2, 183.2),
        ("MiMo-V2-Flash", 9 * 4 * (192 + 128) * 2, 0),
    ],
)
def test_public_models_have_their_known_sizes(name: str, bytes_per_token: int, constant_mib: float) -> None:
    """Bytes a token of full attention, and states of fixed size."""
    _, kv = load_model(name)
    assert kv.bytes_per_token == bytes_per_token
    assert kv.constant_bytes / 2**20 == pytest.approx(constant_mib, abs=0.1)
    assert (kv.window_tokens, kv.window_bytes_per_token) == ((128, 39 * 8 * 320 * 2) if "MiMo" in name else (0, 0))


def test_prefill_times_follow_from_table_3() -> None:
    """And give its KV throughput back."""
    name, kv = load_model("MiniMax-M2.5")
    fast, source = load_profile("H200", name, kv)
    assert "table 3" in source
    assert [fast.prefill_s(n) for n in (1024, 8192, 32_768, 131_072)] == pytest.approx(
        [0.42, 0.51, 1.11, 5.57], rel=0.02
    )
    slow, _ = load_profile("H20", name, kv)
    assert slow.prefill_s(32_768) > 2 * fast.prefill_s(32_768)


@pytest.mark.parametrize("missing", ["num_hidden_layers", "num_key_value_heads"])
def test_what_is_missing_is_named(missing: str) -> None:
    """A configuration without what decides the size is refused, with the name of the field."""
    body = {key: value for key, value in GQA.items() if key != missing}
    with pytest.raises(ConfigError, match=missing):
        kv_size_of_config(body)


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "magic"]}, "magic"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"num_key_value_heads": "four"}, "not a count"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"linear_attn_config": {"full_attn_layers": [1]}}, "num_heads"),
    ],
)
def test_what_cannot_be_used_is_named(extra: dict[str, Any], match: str) -> None:
    """Also inside tables."""
    with pytest.raises(ConfigError, match=match):
        kv_size_of_config(GQA | extra)


def test_families_are_read_by_what_their_configurations_say() -> None:
    """Periods, lists of layers, windows, a language part inside."""
    head = {"num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}
    assert kv_size_of_config({"text_config": GQA}).bytes_per_token == 2 * 4 * 256 * 2
    lightning = kv_size_of_config(GQA | head | {"attn_type_list": [0, 1]})
    assert (lightning.constant_bytes, lightning.bytes_per_token) == (4 * 8 * 8 * 4, 4 * 16 * 2)
    windowed = kv_size_of_config(GQA | {"sliding_window": 64})
    assert (windowed.bytes_per_token, windowed.window_tokens) == (0, 64)
    assert kv_size_of_config(GQA | {"sliding_window": 64, "use_sliding_window": False}).window_tokens == 0
    period = kv_size_of_config(GQA | head | {"num_hidden_layers": 9, "layer_group_size": 4})
    assert period.bytes_per_token == 3 * 4 * 16 * 2


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_sizes_agree_with_what_the_engine_allocates(family: str) -> None:
    """For every family that the engine runs: the same bytes, below and above any window."""
    body = {"model_type": family, "vocab_size": 64, **CONFIGS[family]}
    layout = model_spec(JsonObject("config.json", body)).layout("any", "any")
    kv = kv_size_of_config(body, kv_bytes=4)
    for tokens in (5, 700):
        assert kv(tokens) == sum(layout.kv_bytes(tokens).values())


def sizing(name: str = PAPER_MODEL, link_gbps: float = 100, **more: Any) -> Sizing:
    label, kv = load_model(name)
    return Sizing(
        label, kv, load_profile("H200", label, kv)[0], load_profile("H20", label, kv)[0], 4, 8, link_gbps * GBPS,
        paper_workload().lengths, 1024, default_price("H200", "H20"), 800 * GBPS, **more,
    )  # fmt: skip


def test_the_papers_own_case_comes_out() -> None:
    """1.54 times at equal count, 15 % more at equal cost, break-even near 4.3 Gbps and between 4,096 and 8,192."""
    report = size(sizing(estimate=Estimate.MEAN_LENGTH))
    table = paper()["expected"]["table_6"]
    assert report["best"]["t_tokens"] == table["t_tokens"]
    assert report["ratios"]["equal_count"] == pytest.approx(1.54, rel=0.01)
    assert report["ratios"]["equal_cost"] == pytest.approx(1.15, rel=0.02)
    assert report["best"]["ttft_s"] == pytest.approx(table["ttft_s"]["prfaas_pd"], rel=0.01)
    assert report["breaks_even"]["link_gbps"] == pytest.approx(4.3, rel=0.05)
    assert 4096 < report["breaks_even"]["output_tokens"] < 8192
    assert report["verdict"] == {**report["verdict"], "feasible": True, "pays": True}


def test_a_dense_model_does_not_pay_where_a_hybrid_does() -> None:
    """MiniMax-M2.5 fills the link; Ring-2.5-1T uses a tenth of it."""
    dense, hybrid = size(sizing("MiniMax-M2.5")), size(sizing("Ring-2.5-1T"))
    assert not dense["verdict"]["pays"] and hybrid["verdict"]["pays"]
    assert dense["naive_egress_gbps"] > 100 > 20 > hybrid["required_egress_gbps"]


def test_lengths_are_read_in_every_form(tmp_path: Path) -> None:
    """And what is none of them is refused."""
    assert parse_lengths("lognormal:9.9,1.0,128,131072").mean == pytest.approx(27_486, rel=1e-3)
    assert parse_lengths("fixed:4000").mean == 4000
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n' * 2)
    # The second time all of it is cached; one token is computed, as always.
    assert parse_lengths(str(trace)).mean == pytest.approx((600 + 1) / 2)
    for bad in ("lognormal:1,2", "fixed:x", "nowhere.jsonl"):
        with pytest.raises(ConfigError, match="lognormal"):
            parse_lengths(bad)


def test_profiles_and_models_of_ones_own(tmp_path: Path) -> None:
    """A measured profile, a configuration in its directory; what is wrong with them is said."""
    kv = paper_workload().kv
    mine = tmp_path / "b200.json"
    mine.write_text(json.dumps({"knots_tokens": [1, 1001], "prefill_s": [0.1, 0.2]}))
    own, source = load_profile(str(mine), "any", kv)
    assert own.prefill_s(501) == pytest.approx(0.15) and "b200" in source
    assert own.decode == profile("H20").decode
    mine.write_text('{"knots_tokens": [1, 2]}')
    with pytest.raises(ConfigError, match="prefill_s"):
        load_profile(str(mine), "any", kv)
    with pytest.raises(ConfigError, match="H200, H20"):
        load_profile("H9000", "any", kv)
    (tmp_path / "config.json").write_text(json.dumps(GQA))
    assert load_model(str(tmp_path))[1].bytes_per_token == 4096
    with pytest.raises(ConfigError, match="Kimi-K3"):
        load_model("no-such-model")
    assert len(model_names()) == 8


def test_the_command_prints_json_and_tables() -> None:
    """Both from the same report."""
    result = RUNNER.invoke(APP, ["--model", "Kimi-K3", "--json"])
    body = json.loads(result.stdout)
    assert {"model", "kv", "best", "homogeneous", "naive", "ratios", "breaks_even", "verdict"} <= body.keys()
    table = RUNNER.invoke(APP, ["--model", "paper-1T", "--link", "10Gbps"])
    assert table.exit_code == 0 and "it pays" in table.stdout
