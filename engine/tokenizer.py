"""Text to tokens and back, by the checkpoint's own ``tokenizer.json`` and chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from engine.chat_template import ChatTemplate, load_chat_template
from engine.jsonfile import read_json_object
from prfaas_net.errors import ConfigError, InvalidRequest

__all__ = ["TextStream", "Tokenizer"]

SHORT_CHARS = 512


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        template: how a conversation is written as text; None if the checkpoint says nothing.
    """

    def __init__(self, fast: FastTokenizer, template: ChatTemplate | None) -> None:
        self._fast = fast
        self._template = template

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and the chat template of a checkpoint directory.

        Raises:
            ConfigError: a file is missing or damaged, or the tokenizer has tokens that the model lacks.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        do = "give the directory of a Hugging Face checkpoint with a fast tokenizer"
        read_json_object(path, do=do)  # for its clearer errors
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError("a file is not a tokenizer", found=error, do=do, file=path.name) from error
        fast.no_truncation()
        fast.no_padding()
        vocab_size = read_json_object(directory / "config.json", do=do).integer("vocab_size")
        highest = max(fast.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab_size:
            raise ConfigError(
                "the tokenizer has tokens that the model lacks",
                expected=f"token ids under vocab_size {vocab_size}, as in config.json",
                found=f"token id {highest}",
                do="use tokenizer.json and config.json of the same checkpoint",
                file=path.name,
            )
        return cls(fast, load_chat_template(directory))

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that ``tokenizer.json`` itself puts around a text."""
        return self._ids(text, special=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        return self._fast.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """One token as text by itself, special ones too; incomplete characters as U+FFFD."""
        return self._fast.decode([token], skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a chat prompt that ends where the assistant's answer starts.

        Raises:
            InvalidRequest: the model has no chat template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template", do="send a plain prompt, or add chat_template.jinja to the checkpoint"
            )
        # The template writes every special token itself.
        return self._ids(self._template.render(messages), special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # The "fast" call leaves out where in the text each token lies, a third of the work; calling it costs more.
        if len(text) > SHORT_CHARS:
            return list(self._fast.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def stream(self) -> TextStream:
        """A decoder for one answer."""
        return TextStream(self._fast)


class TextStream:
    """Turns one answer's tokens into text, never cutting inside a character."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._stream = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._n_chars = 0

    def push(self, token: int) -> str:
        """The text that this token completed; empty while a character is incomplete."""
        self._token_ids.append(token)
        text = self._stream.step(self._fast, token) or ""
        self._n_chars += len(text)
        return text

    def flush(self) -> str:
        """What is left when no token follows: incomplete characters as U+FFFD."""
        rest = self._fast.decode(self._token_ids, skip_special_tokens=True)[self._n_chars :]
        self._n_chars += len(rest)
        return rest
