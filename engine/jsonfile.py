"""JSON files of a checkpoint, read so that a wrong entry is named and never guessed at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from prfaas_net.errors import ConfigError

__all__ = ["JsonObject", "read_json_object"]

_MISSING: Any = object()


class JsonObject:
    """An object read from a file; every access checks that the entry is there and has the right type.

    A key may be given with its aliases, since the same quantity has several names in the field; the first
    one present counts. ``null`` counts as absent.

    Args:
        file: where it was read, for the error messages.
        within: the keys that lead to this object inside the file, each followed by a dot.
    """

    def __init__(self, file: str, body: dict[str, Any], within: str = "") -> None:
        self.file = file
        self.body = body
        self._within = within

    def get(self, *keys: str, default: Any = _MISSING) -> Any:
        """The entry, unchecked.

        Raises:
            ConfigError: it is missing and has no default.
        """
        for key in keys:
            if self.body.get(key) is not None:
                return self.body[key]
        if default is _MISSING:
            raise self.error("a required entry is missing", *keys, expected="an entry", found="nothing")
        return default

    def integer(self, *keys: str, default: Any = _MISSING, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``."""
        value = self.get(*keys, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error("an entry has the wrong value", *keys, expected=f"an integer >= {minimum}", found=value)
        return value

    def number(self, *keys: str, default: Any = _MISSING) -> float:
        """A positive number."""
        value = self.get(*keys, default=default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error("an entry has the wrong value", *keys, expected="a positive number", found=value)
        return float(value)

    def flag(self, *keys: str, default: Any = _MISSING) -> bool:
        """True or false."""
        value = self.get(*keys, default=default)
        if not isinstance(value, bool):
            raise self.error("an entry has the wrong value", *keys, expected="true or false", found=value)
        return value

    def strings(self, *keys: str, length: int, among: tuple[str, ...]) -> list[str]:
        """A list of exactly ``length`` strings, each one of ``among``."""
        value = self.get(*keys)
        if not isinstance(value, list) or len(value) != length or any(item not in among for item in value):
            expected = f"a list of {length} items, each one of {', '.join(among)}"
            raise self.error("an entry has the wrong value", *keys, expected=expected, found=value)
        return value

    def section(self, *keys: str, default: Any = _MISSING) -> JsonObject:
        """A nested object."""
        value = self.get(*keys, default=default)
        if not isinstance(value, dict):
            raise self.error("an entry has the wrong value", *keys, expected="an object", found=value)
        found = next((key for key in keys if self.body.get(key) is not None), keys[0])
        return JsonObject(self.file, value, f"{self._within}{found}.")

    def require(self, key: str, expected: object, *, default: Any = _MISSING) -> None:
        """Refuse a model whose ``key`` is not ``expected``: another value is another computation.

        Raises:
            ConfigError: the entry has another value.
        """
        value = self.get(key, default=default)
        if value != expected:
            do = "use a checkpoint of a supported variant"
            wanted = "no such entry" if expected is None else expected
            raise self.error("this variant of the model is not supported", key, expected=wanted, found=value, do=do)

    def error(
        self, message: str, *keys: str, expected: object, found: object, do: str = "correct the file"
    ) -> ConfigError:
        """An error about one entry of this file, ready to raise."""
        text = repr(found) if not isinstance(found, str) else found
        key = " or ".join(self._within + key for key in keys)
        return ConfigError(message, expected=expected, found=text[:200], do=do, file=self.file, key=key)


def read_json_object(path: Path, *, do: str) -> JsonObject:
    """Read a file that holds one JSON object.

    Args:
        do: what to do if the file is not there.

    Raises:
        ConfigError: it is missing, unreadable, not JSON or not an object.
    """
    try:
        body = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError("a file is missing", expected=path.name, found="no such file", do=do, file=path) from None
    except OSError as error:
        raise ConfigError("a file cannot be read", found=error.strerror, do=do, file=path) from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(
            "a file is not JSON", expected="a JSON object", found=error, do="download it again", file=path
        ) from error
    if not isinstance(body, dict):
        raise ConfigError(
            "a file has the wrong content", expected="a JSON object", found=type(body).__name__, file=path
        )
    return JsonObject(path.name, body)
