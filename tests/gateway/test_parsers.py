"""The small parsers, against everything that can be cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.errors import ProtocolError
from prfaas_net.gateway.answer import StopMatcher
from prfaas_net.gateway.calls import LineBuffer
from prfaas_net.nodes.auth import check_control_token, control_token


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[str, bool]:
    shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.flush(), False


LETTERS = st.text("ab", max_size=12)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_do_not_depend_on_where_tokens_are_cut(pieces: list[str], stops: list[str]) -> None:
    """Character by character, what is shown ends right before the first stop string that completes."""
    text = "".join(pieces)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    shown, stopped = run(StopMatcher(stops), list(text))
    assert stopped == bool(found)
    if not found:
        assert shown == text
    else:
        assert not any(stop in shown for stop in stops)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
    whole, whole_stopped = run(StopMatcher(stops), pieces)
    assert whole_stopped == stopped
    assert text.startswith(whole) and not any(stop in whole for stop in stops)


@given(LETTERS, st.text("ab", min_size=1, max_size=4))
def test_text_is_held_back_no_longer_than_needed(text: str, stop: str) -> None:
    """What is held back could still become the stop string."""
    matcher, shown = StopMatcher([stop]), ""
    for n, letter in enumerate(text, 1):
        part, stopped = matcher.push(letter)
        shown += part
        if stopped:
            break
        held = text[len(shown) : n]
        assert stop.startswith(held) and len(held) < len(stop)


@given(st.lists(st.binary(max_size=20).filter(lambda b: b"\n" not in b)), st.integers(1, 7))
def test_lines_do_not_depend_on_how_bytes_arrive(lines: list[bytes], step: int) -> None:
    """Whole, byte by byte or in any pieces: the same lines."""
    data = b"".join(line + b"\n" for line in lines)
    expected = [line for line in lines if line.strip()]
    assert LineBuffer().feed(data) == expected
    buffer = LineBuffer()
    assert [line for at in range(0, len(data), step) for line in buffer.feed(data[at : at + step])] == expected


@pytest.mark.parametrize("data", [b"x" * 11, b"x" * 11 + b"\n", b"ok\n" + b"x" * 11])
def test_long_lines_are_refused(data: bytes) -> None:
    """A line without end does not fill the memory, however it comes."""
    with pytest.raises(ProtocolError, match="at most 10 bytes"):
        LineBuffer(10).feed(data)
    buffer = LineBuffer(10)
    with pytest.raises(ProtocolError, match="at most 10 bytes"):
        [buffer.feed(data[at : at + 1]) for at in range(len(data))]


def test_control_token() -> None:
    """Only the same key makes the same token, and the key cannot be read from it."""
    token = control_token("secret")
    assert "secret" not in token and len(token) == 64
    assert check_control_token(f"Bearer {token}", "secret")
    for header in (None, "", token, f"Basic {token}", f"Bearer {token}0", "Bearer secret", "Bearer caf\u00e9"):
        assert not check_control_token(header, "secret")
    assert not check_control_token(f"Bearer {token}", "other")
