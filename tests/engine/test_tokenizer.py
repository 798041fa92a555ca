"""Text to tokens and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

import prfaas_net
from engine import Tokenizer
from prfaas_net.errors import ConfigError, InvalidRequest
from prfaas_net.nodes import engine_api
from tests.engine.checkpoints import write_checkpoint

DEMO = Tokenizer.load(Path(prfaas_net.__file__).parent / "data" / "demo_model")
USER = {"role": "user", "content": "hi"}


@given(st.text())
def test_any_text_survives(text: str) -> None:
    """Encoding and decoding gives it back."""
    assert DEMO.decode(DEMO.encode(text)) == text


@given(st.lists(st.integers(0, 2047), max_size=40))
def test_a_stream_gives_the_whole_text(tokens: list[int]) -> None:
    """Pieces and rest together are the text of all tokens, valid or not."""
    stream = DEMO.stream()
    assert "".join(stream.push(token) for token in tokens) + stream.flush() == DEMO.decode(tokens)


def test_a_stream_never_cuts_a_character() -> None:
    """A piece comes when its last byte has come; what stays incomplete comes as U+FFFD."""
    tokens = DEMO.encode("é🎉")
    stream = DEMO.stream()
    pieces = [stream.push(token) for token in tokens[:-1]]
    assert [piece for piece in pieces if piece] == ["é"]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_not_text() -> None:
    """Neither streamed nor decoded."""
    end = 4
    stream = DEMO.stream()
    assert [stream.push(token) for token in [*DEMO.encode("a"), end]] == ["a", ""]
    assert stream.flush() == ""


def test_the_tokenizer_is_what_a_gateway_expects() -> None:
    """It satisfies the gateway's protocol (checked by the type checker)."""
    api: engine_api.TextTokenizer = DEMO
    stream: engine_api.TextStream = api.stream()
    assert stream.push(api.encode("x")[0]) == "x"


def test_a_chat_prompt_ends_where_the_answer_starts() -> None:
    """Roles and content in order, special tokens as tokens, none added."""
    system = {"role": "system", "content": "be brief"}
    tokens = DEMO.apply_chat_template([system, USER])
    start, end, newline = 3, 4, DEMO.encode("\n")
    expected = []
    for message in (system, USER):
        expected += [start, *DEMO.encode(f"{message['role']}\n{message['content']}"), end, *newline]
    assert tokens == [*expected, start, *DEMO.encode("assistant\n")]


def test_encoding_adds_what_the_file_says(tmp_path: Path) -> None:
    """Special tokens of the post-processor go round a text, not round a chat prompt."""
    write_checkpoint(tmp_path, "qwen3")
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.enable_truncation(2)
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abcdef")[0] == 1
    assert len(tokenizer.encode("abcdef")) == 7
    assert tokenizer.apply_chat_template([USER])[0] == 3


def template(directory: Path, source: str) -> Tokenizer:
    """A tokenizer with another chat template."""
    write_checkpoint(directory, "qwen3")
    (directory / "chat_template.jinja").write_text(source)
    return Tokenizer.load(directory)


def test_a_template_has_the_usual_helpers(tmp_path: Path) -> None:
    """Special tokens, JSON that is not escaped, loop controls, today's date."""
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = template(tmp_path, source)
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "<é>"}, USER])
    assert tokens[0] == 1
    assert tokenizer.decode(tokens) == json.dumps({"role": "user", "content": "<é>"}, ensure_ascii=False) + "4"


def test_a_template_may_stand_in_the_config(tmp_path: Path) -> None:
    """Alone or as the default of several, with special tokens as objects."""
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").unlink()
    for entry in ("{{ eos_token }}A", [{"name": "tools", "template": "B"}, {"name": "default", "template": "A"}]):
        config = {"chat_template": entry, "eos_token": {"content": "</s>", "special": True}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.decode(tokenizer.apply_chat_template([USER])) == "A"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[3].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str, tmp_path: Path) -> None:
    """Also one that tries to leave the sandbox."""
    with pytest.raises(InvalidRequest, match="the chat template does not accept these messages"):
        template(tmp_path, source).apply_chat_template([USER])


def test_a_template_that_is_not_jinja_is_refused(tmp_path: Path) -> None:
    """When it is loaded, not when it is first used."""
    with pytest.raises(ConfigError, match=r"not valid Jinja.*chat_template\.jinja"):
        template(tmp_path, "{% for %}")


def test_a_model_without_template_cannot_chat(tmp_path: Path) -> None:
    """It is said so, with what to do."""
    write_checkpoint(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template; send a plain prompt"):
        Tokenizer.load(tmp_path).apply_chat_template([USER])


def test_a_bad_tokenizer_is_refused(tmp_path: Path) -> None:
    """Missing, damaged, or with more tokens than the model."""
    write_checkpoint(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 263}))
    with pytest.raises(ConfigError, match=r"under vocab_size 263, as in config\.json; found token id 263"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer.*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"a file is missing; expected tokenizer\.json"):
        Tokenizer.load(tmp_path)
