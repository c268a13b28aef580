"""The token tree: what one step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A rooted tree of tokens; the root is the newest committed token, whose KV is not in the cache yet.

    Attributes:
        tokens: int32 `[n]`, n at least 1.
        parents: int32 `[n]`; `parents[i] < i`, and `parents[0]` is 0. Identical (parent, token) pairs are
            one node.
        depths: int32 `[n]`; edges between the root and the node, also the node's position offset.
        sources: int32 `[n]`; bit s is set where proposer s offered the node; 0 for the root.

    Source: Miao et al. 2024, "SpecInfer", §4 (verifying a token tree in one pass).
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray
    sources: IntArray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root(cls, token: int) -> TokenTree:
        """The tree of plain decoding: `token` alone."""
        zero = np.zeros(1, np.int32)
        return cls(np.array([token], np.int32), zero, zero, zero)

    @classmethod
    def from_parents(
        cls,
        tokens: Sequence[int] | IntArray,
        parents: Sequence[int] | IntArray,
        sources: IntArray | None = None,
    ) -> TokenTree:
        """Build a tree from tokens and parents, both `[n]`, checking that they are one.

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
        if (
            parent_array[0] != 0
            or (parent_array < 0).any()
            or (parent_array[1:] >= np.arange(1, len(parent_array))).any()
        ):
            raise ValueError(f"parents must start with 0 and come before their children, got {parent_array.tolist()}")
        edges = set(zip(parent_array[1:].tolist(), token_array[1:].tolist(), strict=True))
        if len(edges) != len(token_array) - 1:
            raise ValueError("two children of one node hold the same token: merge them into one node")
        if sources is None:
            sources = np.zeros(len(token_array), np.int32)
        return cls(token_array, parent_array, node_depths(parent_array), sources)

    def ancestor_mask(self) -> NDArray[np.bool_]:
        """bool `[n, n]`: whether node i may attend to node j, that is, j lies on the path from the root to i."""
        mask: NDArray[np.bool_] = _ancestor_mask(self.parents)
        return mask

    def ancestor_words(self) -> NDArray[np.int64]:
        """int64 `[n, ceil(n / 64)]`: `ancestor_mask` packed, node j at bit `j % 64` of word `j // 64`."""
        words: NDArray[np.int64] = _ancestor_words(self.parents)
        return words


def count_by_source(tree: TokenTree, nodes: IntArray, sources: int) -> list[int]:
    """How many of `nodes` each of the first `sources` proposers offered."""
    counts: list[int] = _count_bits(tree.sources, nodes, sources).tolist()
    return counts


@njit(cache=True)
def _count_bits(words, nodes, bits):
    """For every bit, in how many of the chosen words it is set."""
    counts = np.zeros(bits, np.int64)
    for node in nodes:
        for bit in range(bits):
            counts[bit] += (words[node] >> bit) & 1
    return counts


@njit(cache=True)
def node_depths(parents):
    """int32 `[n]`: edges between the root and each node."""
    depths = np.zeros(len(parents), np.int32)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return depths


@njit(cache=True)
def _ancestor_mask(parents):
    """A node sees what its parent sees, and itself."""
    n = len(parents)
    mask = np.zeros((n, n), np.bool_)
    mask[0, 0] = True
    for node in range(1, n):
        mask[node, :node] = mask[parents[node], :node]
        mask[node, node] = True
    return mask


@njit(cache=True)
def _ancestor_words(parents):
    """As `_ancestor_mask`, one bit a node."""
    n = len(parents)
    words = np.zeros((n, (n + 63) // 64), np.int64)
    words[0, 0] = 1
    for node in range(1, n):
        words[node] = words[parents[node]]
        words[node, node // 64] |= np.int64(1) << np.int64(node % 64)
    return words
