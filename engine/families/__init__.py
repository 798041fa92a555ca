"""Model families: each turns a ``config.json`` into a :class:`~engine.spec.ModelSpec`.

A family is one function in one module, entered here under its ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.families.bailing_hybrid import bailing_hybrid_spec
from engine.families.deepseek_v3 import deepseek_v3_spec
from engine.families.gemma3 import gemma3_spec
from engine.families.gpt_oss import gpt_oss_spec
from engine.families.kimi_linear import kimi_linear_spec
from engine.families.llama import llama_spec, qwen3_spec
from engine.families.mimo_v2_flash import mimo_v2_flash_spec
from engine.families.minimax import minimax_m2_spec, minimax_spec
from engine.families.qwen3_next import qwen3_5_moe_spec, qwen3_5_spec, qwen3_next_spec
from engine.jsonfile import JsonObject
from engine.spec import ModelSpec

__all__ = ["FAMILIES", "model_spec"]

FAMILIES: dict[str, Callable[[JsonObject], ModelSpec]] = {
    "bailing_hybrid": bailing_hybrid_spec,
    "deepseek_v3": deepseek_v3_spec,
    "gemma3_text": gemma3_spec,
    "gpt_oss": gpt_oss_spec,
    "kimi_linear": kimi_linear_spec,
    "llama": llama_spec,
    "mimo_v2_flash": mimo_v2_flash_spec,
    "minimax": minimax_spec,
    "minimax_m2": minimax_m2_spec,
    "qwen3": qwen3_spec,
    "qwen3_5_moe_text": qwen3_5_moe_spec,
    "qwen3_5_text": qwen3_5_spec,
    "qwen3_next": qwen3_next_spec,
}


def model_spec(config: JsonObject) -> ModelSpec:
    """What the model of a ``config.json`` is made of.

    Raises:
        ConfigError: its family or variant is not supported, or an entry is missing or wrong.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise config.error(
            "this kind of model is not supported", "model_type",
            expected=", ".join(sorted(FAMILIES)), found=model_type, do="use a checkpoint of a supported family",
        )  # fmt: skip
    return FAMILIES[model_type](config)
