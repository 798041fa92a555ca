"""Chat templates: how a checkpoint wants a conversation written as text (Jinja, in a sandbox)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.jsonfile import JsonObject, read_json_object
from prfaas_net.errors import ConfigError, InvalidRequest

__all__ = ["ChatTemplate", "load_chat_template"]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text, untrusted: it comes with the weights.
        special_tokens: the names that it may use, such as ``bos_token``.
        file: where it was read, for the error messages.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], file: str) -> None:
        # The environment that templates are written for: Hugging Face's, with the same three helpers.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError("the chat template is not valid Jinja", found=error, file=file) from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """A conversation as text that ends where the assistant's answer starts.

        Raises:
            InvalidRequest: the template refuses the messages, or cannot be applied to them.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, SecurityError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                "the chat template does not accept these messages", found=error, do="check roles, order and content"
            ) from error


def load_chat_template(directory: Path) -> ChatTemplate | None:
    """From ``chat_template.jinja``, or else from ``tokenizer_config.json``; None if neither has one.

    Raises:
        ConfigError: it cannot be read.
    """
    path = directory / "tokenizer_config.json"
    config = read_json_object(path, do="") if path.exists() else JsonObject(path.name, {})
    special_tokens = {name: _token_text(config.body.get(name)) for name in _SPECIAL_TOKENS}
    special_tokens = {name: text for name, text in special_tokens.items() if text}
    file = directory / "chat_template.jinja"
    if file.exists():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens, file.name)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("a file cannot be read", found=error, file=file) from error
    source = config.get("chat_template", default=None)
    if isinstance(source, list):  # several, by name
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return ChatTemplate(source, special_tokens, path.name) if isinstance(source, str) else None


def _token_text(entry: Any) -> str:
    """A special token's text, which is stored plain or in an object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""


def _tojson(value: Any, indent: int | None = None) -> str:
    """JSON as it is: Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    """Lets a template refuse a conversation."""
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    """Today, for templates that tell the model the date."""
    return datetime.now().astimezone().strftime(format_)
