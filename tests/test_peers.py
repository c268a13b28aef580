"""The rules of others that we compare with find what their definitions say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.baselines import LongestSuffix


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_the_longest_suffix_rule_drafts_what_followed_the_first_of_the_longest_matches(text, shortest, more):
    tokens, longest = np.array(text, np.int32), shortest + more
    best = shortest - 1
    expected: list[int] = []
    for end in range(1, len(text)):
        length = 0
        while length < min(longest, end) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length > best:
            best, expected = length, text[end : end + 10]
    assert LongestSuffix(shortest, longest).draft(tokens).tolist() == expected
