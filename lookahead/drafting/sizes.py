"""Sizes that the options are checked by. Numba is not imported, so that the command line starts quickly."""

from __future__ import annotations

from typing import NamedTuple

MAX_NODES_LIMIT = 512
DEFAULT_NODES = 64  # of a draft, the root not counted


class BranchSize(NamedTuple):
    """Sizes of the lookahead branch: W columns, n-grams of N tokens, at most G of them guessed in a step."""

    window: int
    ngram_size: int
    guesses: int

    @property
    def window_nodes(self) -> int:
        """Nodes of a tree that the window takes, the root not counted."""
        return self.window * (self.ngram_size - 1) - 1

    @property
    def nodes(self) -> int:
        """Nodes that the window and the guesses take at most."""
        return self.window_nodes + self.guesses * (self.ngram_size - 1)
