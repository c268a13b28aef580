"""The drafting rules of others: chains, and what all rules share as proposers of a model.

Their trees are in `bench.recycling`, `bench.racer` and `bench.datastores`.
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
"""The chain that may follow the tokens so far, int32 `[n]`; possibly nothing."""
_CERTAIN = 0.999  # probability of a drafted token: the whole draft is verified


def prompt_lookup(length: int = 10) -> Draft:
    """transformers' own prompt lookup: what followed the first place where the last 2 tokens, or the last, stood."""
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
    """The rule of vLLM's n-gram proposer: the first place of the longest match of 2 to 5 tokens, 10 drafted."""

    def draft(tokens: IntArray) -> IntArray:
        place, _ = first_longest(tokens, shortest, longest)
        return tokens[place : place + length] if place > 0 else tokens[:0]

    return draft


def first_occurrence(length: int = 40) -> Draft:
    """The rule of SAM decoding: the first place of the longest match of any length, 40 tokens drafted.

    Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3.1 (the automaton's states
        keep the end of their first occurrence).
    """
    return longest_suffix(1, 1 << 30, length)


class DraftTree:
    """A draft of at most `max_nodes` nodes in the making; two children of a node never hold the same token."""

    def __init__(self, root: int, max_nodes: int) -> None:
        self.tokens, self.parents = [root], [0]
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}  # of nodes, by parent and token

    @property
    def is_full(self) -> bool:
        return len(self.tokens) > self._max_nodes

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node that holds a token, new if there was none; None where it no longer fits."""
        place = self._places.get((parent, token))
        if place is None and not self.is_full:
            place = self._places[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return place

    def add(self, path: Iterable[int]) -> None:
        """Add the tokens of a path from the root, as far as they fit."""
        place: int | None = 0
        for token in path:
            if place is not None:
                place = self.child(place, int(token))

    def proposal(self) -> Proposal:
        """A proposal of which every node is verified."""
        chances = np.full(len(self.tokens), _CERTAIN, np.float32)
        return Proposal(np.array(self.tokens, np.int32), np.array(self.parents, np.int32), chances)


class RuleRows:
    """What proposers of fixed rules share: they keep the text of every row, and their drafts are not sized."""

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
    """A proposer of the chain of a rule, cut at the nodes allowed."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        tree = DraftTree(int(self.texts[row][-1]), max_nodes)
        tree.add(self._draft(self.texts[row]).tolist())
        return tree.proposal()


def first_longest(tokens: IntArray, shortest: int, longest: int, ahead: int = 1) -> tuple[int, int]:
    """Where the first of the longest matches of the end goes on, and the length of the match; zeros without one.

    Args:
        tokens: int32 `[n]`, a text.
        shortest: Tokens of the shortest match.
        longest: Tokens that are compared.
        ahead: Tokens that must follow a match.
    """
    place, length = _first_longest(tokens, shortest, min(longest, len(tokens)), ahead)
    return int(place), int(length)


@njit(cache=True)
def _first_longest(tokens, shortest, longest, ahead):
    """The arguments and results are those of `first_longest`.

    Source: Knuth, Morris & Pratt 1977, "Fast Pattern Matching in Strings", §2: the text is read backwards, and each of
        its places knows how far it agrees with the end.
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
        while match > 0 and match - back > 1 - ahead:  # less follows
            match = agrees[match - 1]
        if match >= max(best, shortest):
            best, place = match, size - 1 - back + match
    return place, best
