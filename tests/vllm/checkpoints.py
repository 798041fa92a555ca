"""Checkpoints that vLLM's CPU backend accepts: its kernels know only some sizes of heads and latents.

Made like those of the engine's tests, from a seed, so that none of them has to be kept in the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.engine.checkpoints import Recipe, write_recipe
from tests.engine.recipes import stored_shapes

__all__ = ["MODELS", "make"]

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
_COMMON = {
    "vocab_size": 512, "hidden_size": 128, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu",
    "num_attention_heads": 4,
}  # fmt: skip
_GQA = {"num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    # sliding windows and full attention, with sinks
    "gptoss-swa-sink": _COMMON | _GQA | {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4,
        "intermediate_size": 128, "layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 2048,
        },
    },
    # Gated DeltaNet and full attention
    "qwen3next-gdn-gqa": _COMMON | _GQA | {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4,
        "intermediate_size": 256, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    # latent attention of the real size: vLLM's kernels know only 512 + 64
    "deepseekv3-mla576": _COMMON | {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2,
        "intermediate_size": 256, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64, "v_head_dim": 32, "q_lora_rank": None, "moe_intermediate_size": 64,
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6,
        "rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
# Of the norms' weights: see tests.engine.checkpoints.
_NORM_OFFSETS = {"qwen3_next": 1.0}


def make(directory: Path, name: str, *, seed: int = 7) -> Path:
    """Write a model's directory; returns it."""
    config = MODELS[name]
    family = config["model_type"]
    shapes = stored_shapes(family, config)
    return write_recipe(directory, Recipe(config, shapes, seed=seed, norm_offset=_NORM_OFFSETS.get(family, 0.0)))


if __name__ == "__main__":
    for model in MODELS:
        print(make(Path(sys.argv[1]) / model, model))
