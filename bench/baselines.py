"""The drafting rules of others, for comparison on recorded outputs and as proposers of a model."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead.drafting.proposal import Feedback, Proposal
from lookahead.ngram.recycled import TOP

IntArray = NDArray[np.int32]
_HIT_RATES = (0.4, 0.11, 0.065, 0.04, 0.025, 0.018, 0.014, 0.01)  # of the successors of a token, by rank
_CERTAIN = 0.999  # probability of a drafted token: the whole draft is verified


class Chain(Protocol):
    """Drafts one chain from the tokens so far."""

    def draft(self, tokens: IntArray) -> IntArray:
        """What may follow `tokens` (int32 `[n]`, each call's continuing those of the last), possibly nothing."""


class PromptLookup:
    """transformers' own prompt lookup: the first place where the last 2 tokens, or the last, stood."""

    def __init__(self, length: int = 10) -> None:
        self._generator = PromptLookupCandidateGenerator(num_output_tokens=length, max_length=1 << 30)

    def draft(self, tokens: IntArray) -> IntArray:
        """What followed there, `length` tokens at most."""
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        found, _ = self._generator.get_candidates(ids)
        return found[0, len(tokens) :].numpy().astype(np.int32)


class LongestSuffix:
    """The rule of vLLM's n-gram proposer: the first place of the longest match of 2 to 5 tokens, 10 drafted."""

    def __init__(self, shortest: int = 2, longest: int = 5, length: int = 10) -> None:
        self._shortest, self._longest, self._length = shortest, longest, length

    def draft(self, tokens: IntArray) -> IntArray:
        place = _first_longest(tokens, self._shortest, min(self._longest, len(tokens)))
        return tokens[place : place + self._length] if place > 0 else tokens[:0]


class FirstOccurrence(LongestSuffix):
    """The rule of SAM decoding: the first place of the longest match of any length, 40 tokens drafted.

    Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3.1 (the automaton's states
        keep the end of their first occurrence).
    """

    def __init__(self, length: int = 40) -> None:
        super().__init__(1, 1 << 30, length)


class _Rows:
    """What proposers of fixed rules share: they learn nothing of hidden states, and their drafts are not sized."""

    sources: tuple[str, ...] = ("rule",)
    needs_argmax = False
    needs_top = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._texts: dict[int, IntArray] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self._texts[row] = prompt

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self._texts[row] = np.concatenate((self._texts[row], feedback.tokens))

    def finish(self, row: int) -> None:
        del self._texts[row]


class ChainRule(_Rows):
    """A proposer of the chain of a rule, cut at the nodes allowed.

    Args:
        make: Makes the rule of a row.
    """

    def __init__(self, make: Callable[[], Chain]) -> None:
        super().__init__()
        self._make = make
        self._rules: dict[int, Chain] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        super().start(row, prompt)
        self._rules[row] = self._make()

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self._texts[row]
        tokens = np.concatenate((text[-1:], self._rules[row].draft(text)[:max_nodes]))
        parents = np.maximum(np.arange(len(tokens), dtype=np.int32) - 1, 0)
        return Proposal(tokens, parents, np.full(len(tokens), _CERTAIN, np.float32))


class TokenRecycling(_Rows):
    """Token Recycling: the target's newest 8 likeliest successors of every token, on a static tree.

    The paper gives its tree by a figure. Here a tree of any size holds the nodes likeliest by the product of the hit
    rates of their ranks, as measured for such successors.

    Args:
        vocab_size: Token ids are those below.
        nodes: Nodes of the tree besides the root.

    Source: Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
        Recycling", §3.
    """

    needs_top = True

    def __init__(self, vocab_size: int, nodes: int = 80) -> None:
        super().__init__()
        self._successors = np.full((vocab_size, TOP), -1, np.int32)
        self._ranks, self._parents = static_tree(nodes)

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """The static tree without the nodes whose parents have no known successors."""
        tokens, parents, place = [int(self._texts[row][-1])], [0], {0: 0}
        for node in range(1, min(max_nodes, len(self._ranks) - 1) + 1):
            before = place.get(self._parents[node])
            token = -1 if before is None else int(self._successors[tokens[before], self._ranks[node]])
            if before is not None and token >= 0:
                place[node] = len(tokens)
                tokens.append(token)
                parents.append(before)
        probabilities = np.full(len(tokens), _CERTAIN, np.float32)
        return Proposal(np.array(tokens, np.int32), np.array(parents, np.int32), probabilities)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Store the successors of every node."""
        super().observe(row, feedback, placed)
        if feedback.top is not None:
            self._successors[feedback.top.tree.tokens] = feedback.top.tokens


def static_tree(nodes: int) -> tuple[list[int], list[int]]:
    """Ranks and parents of the nodes of a static tree, the root first."""
    ranks, parents, order = [0], [0], count()
    tips = [(-_HIT_RATES[0], next(order), 0, 0)]  # falling probability; the parent and the rank of a node
    for node in range(1, nodes + 1):
        prob, _, parent, rank = heapq.heappop(tips)
        ranks.append(rank)
        parents.append(parent)
        heapq.heappush(tips, (prob * _HIT_RATES[0], next(order), node, 0))
        if rank + 1 < TOP:
            heapq.heappush(tips, (prob / _HIT_RATES[rank] * _HIT_RATES[rank + 1], next(order), parent, rank + 1))
    return ranks, parents


@njit(cache=True)
def _first_longest(tokens, shortest, longest):
    """Where what followed the first of the longest matches stands; 0 where there is none.

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
        if length >= max(best, shortest):
            best, place = length, size - 1 - back + length
    return place
