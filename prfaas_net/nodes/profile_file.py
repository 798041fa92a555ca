"""The profile of a model on a node's machine, as ``python -m engine profile DIR --json`` writes it."""

from __future__ import annotations

from pathlib import Path

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prfaas_net.errors import ConfigError
from prfaas_net.nodes.messages import ProfileModel

__all__ = ["read_profile"]


class _Prefill(BaseModel):
    tokens: int = Field(ge=1)
    seconds: float = Field(gt=0)


class _Step(BaseModel):
    batch: int = Field(ge=1)
    step_seconds: float = Field(gt=0)


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore")

    layout: str
    prefill: list[_Prefill] = Field(min_length=2)
    decode: list[_Step] = Field(min_length=1)


def read_profile(path: Path, layout: str) -> ProfileModel:
    """What of the file a scheduler needs.

    Args:
        layout: fingerprint of the cache layout that is served.

    Raises:
        ConfigError: it cannot be read, or is of another model.
    """
    do = f"write it anew: python -m engine profile MODEL_DIRECTORY --json > {path}"
    try:
        body = _File.model_validate(orjson.loads(path.read_bytes()))
    except (OSError, orjson.JSONDecodeError, ValidationError) as error:
        found = str(error).splitlines()[0]
        raise ConfigError(f"the profile {path} cannot be read", found=found, do=do) from error
    if body.layout != layout:
        raise ConfigError(
            f"the profile {path} is of another model or precision", expected=layout, found=body.layout, do=do
        )
    knots = sorted({row.tokens: row.seconds for row in body.prefill}.items())
    largest = max(body.decode, key=lambda step: step.batch)
    return ProfileModel(prefill=tuple(knots), decode_step_s=largest.step_seconds, max_batch=largest.batch)
