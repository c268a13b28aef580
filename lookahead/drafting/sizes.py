"""Sizes for the validation of options. Does not import Numba, so that the command line starts quickly."""

from __future__ import annotations

from typing import NamedTuple

MAX_NODES_LIMIT = 512
DEFAULT_NODES = 64  # of a draft, without the root


class BranchSize(NamedTuple):
    """Sizes of the lookahead branch: W columns, n-grams of N tokens, at most G guesses per step.

    Example:
        >>> size = BranchSize(window=3, ngram_size=3, guesses=2)
        >>> size.window_nodes, size.nodes
        (5, 9)
    """

    window: int = 7
    ngram_size: int = 5
    guesses: int = 7

    @property
    def window_nodes(self) -> int:
        """Nodes of the window in a tree, without the root."""
        return self.window * (self.ngram_size - 1) - 1

    @property
    def nodes(self) -> int:
        """Maximum nodes of the window and the guesses."""
        return self.window_nodes + self.guesses * (self.ngram_size - 1)
