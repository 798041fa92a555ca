"""Keys of cached blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas_net.cache.keys import KEY_BYTES, PrefixScope, prefix_keys
from prfaas_net.errors import UsageError

SCOPE = PrefixScope("layout", 4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS)
def test_only_full_blocks_have_keys(tokens: list[int]) -> None:
    assert len(prefix_keys(SCOPE, tokens)) == len(tokens) // 4 * KEY_BYTES


@given(TOKENS, TOKENS)
def test_keys_are_equal_exactly_as_far_as_the_prompts_are(a: list[int], b: list[int]) -> None:
    one, two = prefix_keys(SCOPE, a), prefix_keys(SCOPE, b)
    for i in range(min(len(one), len(two)) // KEY_BYTES):
        key = slice(i * KEY_BYTES, (i + 1) * KEY_BYTES)
        assert (one[key] == two[key]) == (a[: 4 * (i + 1)] == b[: 4 * (i + 1)])


def test_an_array_gives_the_keys_of_the_list() -> None:
    tokens = list(range(100, 164))
    assert prefix_keys(SCOPE, np.array(tokens, dtype=np.uint16)) == prefix_keys(SCOPE, tokens)


@pytest.mark.parametrize(
    "other",
    [
        PrefixScope("layou", 4, salt="t"),
        PrefixScope("layout", 4, salt="s"),
        PrefixScope("layout", 4, adapter="s"),
        PrefixScope("layout2", 4),
    ],
)
def test_scopes_share_nothing(other: PrefixScope) -> None:
    assert prefix_keys(other, [1, 2, 3, 4]) != prefix_keys(SCOPE, [1, 2, 3, 4])


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_a_token_that_fits_no_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match="does not fit 32 bits"):
        prefix_keys(SCOPE, [1, 2, 3, token])


def test_keys_stay_what_they_are() -> None:
    """Gateways and nodes of different versions must agree on them."""
    assert prefix_keys(PrefixScope("a" * 32, 2, "salt"), [1, 2, 3, 4]).hex() == EXPECTED


EXPECTED = "7874b00c2f617486919b1fd36b7c9404731509abe37ba0cee3d9c2ba8c506ece"
