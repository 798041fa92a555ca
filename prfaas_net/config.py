"""Configuration: one TOML file, environment variables over it, flags over both.

A configuration is a tree of pydantic models. Unknown keys are errors that suggest the nearest name, values with
units are written as people write them (``"10Gbps"``, ``"250ms"``), and every problem is reported as one line that
names the place.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from prfaas_net.errors import ConfigError, PrfaasError
from prfaas_net.units import parse_bytes, parse_duration, parse_rate

__all__ = ["Address", "Bytes", "Duration", "Rate", "Section", "is_loopback", "load_config", "parse_address"]


class Section(BaseModel):
    """Base of every configuration table: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _value(parse: Any) -> Any:
    def validate(raw: Any) -> Any:
        try:
            return parse(raw)
        except PrfaasError as error:
            raise ValueError(error.line()) from error

    return BeforeValidator(validate)


Bytes = Annotated[int, _value(parse_bytes)]
Rate = Annotated[int, _value(parse_rate)]
Duration = Annotated[float, _value(parse_duration)]


def parse_address(text: str | tuple[str, int] | list[Any]) -> tuple[str, int]:
    """``"127.0.0.1:8000"`` or ``"[::1]:8000"`` to (host, port).

    Raises:
        ConfigError: the text is not an address.
    """
    if isinstance(text, (tuple, list)) and len(text) == 2:
        return str(text[0]), int(text[1])
    host, _, port = str(text).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError("not an address", expected="HOST:PORT, such as 127.0.0.1:8000", found=repr(text))
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address: the only kind that may be open without authentication."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Address = Annotated[tuple[str, int], _value(parse_address)]

_Model = TypeVar("_Model", bound=BaseModel)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = base.setdefault(key, {})
            if isinstance(below, dict):
                _merge(below, value)
        elif value is not None:
            base[key] = value
    return base


def _from_environment(prefix: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """``PRFAAS_DECODE__KV__LISTEN=x`` with prefix ``PRFAAS_DECODE__`` to ``{"kv": {"listen": "x"}}``."""
    tree: dict[str, Any] = {}
    for name, value in environ.items():
        if not name.startswith(prefix):
            continue
        *parents, leaf = name.removeprefix(prefix).lower().split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def _names_at(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names that the table at ``path`` may hold."""
    for step in path:
        field = model.model_fields.get(step) if isinstance(step, str) else None
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _explain(model: type[BaseModel], error: ValidationError, source: str) -> ConfigError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(step) for step in first["loc"]) or "(top)"
    if first["type"] == "extra_forbidden":
        known = _names_at(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return ConfigError(f"{source}: unknown key {place}", do=hint)
    found = None if first["type"] == "missing" else repr(first.get("input"))[:120]
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{source}: {place}: {message}", found=found)


def load_config(
    model: type[_Model],
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    env_prefix: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> _Model:
    """Read, merge and validate a configuration.

    Args:
        path: a TOML file, or None for defaults.
        flags: values from the command line; None values do not count.
        env_prefix: environment variables that begin with it apply; ``__`` separates tables.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or a value does not fit.
    """
    tree: dict[str, Any] = {}
    source = "configuration"
    if path is not None:
        source = str(path)
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}", found=error.strerror) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML", found=str(error)) from error
    if env_prefix:
        _merge(tree, _from_environment(env_prefix, environ))
    _merge(tree, flags or {})
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise _explain(model, error, source) from error
