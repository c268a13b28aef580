"""The drafting rules of others, for comparison on recorded outputs and as proposers of a model."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import count

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from lookahead.drafting.proposal import Feedback, Proposal
from lookahead.ngram.successors import TOP

IntArray = NDArray[np.int32]
Draft = Callable[[IntArray], IntArray]
"""The chain that may follow the tokens so far, int32 `[n]`; possibly nothing."""
_HIT_RATES = (0.4, 0.11, 0.065, 0.04, 0.025, 0.018, 0.014, 0.01)  # of the successors of a token, by rank
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
        place = _first_longest(tokens, shortest, min(longest, len(tokens)))
        return tokens[place : place + length] if place > 0 else tokens[:0]

    return draft


def first_occurrence(length: int = 40) -> Draft:
    """The rule of SAM decoding: the first place of the longest match of any length, 40 tokens drafted.

    Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3.1 (the automaton's states
        keep the end of their first occurrence).
    """
    return longest_suffix(1, 1 << 30, length)


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
    """A proposer of the chain of a rule, cut at the nodes allowed."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self._texts[row]
        tokens = [*text[-1:], *self._draft(text)[:max_nodes]]
        return _whole(tokens, [0, *range(len(tokens) - 1)])


class TokenRecycling(_Rows):
    """Token Recycling: the target's newest 8 likeliest successors of every token, on a static tree.

    The paper gives its tree by a figure. Here a tree of any size holds the nodes likeliest by the product of the hit
    rates of their ranks, as measured for such successors. The root is not one of its `nodes`.

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
        return _whole(tokens, parents)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        super().observe(row, feedback, placed)
        if feedback.top is not None:
            self._successors[feedback.top.tree.tokens] = feedback.top.tokens


class SuffixTrees(_Rows):
    """SuffixDecoding: the tree of the request or that of all outputs, whichever foretells more, by `arctic-inference`.

    Neither the length of the match nor probability limits a draft, so that it has as many nodes as those of others;
    `depth` is the longest match and the longest draft.

    Source: Oliaro et al. 2024, "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language Model Inference",
        §4.
    """

    def __init__(self, depth: int = 64) -> None:
        super().__init__()
        self._depth = depth
        self._cache = import_module("arctic_inference.suffix_decoding").SuffixDecodingCache(max_tree_depth=depth)
        self._numbers, self._requests = count(), dict[int, int]()

    def start(self, row: int, prompt: IntArray) -> None:
        super().start(row, prompt)
        self._requests[row] = next(self._numbers)
        self._cache.start_request(self._requests[row], np.ascontiguousarray(prompt))

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self._texts[row]
        limits = {"max_spec_tokens": max_nodes, "max_spec_offset": max_nodes, "min_token_prob": 0.0}
        draft = self._cache.speculate(self._requests[row], text[-self._depth :], **limits, use_tree_spec=True)
        return _whole([text[-1], *draft.token_ids], [0, *(parent + 1 for parent in draft.parents)])

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        super().observe(row, feedback, placed)
        self._cache.add_active_response(self._requests[row], np.ascontiguousarray(feedback.tokens))

    def finish(self, row: int) -> None:
        super().finish(row)
        self._cache.stop_request(self._requests.pop(row))


class Datastore:
    """Texts, in token ids, in which what followed the end of another text is found; sizes are those of REST's code."""

    LONGEST, SHORTEST = 16, 2  # tokens of a match
    LENGTH, MAX_CONTINUATIONS = 10, 5000  # tokens of a continuation, and continuations that are read

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        ends = [-1] * self.LENGTH
        self._tokens = np.concatenate([np.array([*text, *ends], np.int32) for text in texts])
        ranks, span = self._tokens.astype(np.int64) + 1, 1
        while span < self.LONGEST:  # ranks of sequences twice as long, from those of their halves
            behind = np.append(ranks[span:], np.full(span, -1)) + 1
            _, ranks = np.unique(ranks * (len(ranks) + ranks.max() + 2) + behind, return_inverse=True)
            span *= 2
        self._order = np.argsort(ranks, kind="stable")

    def continuations(self, text: IntArray) -> IntArray:
        """What followed the longest suffix that is there; int32 `[n, 10]`, -1 behind the end of a text."""
        for length in range(min(self.LONGEST, len(text)), self.SHORTEST - 1, -1):
            suffix = text[-length:].tolist()
            sides = [
                side(self._order, suffix, key=lambda place: self._tokens[place : place + len(suffix)].tolist())
                for side in (bisect_left, bisect_right)
            ]
            if sides[0] < sides[1]:
                places = self._order[sides[0] : min(sides[1], sides[0] + self.MAX_CONTINUATIONS)] + length
                return self._tokens[places[:, None] + np.arange(self.LENGTH)]
        return np.zeros((0, self.LENGTH), np.int32)


class Retrieval(_Rows):
    """REST: the most frequent beginnings of what followed the newest tokens in a datastore, as a tree.

    Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding", §3.
    """

    def __init__(self, store: Datastore) -> None:
        super().__init__()
        self._store = store

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text, order = self._texts[row], count()
        tokens, parents = [int(text[-1])], [0]
        tips: list[tuple[int, int, int, int, int, IntArray]] = []  # falling frequency first

        def grow(parent: int, depth: int, rows: IntArray) -> None:
            found, frequencies = np.unique(rows[:, depth], return_counts=True)
            for token, frequency in zip(found.tolist(), frequencies.tolist(), strict=True):
                if token >= 0:
                    same = rows[rows[:, depth] == token]
                    heapq.heappush(tips, (-frequency, next(order), parent, depth, token, same))

        grow(0, 0, self._store.continuations(text))
        while tips and len(tokens) <= max_nodes:
            _, _, parent, depth, token, rows = heapq.heappop(tips)
            tokens.append(token)
            parents.append(parent)
            if depth + 1 < Datastore.LENGTH:
                grow(len(tokens) - 1, depth + 1, rows)
        return _whole(tokens, parents)


def _whole(tokens: Sequence[int], parents: Sequence[int]) -> Proposal:
    """A proposal of which every node is verified."""
    chances = np.full(len(tokens), _CERTAIN, np.float32)
    return Proposal(np.array(tokens, np.int32), np.array(parents, np.int32), chances)


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
