"""Configs of tiny models, one a family: every variant that a family has is in one of them.

Names of weights are the checkpoints' own; their shapes are those that the engine asks for. That both are right is
shown when the references are made: transformers loads these very files.
"""

from __future__ import annotations

from typing import Any

from engine.families import model_spec
from engine.jsonfile import JsonObject

__all__ = ["CONFIGS", "stored_shapes"]

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
HIDDEN, WINDOW = 48, 24
_COMMON = {
    "hidden_size": HIDDEN, "max_position_embeddings": 2048, "tie_word_embeddings": False, "dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MLA = {
    "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_GDN = {
    "linear_key_head_dim": 12, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _COMMON | _MLA | {
        "architectures": ["BailingHybridForCausalLM"], "num_hidden_layers": 3, "intermediate_size": 80,
        "layer_group_size": 3, "head_dim": 16, "q_lora_rank": 20, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 2,
        "moe_intermediate_size": 24, "num_expert_group": 4, "topk_group": 2, "moe_renormalize": True,
        "routed_scaling_factor": 1.5, "kda_lower_bound": -3.0, "rope_theta": 600000.0, "rms_norm_eps": 1e-6,
        "linear_head_dim": 16, "linear_num_heads": 3,
    },
    "deepseek_v3": _COMMON | _MLA | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "intermediate_size": 80,
        "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 4,
        "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.0, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "rope_scaling": {
            "type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 256,
        },
    },
    "gemma3_text": _COMMON | _GQA | {
        "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 3, "intermediate_size": 80,
        "layer_types": [SLIDING, SLIDING, FULL], "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
            SLIDING: _ROPE,
        },
    },
    "gpt_oss": _COMMON | _GQA | {
        "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 2, "intermediate_size": 24,
        "layer_types": [SLIDING, FULL], "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
        "attention_bias": True, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 256,
        },
    },
    "llama": _COMMON | _GQA | {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "intermediate_size": 80, "mlp_bias": True,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mimo_v2_flash": _COMMON | {
        "architectures": ["MiMoV2FlashForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 24, "v_head_dim": 16, "num_hidden_layers": 3, "intermediate_size": 80,
        "layer_types": [FULL, SLIDING, FULL], "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": WINDOW, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "attention_value_scale": 0.7, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        },
    },
    "minimax": _COMMON | _GQA | {
        "architectures": ["MiniMaxForCausalLM"], "num_hidden_layers": 3, "intermediate_size": 24,
        "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 32,
        "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.8, "full_attn_alpha_factor": 1.2,
        "full_attn_beta_factor": 0.9, "mlp_alpha_factor": 1.1, "mlp_beta_factor": 0.7, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "minimax_m2": _COMMON | _GQA | {
        "architectures": ["MiniMaxM2ForCausalLM"], "num_hidden_layers": 2, "intermediate_size": 24,
        "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "rope_theta": 5000000.0,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_5_moe_text": _COMMON | _GQA | _GDN | _MOE | {
        "architectures": ["Qwen3_5MoeForCausalLM"], "num_hidden_layers": 2, "layer_types": [LINEAR, FULL],
        "shared_expert_intermediate_size": 32, "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPE | {
            "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True
        },
    },
    "qwen3_5_text": _COMMON | _GQA | _GDN | {
        "architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 3, "intermediate_size": 80,
        "layer_types": [LINEAR, FULL, LINEAR], "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPE | {
            "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True
        },
    },
    "qwen3_next": _COMMON | _GQA | _GDN | _MOE | {
        "architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 3, "intermediate_size": 80,
        "full_attention_interval": 3, "mlp_only_layers": [0], "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32, "attention_bias": True, "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
    },
}  # fmt: skip

# Ours, and what the family's checkpoints say instead.
_STORED: dict[str, tuple[tuple[str, str], ...]] = {
    "bailing_hybrid": (
        ("model.embed_tokens.", "model.word_embeddings."), (".self_attn.o_proj.", ".attention.dense."),
        (".self_attn.", ".attention."), (".gate.e_score_correction_bias", ".gate.expert_bias"),
    ),
    "minimax": (
        (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."),
    ),
    "minimax_m2": (
        (".mlp.gate.e_score", ".mlp.e_score"), (".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."), (".down_proj.", ".w2."),
    ),
}  # fmt: skip
_LINEAR_ATTENTION = ("in_proj", "out_proj", "conv1d", "A_log", "dt_bias", "self_attn.norm")


def stored_shapes(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every weight by the checkpoint's name for it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in model_spec(JsonObject("config.json", config)).weight_shapes().items():
        for ours, theirs in _STORED.get(family, ()):
            name = name.replace(ours, theirs)
        if family.startswith("qwen3_") and any(part in name for part in _LINEAR_ATTENTION):
            name = name.replace(".self_attn.", ".linear_attn.")
        shapes[name] = shape
    return shapes
