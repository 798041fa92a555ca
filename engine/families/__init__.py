"""Model families: each turns a ``config.json`` into a :class:`~engine.spec.ModelSpec`.

A family is one module with one function, entered here under its ``model_type``.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.families.kimi_linear import kimi_linear_spec
from engine.families.qwen3 import qwen3_spec
from engine.jsonfile import JsonObject
from engine.spec import ModelSpec

__all__ = ["FAMILIES", "model_spec"]

FAMILIES: dict[str, Callable[[JsonObject], ModelSpec]] = {
    "kimi_linear": kimi_linear_spec,
    "qwen3": qwen3_spec,
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
            expected=" or ".join(sorted(FAMILIES)), found=model_type, do="use a checkpoint of a supported family",
        )  # fmt: skip
    return FAMILIES[model_type](config)
