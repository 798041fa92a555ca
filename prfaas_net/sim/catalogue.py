"""Models and hardware that come along: configurations of public models, and how fast they prefill."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from prfaas_net.errors import ConfigError
from prfaas_net.scheduling import DecodeProfile, KvSize, NodeProfile, PiecewiseLinear, kv_size_of_config
from prfaas_net.sim.case_study import GBPS, paper, paper_workload, profile

__all__ = ["PAPER_MODEL", "load_model", "load_profile", "model_names"]

# The paper's internal 1T model: its KVCache is known by a formula, not by a configuration.
PAPER_MODEL = "paper-1T"
# Hardware whose profile for the 1T model follows from the paper.
HARDWARE = ("H200", "H20")


def model_names() -> list[str]:
    """Models that are known by name."""
    folder = resources.files("prfaas_net.sim").joinpath("data/models")
    return sorted([PAPER_MODEL, *(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json"))])


def _read(path: Path) -> Mapping[str, Any]:
    try:
        body = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}", found=error.strerror) from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON", found=error) from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path} is not an object", found=type(body).__name__)
    return body


def load_model(name: str, *, kv_bytes: int = 2) -> tuple[str, KvSize]:
    """A model's name and S_kv(l), from a name of :func:`model_names`, a ``config.json``, or its directory.

    Raises:
        ConfigError: there is none, or an entry of it is missing.
    """
    if name == PAPER_MODEL:
        return name, paper_workload().kv
    if name in model_names():
        shipped = resources.files("prfaas_net.sim").joinpath(f"data/models/{name}.json")
        return name, kv_size_of_config(orjson.loads(shipped.read_bytes()), kv_bytes=kv_bytes, place=name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ConfigError(
            "no such model", expected=f"a config.json, or one of {', '.join(model_names())}", found=repr(name)
        )
    body = _read(path)
    label = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return label, kv_size_of_config(body, kv_bytes=kv_bytes, place=str(path))


def load_profile(name: str, model: str, kv: KvSize) -> tuple[NodeProfile, str]:
    """How fast an instance is, and where that is from.

    For ``H200``, prefill times of the paper's models follow from its table 3 (T = S / Phi) and those of its 1T model
    from table 5; other models are given the latter. ``H20`` is the paper's 1T model, or another model as much slower
    than on H200 as that one is. Anything else is a file ``{"knots_tokens": [...], "prefill_s": [...], "decode":
    {"step_s": ..., "max_batch": ...}}``.

    Raises:
        ConfigError: the file cannot be used.
    """
    if name not in HARDWARE:
        path = Path(name)
        if not path.exists():
            raise ConfigError(
                "no such profile", expected=f"a JSON file, or one of {', '.join(HARDWARE)}", found=repr(name)
            )
        return _profile_of(_read(path), path), f"measured, {path.name}"
    table = paper()["phi_gbps"]
    phi = table.get(model) or table.get(model.replace("-", " "))
    ours = profile(name)
    if not isinstance(phi, list):
        source = "the paper's table 5" if model == PAPER_MODEL else "the paper's 1T model: give a measured one instead"
        return ours, source
    knots = table["lengths_tokens"]
    seconds = [8.0 * kv(tokens) / (gbps * GBPS) for tokens, gbps in zip(knots, phi, strict=True)]
    if name != "H200":
        seconds = [s * ours.prefill_s(n) / profile("H200").prefill_s(n) for n, s in zip(knots, seconds, strict=True)]
    source = "the paper's table 3" + ("" if name == "H200" else ", slowed down as its 1T model is on H20")
    return NodeProfile(name, PiecewiseLinear.of(knots, seconds), ours.decode), source


def _profile_of(body: Mapping[str, Any], path: Path) -> NodeProfile:
    for key in ("knots_tokens", "prefill_s"):
        if not isinstance(body.get(key), list):
            raise ConfigError(f"{path}: {key} is missing", expected="a list of numbers")
    decode = body.get("decode")
    if decode is not None and not (isinstance(decode, dict) and {"step_s", "max_batch"} <= decode.keys()):
        raise ConfigError(f"{path}: decode cannot be used", expected='{"step_s": seconds, "max_batch": requests}')
    return NodeProfile(
        path.stem,
        PiecewiseLinear.of(body["knots_tokens"], body["prefill_s"]),
        DecodeProfile(decode["step_s"], decode["max_batch"]) if decode else profile("H20").decode,
    )
