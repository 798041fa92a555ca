"""Tiny random checkpoints, the same on every machine: what the reference outputs in ``fixtures/`` belong to.

The weights come from the raw bits of a Philox generator, whose stream NumPy guarantees. Every one of them is
scaled to keep the variance of what passes through it: with the usual small initial weights the logits hardly
depend on the prompt and lie so close together that greedy tokens prove nothing.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engine.recipes import CONFIGS, stored_shapes

__all__ = ["RECIPES", "Floats", "Recipe", "random_weights", "write_checkpoint", "write_recipe", "write_weights"]

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + 3  # the bytes, and three merges
HIDDEN = 48


@dataclass(frozen=True)
class Recipe:
    """One checkpoint.

    Attributes:
        config: its config.json.
        shapes: of every weight, by the checkpoint's name for it.
        shards: how many files the weights are cut into.
        norm_offset: what the model adds to the weights of its norms (but for that of Gated DeltaNet).
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    shards: int = 1
    seed: int = field(default=7)
    norm_offset: float = 0.0


def _mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, HIDDEN),
        f"{prefix}up_proj.weight": (inner, HIDDEN),
        f"{prefix}down_proj.weight": (HIDDEN, inner),
    }


def _outer(n_layers: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB_SIZE, HIDDEN)
    for i in range(n_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = (HIDDEN,)
    return shapes


def _kimi_linear() -> Recipe:
    """As the hub has it: layers counted from 1, ``mlp`` for dense layers; experts in groups; queries' own latent."""
    heads, dim, kernel, kv_rank, q_rank, nope, rope, v_dim, experts, inner = 3, 16, 4, 24, 20, 12, 8, 16, 8, 24
    width = heads * dim
    config = {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": heads, "kv_lora_rank": kv_rank, "q_lora_rank": q_rank, "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope, "v_head_dim": v_dim, "mla_use_nope": True, "hidden_act": "silu",
        "linear_attn_config": {
            "kda_layers": [1, 3, 4], "full_attn_layers": [2], "num_heads": heads, "head_dim": dim,
            "short_conv_kernel_size": kernel,
        },
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": experts, "num_experts_per_token": 3,
        "num_shared_experts": 2, "moe_intermediate_size": inner, "num_expert_group": 4, "topk_group": 2,
        "moe_renormalize": True, "routed_scaling_factor": 1.5, "moe_router_activation_func": "sigmoid",
        "rms_norm_eps": 1e-5, "model_max_length": 2048, "tie_word_embeddings": False, "dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    shapes = _outer(4, tied=False)
    for i in range(4):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.block_sparse_moe."
        if i == 1:
            shapes |= {
                f"{attention}q_a_proj.weight": (q_rank, HIDDEN),
                f"{attention}q_a_layernorm.weight": (q_rank,),
                f"{attention}q_b_proj.weight": (heads * (nope + rope), q_rank),
                f"{attention}kv_a_proj_with_mqa.weight": (kv_rank + rope, HIDDEN),
                f"{attention}kv_a_layernorm.weight": (kv_rank,),
                f"{attention}kv_b_proj.weight": (heads * (nope + v_dim), kv_rank),
                f"{attention}o_proj.weight": (HIDDEN, heads * v_dim),
            }
        else:
            for name in ("q", "k", "v"):
                shapes[f"{attention}{name}_proj.weight"] = (width, HIDDEN)
                shapes[f"{attention}{name}_conv1d.weight"] = (width, 1, kernel)
            for name in ("f", "g"):
                shapes[f"{attention}{name}_a_proj.weight"] = (dim, HIDDEN)
                shapes[f"{attention}{name}_b_proj.weight"] = (width, dim)
            shapes |= {
                f"{attention}b_proj.weight": (heads, HIDDEN),
                f"{attention}A_log": (1, 1, heads, 1),
                f"{attention}dt_bias": (width,),
                f"{attention}o_norm.weight": (dim,),
                f"{attention}o_proj.weight": (HIDDEN, width),
            }
        if i == 0:
            shapes |= _mlp(f"model.layers.{i}.mlp.", 80)
            continue
        shapes |= _mlp(f"{mlp}shared_experts.", 2 * inner)
        shapes[f"{mlp}gate.weight"] = (experts, HIDDEN)
        shapes[f"{mlp}gate.e_score_correction_bias"] = (experts,)
        for e in range(experts):
            shapes[f"{mlp}experts.{e}.w1.weight"] = (inner, HIDDEN)
            shapes[f"{mlp}experts.{e}.w2.weight"] = (HIDDEN, inner)
            shapes[f"{mlp}experts.{e}.w3.weight"] = (inner, HIDDEN)
    return Recipe(config, shapes)


def _qwen3() -> Recipe:
    """As the hub has it: ``rope_theta`` beside the rest, tied embeddings; biases; cut into two files."""
    heads, kv_heads, dim, inner = 6, 2, 16, 96
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN, "intermediate_size": inner, "num_hidden_layers": 3, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": dim, "attention_bias": True, "rope_theta": 100000.0,
        "rope_scaling": None, "hidden_act": "silu", "use_sliding_window": False, "sliding_window": None,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    shapes = _outer(3, tied=True)
    for i in range(3):
        attention = f"model.layers.{i}.self_attn."
        for name, n_in, n_out in (
            ("q_proj", HIDDEN, heads * dim),
            ("k_proj", HIDDEN, kv_heads * dim),
            ("v_proj", HIDDEN, kv_heads * dim),
            ("o_proj", heads * dim, HIDDEN),
        ):
            shapes[f"{attention}{name}.weight"] = (n_out, n_in)
            shapes[f"{attention}{name}.bias"] = (n_out,)
        shapes[f"{attention}q_norm.weight"] = shapes[f"{attention}k_norm.weight"] = (dim,)
        shapes |= _mlp(f"model.layers.{i}.mlp.", inner)
    return Recipe(config, shapes, shards=2)


def _of_config(family: str) -> Recipe:
    """A family of which nothing more is told than its config."""
    config = {"model_type": family, "vocab_size": VOCAB_SIZE, "hidden_act": "silu"} | CONFIGS[family]
    offset = 1.0 if family in ("gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") else 0.0
    return Recipe(config, stored_shapes(family, config), norm_offset=offset)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "kimi_linear": _kimi_linear,
    "qwen3": _qwen3,
    **{family: functools.partial(_of_config, family) for family in CONFIGS},
}


def _uniform(n: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in (0, 1] from a generator's raw bits."""
    bits = np.random.Philox(key=seed).random_raw(n) >> np.uint64(11)
    return (bits.astype(np.float64) + 1.0) / 2.0**53


def _normal(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Standard normal numbers, by Box and Muller's transform."""
    n = int(np.prod(shape))
    u = _uniform(2 * n, seed)
    return (np.sqrt(-2.0 * np.log(u[:n])) * np.cos(2.0 * np.pi * u[n:])).reshape(shape)


def random_weights(recipe: Recipe) -> dict[str, Floats]:
    """Every weight; each depends on the seed and its own name alone."""
    weights = {}
    for name, shape in recipe.shapes.items():
        seed = (recipe.seed << 32) + zlib.crc32(name.encode())
        values = _normal(shape, seed)
        if name.endswith("A_log"):
            values = np.log(3.0 * _uniform(values.size, seed).reshape(shape) + 0.05)  # decay rates .05 to 3.05
        elif name.endswith("dt_bias"):
            values = 0.5 * values - 2.0
        elif "norm" in name:
            # Gemma's norms after a half make layers count beside the tied embedding.
            after = recipe.config["model_type"] == "gemma3_text" and "post_" in name
            values = (3.0 if after else 1.0) + 0.1 * values
            if not name.endswith("linear_attn.norm.weight"):
                values = values - recipe.norm_offset
        elif "sink" in name:
            pass
        elif "experts." in name and name.endswith("_proj"):  # stored the other way round
            values = values / shape[-2] ** 0.5
        elif "conv1d" in name:
            values = 0.5 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        elif "embed_tokens" in name:
            # A tied embedding draws every answer towards its own last token, so it is kept small,
            values = values * (0.3 / shape[-1] ** 0.5 if recipe.config["tie_word_embeddings"] else 1.0)
        elif "word_embeddings" in name:
            pass
        elif "lm_head" in name:
            values = 4.0 * values / shape[-1] ** 0.5
        else:
            values = values / shape[-1] ** 0.5
        weights[name] = values.astype(np.float32)
    if recipe.config["tie_word_embeddings"]:
        # and the logits are made large here instead.
        offset = np.float32(recipe.norm_offset)
        weights["model.norm.weight"] = 12 * (weights["model.norm.weight"] + offset) - offset
    return weights


def write_weights(directory: Path, weights: Mapping[str, Floats], shards: int = 1) -> None:
    """The weights as one file, or as several with an index."""
    names = sorted(weights)
    if shards == 1:
        save_file(dict(weights), directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names[shard::shards]}, directory / file)
        weight_map |= dict.fromkeys(names[shard::shards], file)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(directory: Path, family: str) -> Path:
    """A whole Hugging Face directory for a family of ``RECIPES``; returns it."""
    return write_recipe(directory, RECIPES[family]())


def write_recipe(directory: Path, recipe: Recipe) -> Path:
    """A whole Hugging Face directory; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(recipe.config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": [2, 4], "pad_token_id": 0, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_weights(directory, random_weights(recipe), recipe.shards)
    _tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def _tokenizer() -> Tokenizer:
    """Byte-level BPE with next to no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n")]
    pieces = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
