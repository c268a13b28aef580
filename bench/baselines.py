"""Drafting rules of other projects: chains, and the common base of all rules as proposers.

Rules that draft trees are in `bench.recycling`, `bench.racer` and `bench.datastores`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead.drafting.proposal import Feedback, Proposal

IntArray = NDArray[np.int32]
Draft = Callable[[IntArray], IntArray]
"""Drafts a chain after the tokens so far, int32 `[n]`; it may be empty."""
_CERTAIN = 0.999  # probability of a drafted token: the whole draft is verified


def prompt_lookup(length: int = 10) -> Draft:
    """transformers' prompt lookup: the tokens after the first occurrence of the last 2 tokens, or of the last one."""
    generator = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([-1]),  # old releases of transformers fail without one
        num_output_tokens=length,
        max_length=1 << 30,
    )

    def draft(tokens: IntArray) -> IntArray:
        found, _ = generator.get_candidates(torch.from_numpy(tokens.astype(np.int64))[None])
        return found[0, len(tokens) :].numpy().astype(np.int32)

    return draft


def longest_suffix(shortest: int = 2, longest: int = 5, length: int = 10) -> Draft:
    """The rule of vLLM's n-gram proposer: 10 tokens after the first of the longest matches of 2 to 5 tokens."""

    def draft(tokens: IntArray) -> IntArray:
        place, _ = first_longest(tokens, shortest, longest)
        return tokens[place : place + length] if place > 0 else tokens[:0]

    return draft


def first_occurrence(length: int = 40) -> Draft:
    """The rule of SAM decoding: 40 tokens after the first of the longest matches of any length.

    Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3.1 (the automaton's states
        keep the end of their first occurrence).
    """
    return longest_suffix(1, 1 << 30, length)


class DraftTree:
    """A draft of at most `max_nodes` nodes under construction. The children of a node have different tokens."""

    def __init__(self, root: int, max_nodes: int) -> None:
        self.tokens, self.parents = [root], [0]
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}  # nodes by parent and token

    @property
    def is_full(self) -> bool:
        return len(self.tokens) > self._max_nodes

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node with a token, created if missing; None if the tree is full."""
        place = self._places.get((parent, token))
        if place is None and not self.is_full:
            place = self._places[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return place

    def add(self, path: Iterable[int]) -> None:
        """Add the tokens of a path from the root until the tree is full."""
        place: int | None = 0
        for token in path:
            if place is not None:
                place = self.child(place, int(token))

    def proposal(self) -> Proposal:
        """A proposal whose nodes are all verified."""
        chances = np.full(len(self.tokens), _CERTAIN, np.float32)
        return Proposal(np.array(self.tokens, np.int32), np.array(self.parents, np.int32), chances)


class RuleRows:
    """Base class of proposers with fixed rules. They keep the text of every row, and their drafts are not sized."""

    sources: tuple[str, ...] = ("rule",)
    needs_argmax = False
    needs_top = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.texts: dict[int, IntArray] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self.texts[row] = prompt

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self.texts[row] = np.concatenate((self.texts[row], feedback.tokens))

    def finish(self, row: int) -> None:
        del self.texts[row]


class ChainRule(RuleRows):
    """A proposer of the chain of a rule, truncated to the allowed nodes."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        tree = DraftTree(int(self.texts[row][-1]), max_nodes)
        tree.add(self._draft(self.texts[row]).tolist())
        return tree.proposal()


def first_longest(tokens: IntArray, shortest: int, longest: int, ahead: int = 1) -> tuple[int, int]:
    """The position after the first of the longest matches of the end of a text, and the match length; zeros if none.

    Args:
        tokens: int32 `[n]`, a text.
        shortest: Minimum length of a match, in tokens.
        longest: Maximum number of tokens compared.
        ahead: Minimum number of tokens after a match.
    """
    place, length = _first_longest(tokens, shortest, min(longest, len(tokens)), ahead)
    return int(place), int(length)


@njit(cache=True)
def _first_longest(tokens, shortest, longest, ahead):
    """See `first_longest` for arguments and results.

    Source: Knuth, Morris & Pratt 1977, "Fast Pattern Matching in Strings", §2: the text is read backwards, and the
        length of the match with the end is known at each position.
    """
    size = tokens.size
    agrees = np.zeros(longest, np.int32)
    best, place, length = 0, 0, 0
    for back in range(1, size):
        token = tokens[size - 1 - back]
        while length > 0 and (length == longest or tokens[size - 1 - length] != token):
            length = agrees[length - 1]
        if tokens[size - 1 - length] == token:
            length += 1
        if back < longest:
            agrees[back] = length
        match = length
        while match > 0 and match - back > 1 - ahead:  # too few tokens follow
            match = agrees[match - 1]
        if match >= max(best, shortest):
            best, place = match, size - 1 - back + match
    return place, best
