"""The token tree against an oracle that walks parents, and the lookahead window against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.drafting.tree import TokenTree
from tests.support.random_trees import ancestor_mask


@st.composite
def trees(draw: st.DrawFn, most: int = 150) -> TokenTree:
    n = draw(st.integers(1, most))
    parents = [0] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    return TokenTree.from_parents(np.arange(n), parents)


def path_to_root(tree: TokenTree, node: int) -> set[int]:
    seen = {node}
    while node != 0:
        node = int(tree.parents[node])
        seen.add(node)
    return seen


@given(trees())
def test_a_node_sees_exactly_its_path_to_the_root(tree: TokenTree) -> None:
    mask = ancestor_mask(tree)
    for node in range(len(tree)):
        assert set(np.flatnonzero(mask[node])) == path_to_root(tree, node)


@given(trees())
def test_packed_words_hold_the_same_bits_as_the_boolean_mask(tree: TokenTree) -> None:
    words = tree.ancestor_words()
    assert words.dtype == np.int64
    assert words.shape == (len(tree), -(-len(tree) // 64))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : len(tree)]
    np.testing.assert_array_equal(bits.astype(bool), ancestor_mask(tree))


@given(trees())
def test_the_depth_of_a_node_counts_its_ancestors(tree: TokenTree) -> None:
    np.testing.assert_array_equal(tree.depths, ancestor_mask(tree).sum(1) - 1)


def test_plain_decoding_is_the_tree_of_one_node() -> None:
    tree = TokenTree.root(7)
    assert tree.tokens.tolist() == [7]
    assert ancestor_mask(tree).tolist() == [[True]]


@pytest.mark.parametrize(
    ("tokens", "parents", "complaint"),
    [
        ([], [], "non-empty"),
        ([1, 2], [0], "equal"),
        ([1, 2], [0, 1], "before their children"),
        ([1, 2], [0, -1], "before their children"),
        ([1, 2, 3], [0, 2, 1], "before their children"),
        ([1, 2], [1, 0], "start with 0"),
        ([1, 2, 2], [0, 0, 0], "same token"),
    ],
)
def test_what_is_no_tree_is_refused(tokens: list[int], parents: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TokenTree.from_parents(tokens, parents)
