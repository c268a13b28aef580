"""The token tree verified in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookahead.utils.jit import njit

IntArray = NDArray[np.int32]


@dataclass(slots=True, eq=False)  # not frozen, which would double the time to create one
class TokenTree:
    """A rooted tree of tokens; the root is the row's last token, whose KV is not in the cache yet.

    Attributes:
        tokens: int32 `[n]`, n at least 1.
        parents: int32 `[n]`; `parents[i] < i`, and `parents[0]` is 0. Identical (parent, token) pairs are
            one node.
        depths: int32 `[n]`; distance from the root, also the node's position offset.
        sources: int32 `[n]`; bit s is set if source s offered the node; 0 for the root.

    Source: Miao et al. 2024, "SpecInfer", §4 (verifying a token tree in one pass).

    Example:
        >>> tree = TokenTree.from_parents([5, 6, 7, 8], [0, 0, 1, 0])  # the root 5, its children 6 and 8, and 7 after 6
        >>> tree.depths.tolist(), tree.ancestor_words().ravel().tolist()
        ([0, 1, 2, 1], [1, 3, 7, 9])
        >>> len(TokenTree.root(5))
        1
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    sources: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The tree of plain decoding: only `token`."""
        zero = np.zeros(1, np.int32)
        return cls(np.array([token], np.int32), zero, zero, zero)

    @classmethod
    def from_parents(
        cls, tokens: Sequence[int] | IntArray, parents: Sequence[int] | IntArray, sources: IntArray | None = None
    ) -> TokenTree:
        """Build a tree from tokens and parents, both `[n]`, and validate it.

        Raises:
            ValueError: The shapes differ or are empty, a parent does not come before its child, or two
                children of one node hold the same token.
        """
        token_array, parent_array = np.asarray(tokens, np.int32), np.asarray(parents, np.int32)
        if token_array.ndim != 1 or token_array.shape != parent_array.shape or len(token_array) == 0:
            raise ValueError(
                f"tokens and parents must be equal, non-empty 1-D shapes, "
                f"got {token_array.shape} and {parent_array.shape}"
            )
        most = np.maximum(np.arange(len(parent_array)) - 1, 0)
        if (parent_array < 0).any() or (parent_array > most).any():
            raise ValueError(f"parents must start with 0 and come before their children, got {parent_array.tolist()}")
        edges = set(zip(parent_array[1:].tolist(), token_array[1:].tolist(), strict=True))
        if len(edges) != len(token_array) - 1:
            raise ValueError("two children of one node hold the same token: merge them into one node")
        if sources is None:
            sources = np.zeros(len(token_array), np.int32)
        return cls(token_array, parent_array, node_depths(parent_array), sources)

    def ancestor_words(self) -> NDArray[np.int64]:
        """int64 `[n, ceil(n / 64)]`: bit `j % 64` of word `j // 64` is set if node j is on the path from the root."""
        words: NDArray[np.int64] = _ancestor_words(self.parents)
        return words


def count_within(tree: TokenTree, path: IntArray, bits: int) -> int:
    """Nodes of a path (int32 `[a]`), without the root, that only the sources of `bits` offered.

    Example:
        >>> tree = TokenTree.from_parents([5, 6, 7], [0, 0, 1], np.array([0, 0b01, 0b11], np.int32))
        >>> count_within(tree, np.array([0, 1, 2]), 0b01)  # another source offered node 2 as well
        1
    """
    return int(np.count_nonzero(tree.sources[path[1:]] & ~bits == 0))


def without_sources(
    verified: Sequence[tuple[TokenTree, IntArray]], tokens: Sequence[int], bits: int
) -> tuple[int, list[int]]:
    """The nodes of the largest tree, and the tokens of each row, if the sources of `bits` had offered nothing.

    Example:
        >>> tree = TokenTree.from_parents([5, 6, 7], [0, 0, 0], np.array([0, 0b01, 0b10], np.int32))
        >>> without_sources([(tree, np.array([0, 1]))], [2], 0b01)  # 6 was accepted
        (2, [1])
    """
    nodes = max(1 + int(np.count_nonzero(tree.sources & ~bits)) for tree, _ in verified)
    lost = [count_within(tree, path, bits) for tree, path in verified]
    return nodes, [emitted - n for emitted, n in zip(tokens, lost, strict=True)]


@njit()
def node_depths(parents):
    """int32 `[n]`: distance of each node from the root.

    Example:
        >>> node_depths(np.array([0, 0, 1, 0])).tolist()
        [0, 1, 2, 1]
    """
    depths = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


@njit()
def _ancestor_words(parents):
    count = len(parents)
    words = np.zeros((count, (count + 63) // 64), np.int64)
    words[0, 0] = 1
    for node in range(1, count):
        for word in range(words.shape[1]):
            words[node, word] = words[parents[node], word]
        words[node, node // 64] |= np.int64(1) << np.int64(node % 64)
    return words
