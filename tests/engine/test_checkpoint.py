"""Checkpoints: what is read, and what is refused with which words."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.backend import load_backend
from engine.checkpoint import load_checkpoint
from prfaas_net.errors import ConfigError
from tests.engine.checkpoints import RECIPES, random_weights, write_checkpoint, write_weights

Edit = Callable[[Path], None]


def edit_config(**changes: Any) -> Edit:
    """Change entries of config.json; None removes one."""

    def edit(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return edit


def edit_weights(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change the dictionary of weights."""

    def edit(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return edit


def write(name: str, content: bytes) -> Edit:
    """Write one file."""

    def edit(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return edit


def remove(name: str) -> Edit:
    """Remove one file."""
    return lambda directory: (directory / name).unlink()


def make_directory(name: str) -> Edit:
    """Put a directory in a file's place."""

    def edit(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return edit


NORM = "model.norm.weight"
BAD = {
    "config missing": (remove("config.json"), r"a file is missing; expected config\.json"),
    "config not JSON": (write("config.json", b"{"), r"a file is not JSON.*config\.json"),
    "config not an object": (write("config.json", b"[]"), "expected a JSON object; found list"),
    "unknown model": (edit_config(model_type="mamba"), "expected bailing_hybrid, .*; found mamba.*key model_type"),
    "no model type": (edit_config(model_type=None), "a required entry is missing.*key model_type"),
    "quantised": (edit_config(quantization_config={"bits": 4}), "quantised weights.*key quantization_config"),
    "entry missing": (edit_config(kv_lora_rank=None), "a required entry is missing.*key kv_lora_rank"),
    "entry of wrong type": (edit_config(hidden_size="48"), "expected an integer >= 1; found 48.*key hidden_size"),
    "other activation": (edit_config(hidden_act="gelu"), "expected silu; found gelu"),
    "rotary MLA": (edit_config(mla_use_nope=False), "expected True; found False.*key mla_use_nope"),
    "shared MLA heads": (edit_config(num_key_value_heads=1), "expected 3; found 1.*key num_key_value_heads"),
    "entry not a flag": (edit_config(attention_bias=1), "expected true or false; found 1"),
    "entry not positive": (edit_config(rms_norm_eps=0), "expected a positive number; found 0"),
    "config unreadable": (make_directory("config.json"), "a file cannot be read"),
    "softmax router": (edit_config(moe_router_activation_func="softmax"), "expected sigmoid; found softmax"),
    "tied": (edit_config(tie_word_embeddings=True), "key tie_word_embeddings"),
    "layers not described": (
        edit_config(linear_attn_config={
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4,
        }),
        "each of the layers 1 to 4",
    ),
    "uneven groups": (edit_config(num_expert_group=3), "8 experts in equal groups.*found 3 groups"),
    "end token out of range": (
        write("generation_config.json", b'{"eos_token_id": [2, 999]}'), r"found \[2, 999\].*generation_config\.json"
    ),
    "no weights": (remove("model.safetensors"), r"there are no weights.*no \*\.safetensors file"),
    "weights not safetensors": (write("model.safetensors", b"x" * 99), "not valid safetensors.*model.safetensors"),
    "weights cut short": (
        lambda d: write("model.safetensors", (d / "model.safetensors").read_bytes()[:-1])(d), "not valid safetensors"
    ),
    "weight missing": (edit_weights(lambda w: w.pop(NORM)), f"a weight is missing.*1 missing.*key {NORM}"),
    "weight unknown": (
        edit_weights(lambda w: w.update({"model.extra": w[NORM]})), r"does not belong to the model.*key model\.extra"
    ),
    "weight given twice": (
        edit_weights(
            lambda w: w.update({
                "model.layers.0.block_sparse_moe.up_proj.weight": w["model.layers.0.mlp.up_proj.weight"]
            })
        ),
        "does not belong to the model",
    ),
    "weight of wrong shape": (
        edit_weights(lambda w: w.update({NORM: w[NORM][:-1].copy()})), rf"expected \[48\]; found \[47\].*key {NORM}"
    ),
    "other vocabulary": (edit_config(vocab_size=300), r"expected \[300, 48\]; found \[264, 48\]"),
    "weight of integers": (
        edit_weights(lambda w: w.update({NORM: np.ones(48, np.int8)})), f"found I8; use an unquantised.*key {NORM}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_is_refused(case: str, tmp_path: Path) -> None:
    """The error names the file, the key, what was expected and what was found."""
    edit, message = BAD[case]
    edit(write_checkpoint(tmp_path, "kimi_linear"))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path)


INDEX = "model.safetensors.index.json"
QWEN_BAD = {
    "sliding window": (edit_config(use_sliding_window=True), "key use_sliding_window"),
    "window layers": (edit_config(layer_types=["full_attention"] * 2 + ["sliding_attention"]), "key layer_types"),
    "scaled positions": (edit_config(rope_scaling={"rope_type": "longrope", "factor": 4.0}), "found longrope"),
    "heads not in groups": (edit_config(num_key_value_heads=4), "expected a divisor of 6; found 4"),
    "shard missing": (remove("model-00002-of-00002.safetensors"), r"a file is missing; expected model-00002"),
    "index wrong": (
        lambda d: shutil.copy(d / "model-00001-of-00002.safetensors", d / "model-00002-of-00002.safetensors") and None,
        "a weight is stored twice",
    ),
    "index outside": (write(INDEX, b'{"weight_map": {"a": "../model.safetensors"}}'), "expected a file's name"),
    "index without map": (write(INDEX, b"{}"), "key weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("case", QWEN_BAD)
def test_a_bad_sharded_checkpoint_is_refused(case: str, tmp_path: Path) -> None:
    """Likewise for what only Qwen3 and sharded checkpoints can have wrong."""
    edit, message = QWEN_BAD[case]
    edit(write_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path)


FAMILY_BAD = [
    ("gemma3_text", edit_config(attn_logit_softcapping=50.0), "found 50.0.*key attn_logit_softcapping"),
    ("gemma3_text", edit_config(hidden_activation="silu"), "expected gelu_pytorch_tanh; found silu"),
    ("gpt_oss", edit_config(layer_types=["full_attention"]), "a list of 2 items.*key layer_types"),
    ("gpt_oss", edit_config(layer_types=["full_attention", "linear_attention"]), "key layer_types"),
    ("gpt_oss", edit_config(sliding_window=0), "expected an integer >= 1; found 0.*key sliding_window"),
    ("gpt_oss", edit_config(num_experts_per_tok=5), "expected up to 4; found 5"),
    ("gpt_oss", edit_weights(lambda w: w.pop("model.layers.0.self_attn.sinks")), r"missing.*self_attn\.sinks"),
    ("qwen3_next", edit_config(num_experts_per_tok=9), "expected up to 4; found 9"),
    ("qwen3_next", edit_config(linear_num_key_heads=3), "expected a divisor of 4; found 3"),
    ("qwen3_next", edit_config(mlp_only_layers="all"), "expected layer numbers"),
    ("qwen3_5_text", edit_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.2}), "3 entries"),
    ("llama", edit_config(rope_scaling={"rope_type": "llama3", "factor": 2.0}), r"key rope_scaling\.low_freq_factor"),
    ("llama", edit_config(num_key_value_heads=3), "expected a divisor of 4; found 3"),
    ("deepseek_v3", edit_config(scoring_func="softmax"), "expected sigmoid; found softmax"),
    ("deepseek_v3", edit_config(topk_method="greedy"), "expected noaux_tc; found greedy"),
    ("bailing_hybrid", edit_config(kda_lower_bound=1.0), "expected a negative number; found 1.0"),
    ("minimax", edit_config(sliding_window=128), "expected no such entry; found 128.*key sliding_window"),
    ("minimax_m2", edit_config(rotary_dim=7), "an even number of 16 entries; found 7 entries"),
    ("mimo_v2_flash", edit_config(v_head_dim=None), "a required entry is missing.*key v_head_dim"),
    ("mimo_v2_flash", edit_config(v_head_dim=20), "a weight has the wrong shape"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "edit", "message"), FAMILY_BAD)
def test_a_bad_checkpoint_of_any_family_is_refused(family: str, edit: Edit, message: str, tmp_path: Path) -> None:
    """By file and key, with what was expected and what was found."""
    edit(write_checkpoint(tmp_path, family))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path)


def test_layers_for_multi_token_prediction_are_left_alone(tmp_path: Path) -> None:
    """Published checkpoints carry them after the others; without the config's word they are strangers."""
    write_checkpoint(tmp_path, "deepseek_v3")
    expected = load_checkpoint(tmp_path).tensors.keys()
    edit_weights(lambda w: w.update({"model.layers.2.eh_proj.weight": w[NORM]}))(tmp_path)
    with pytest.raises(ConfigError, match="does not belong to the model"):
        load_checkpoint(tmp_path)
    edit_config(num_nextn_predict_layers=1)(tmp_path)
    assert load_checkpoint(tmp_path).tensors.keys() == expected


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    """Also one that is a file."""
    with pytest.raises(ConfigError, match="there is no such directory"):
        load_checkpoint(tmp_path / "nowhere")


def test_the_digest_knows_the_weights_and_not_the_files(tmp_path: Path) -> None:
    """Cutting the files otherwise keeps it; one changed weight or computed entry changes it."""
    first = write_checkpoint(tmp_path / "first", "qwen3")
    second = write_checkpoint(tmp_path / "second", "qwen3")
    for file in second.glob("*.safetensors*"):
        file.unlink()
    weights = random_weights(RECIPES["qwen3"]())
    write_weights(second, weights, shards=1)
    edit_config(transformers_version="9.9", dtype="bfloat16")(second)
    digest = load_checkpoint(first).weights_digest
    assert load_checkpoint(second).weights_digest == digest
    edit_config(rope_theta=5000.0)(second)
    assert load_checkpoint(second).weights_digest != digest
    edit_config(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 100000.0})(second)
    assert load_checkpoint(second).spec == load_checkpoint(first).spec
    edit_config(rope_theta=100000.0, rope_parameters=None)(second)
    weights[NORM][3] += 1e-6
    write_weights(second, weights)
    assert load_checkpoint(second).weights_digest != digest


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_read_exactly(dtype: str, tmp_path: Path) -> None:
    """Every value becomes the float32 that it stands for."""
    write_checkpoint(tmp_path, "kimi_linear")
    weights = load_file(tmp_path / "model.safetensors")
    if dtype == "float16":
        rounded = {name: w.astype(np.float16).astype(np.float32) for name, w in weights.items()}
        save_file({name: w.astype(np.float16) for name, w in weights.items()}, tmp_path / "model.safetensors")
    else:
        bits = {name: w.view(np.uint32) >> 16 for name, w in weights.items()}
        rounded = {name: (b << 16).view(np.float32) for name, b in bits.items()}
        _save_bfloat16({name: b.astype(np.uint16) for name, b in bits.items()}, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), rounded[tensor.name])


def _save_bfloat16(bits: dict[str, Any], path: Path) -> None:
    """Write a safetensors file by hand: NumPy has no bfloat16."""
    header, offset = {}, 0
    for name, b in bits.items():
        header[name] = {"dtype": "BF16", "shape": b.shape, "data_offsets": [offset, offset + b.nbytes]}
        offset += b.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(b.tobytes() for b in bits.values()))


def test_a_tied_model_may_carry_its_second_copy(tmp_path: Path) -> None:
    """Many published ones do; it is not read."""
    write_checkpoint(tmp_path, "qwen3")
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    weights = random_weights(RECIPES["qwen3"]())
    write_weights(tmp_path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"].copy()})
    assert "lm_head.weight" not in load_checkpoint(tmp_path).tensors


def test_both_generations_of_config_describe_the_same_model(tmp_path: Path) -> None:
    """The hub's names and transformers' names."""
    write_checkpoint(tmp_path, "kimi_linear")
    hub = load_checkpoint(tmp_path).spec
    edit_config(
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], linear_attn_config=None, first_k_dense_replace=None,
        linear_num_heads=3, linear_head_dim=16, linear_conv_kernel_dim=4, model_max_length=None,
        max_position_embeddings=2048, num_experts=None, num_local_experts=8,
    )(tmp_path)  # fmt: skip
    assert load_checkpoint(tmp_path).spec == hub


def test_a_model_without_experts_is_all_dense(tmp_path: Path) -> None:
    """Whatever it says of dense layers."""
    write_checkpoint(tmp_path, "kimi_linear")
    edit_config(num_experts=None)(tmp_path)
    with pytest.raises(ConfigError, match="does not belong to the model"):
        load_checkpoint(tmp_path)


def test_a_backend_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"install prfaas-net\[cuda\]"):
        load_backend("cupy")


def test_an_unknown_backend_is_refused() -> None:
    """By name, with the names there are."""
    with pytest.raises(ConfigError, match="expected numpy or cupy; found 'torch'"):
        load_backend("torch")
