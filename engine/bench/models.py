"""Random models of middling size, one of each kind of layer: hidden size 512, 8 layers, dense where possible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.families import model_spec
from engine.jsonfile import JsonObject

__all__ = ["BENCH_MODELS", "write_model"]

_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"
_COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "max_position_embeddings": 32768, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
_MLA = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": None, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
_THREE_TO_ONE = [_LINEAR, _LINEAR, _LINEAR, _FULL] * 2

BENCH_MODELS: dict[str, dict[str, Any]] = {
    "kda-mla": _COMMON | _MLA | {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "layer_types": _THREE_TO_ONE,
        "mlp_layer_types": ["dense"] * 8, "linear_num_heads": 8, "linear_head_dim": 64, "linear_conv_kernel_dim": 4,
        "model_max_length": 32768, "mla_use_nope": True,
    },
    "gdn-gqa": _COMMON | _GQA | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "layer_types": _THREE_TO_ONE,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        },
    },
    "lightning-gqa": _COMMON | _GQA | {
        "architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "layer_types": _THREE_TO_ONE,
        "intermediate_size": 768, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 256,
        "rope_theta": 10000.0,
    },
    "swa-gqa": _COMMON | _GQA | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 512,
        "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL] * 2, "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "mla": _COMMON | _MLA | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 512,
        "rope_theta": 10000.0,
    },
    "gqa": _COMMON | _GQA | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 10000.0,
    },
}  # fmt: skip
# Ours, and what the family's checkpoints say instead.
_STORED = {
    "minimax": ((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."),
                (".down_proj.", ".w2.")),
    "qwen3_5_text": tuple(
        (f".self_attn.{name}", f".linear_attn.{name}")
        for name in ("in_proj", "out_proj", "conv1d", "A_log", "dt_bias", "norm.")
    ),
}  # fmt: skip


def write_model(directory: Path, kind: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint directory with random weights, its config changed in some entries; returns it."""
    config = BENCH_MODELS[kind] | dict(changes or {})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    draw, weights = np.random.default_rng(0), {}
    for name, shape in model_spec(JsonObject("config.json", config)).weight_shapes().items():
        values = draw.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            values = 1 + np.float32(0.1) * values
        elif name.endswith("A_log"):
            values = np.log(np.float32(0.05) + np.abs(values))
        else:
            values /= np.float32(shape[-1] ** 0.5)
        for ours, theirs in _STORED.get(config["model_type"], ()):
            name = name.replace(ours, theirs)
        weights[name] = values
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
