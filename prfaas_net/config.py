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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr, ValidationError

from prfaas_net.errors import ConfigError, PrfaasError
from prfaas_net.units import parse_bytes, parse_duration, parse_rate

__all__ = [
    "Address",
    "Bytes",
    "Duration",
    "Rate",
    "Section",
    "is_loopback",
    "load_config",
    "merge",
    "parse_address",
    "read_toml",
    "split_list",
    "validate",
]


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


def split_list(raw: object) -> object:
    """Environment variables carry lists as text, separated by commas."""
    return [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw


_Model = TypeVar("_Model", bound=BaseModel)


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Write a tree over another one, in place; None values do not count."""
    for key, value in over.items():
        if isinstance(value, Mapping):
            below = base.setdefault(key, {})
            if isinstance(below, dict):
                merge(below, value)
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


def _plain(annotation: Any) -> Any:
    """Without ``Annotated`` and ``| None``."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = next((kind for kind in get_args(annotation) if kind is not type(None)), None)
    return annotation


def _type_at(model: type[BaseModel], path: tuple[Any, ...]) -> Any:
    """What stands at ``path``, through lists and tables by name; None if nothing does."""
    here: Any = model
    for step in path:
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = next((field for name, field in here.model_fields.items() if step in (name, field.alias)), None)
            here = field.annotation if field else None
        else:
            # An element of a list, or a value of a table by name.
            here = next((kind for kind in get_args(here)[::-1] if kind is not Ellipsis), None)
        here = _plain(here)
    return here


def _explain(model: type[BaseModel], error: ValidationError, source: str, below: str) -> ConfigError:
    problems = error.errors(include_url=False)
    # A key that is not known is often the reason why another one is missing.
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    place = ".".join(filter(None, (below, *map(str, first["loc"])))) or "(top)"
    if first["type"] == "extra_forbidden":
        table = _type_at(model, first["loc"][:-1])
        is_table = isinstance(table, type) and issubclass(table, BaseModel)
        known = [field.alias or name for name, field in table.model_fields.items()] if is_table else []
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return ConfigError(f"{source}: unknown key {place}", do=hint)
    given = first.get("input")
    # Secrets are not shown, nor are whole tables, which may hold some.
    hidden = first["type"] == "missing" or isinstance(given, dict) or _type_at(model, first["loc"]) in (None, SecretStr)
    found = None if hidden else repr(given)[:120]
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{source}: {place}: {message}", found=found)


def read_toml(path: Path) -> dict[str, Any]:
    """A file, as it stands.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}", found=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML", found=str(error)) from error


def validate(model: type[_Model], tree: Mapping[str, Any], source: str, place: str = "") -> _Model:
    """A table as what it describes.

    Args:
        source: the file it came from, and ``place`` its name there, for errors.

    Raises:
        ConfigError: a key is unknown or a value does not fit.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise _explain(model, error, source, place) from error


def load_config(
    model: type[_Model],
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    env_prefix: str | None = None,
    environ: Mapping[str, str] = os.environ,
    read: Callable[[Path], dict[str, Any]] = read_toml,
) -> _Model:
    """Read, merge and validate a configuration.

    Args:
        path: a TOML file, or None for defaults.
        flags: values from the command line; None values do not count.
        env_prefix: environment variables that begin with it apply; ``__`` separates tables.
        read: makes a tree of the file.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or a value does not fit.
    """
    tree: dict[str, Any] = {} if path is None else read(path)
    if env_prefix:
        merge(tree, _from_environment(env_prefix, environ))
    merge(tree, flags or {})
    return validate(model, tree, "configuration" if path is None else str(path))
