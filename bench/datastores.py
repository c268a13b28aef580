"""Drafting rules of other projects that look up stored texts: suffix trees of earlier outputs, and datastores."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from importlib import import_module
from itertools import count

import numpy as np
from numpy.typing import NDArray

from bench.baselines import DraftTree, IntArray, RuleRows
from lookahead.drafting.proposal import Feedback, Proposal


class SuffixTrees(RuleRows):
    """SuffixDecoding by `arctic-inference`: the tree of the request or of all outputs, whichever predicts more tokens.

    Neither match length nor probability limits a draft, so that it has as many nodes as the drafts of other rules.
    `depth` is the maximum length of a match and of a draft.

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
        text = self.texts[row]
        limits = {"max_spec_tokens": max_nodes, "max_spec_offset": max_nodes, "min_token_prob": 0.0}
        draft = self._cache.speculate(self._requests[row], text[-self._depth :], **limits, use_tree_spec=True)
        tree, places = DraftTree(int(text[-1]), max_nodes), [0]
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            places.append(tree.child(places[parent + 1], token) or 0)
        return tree.proposal()

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        super().observe(row, feedback, placed)
        self._cache.add_active_response(self._requests[row], np.ascontiguousarray(feedback.tokens))

    def finish(self, row: int) -> None:
        super().finish(row)
        self._cache.stop_request(self._requests.pop(row))


class Datastore:
    """Texts as token ids, in which continuations of another text are looked up. Sizes are from REST's code."""

    LONGEST, SHORTEST = 16, 2  # tokens of a match
    LENGTH, MAX_CONTINUATIONS = 10, 5000  # tokens of a continuation, and continuations that are read

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        ends = [-1] * self.LENGTH
        self._tokens = np.concatenate([np.array([*text, *ends], np.int32) for text in texts])
        ranks, span = self._tokens.astype(np.int64) + 1, 1
        while span < self.LONGEST:  # prefix doubling: ranks of twice the length, from the ranks of both halves
            behind = np.append(ranks[span:], np.full(span, -1)) + 1
            _, ranks = np.unique(ranks * (len(ranks) + ranks.max() + 2) + behind, return_inverse=True)
            span *= 2
        self._order = np.argsort(ranks, kind="stable")

    def continuations(self, text: IntArray) -> IntArray:
        """The tokens after the occurrences of the longest suffix found; int32 `[n, 10]`, -1 after the end of a text."""
        ends, _ = self._find(text)
        rows: IntArray = self._tokens[ends[: self.MAX_CONTINUATIONS, None] + np.arange(self.LENGTH)]
        return rows

    def first_longest(self, text: IntArray, length: int) -> tuple[IntArray, int]:
        """At most `length` tokens after the first of the longest matches of any length, and the match length."""
        ends, match = self._find(text)
        while len(ends) and match >= self.LONGEST and match < len(text):
            longer = ends[self._tokens[ends - match - 1] == text[-match - 1]]
            if not len(longer):
                break
            ends, match = longer, match + 1
        following = self._tokens[ends.min() :][:length] if len(ends) else text[:0]
        return following[: np.append(following, -1).tolist().index(-1)], match

    def _find(self, text: IntArray) -> tuple[NDArray[np.int64], int]:
        """The positions after the occurrences of the longest suffix, at most `LONGEST` tokens, and its length."""
        for length in range(min(self.LONGEST, len(text)), self.SHORTEST - 1, -1):
            suffix = text[-length:].tolist()
            sides = [
                side(self._order, suffix, key=lambda place: self._tokens[place : place + len(suffix)].tolist())
                for side in (bisect_left, bisect_right)
            ]
            if sides[0] < sides[1]:
                return self._order[sides[0] : sides[1]] + length, length
        return self._order[:0], 0


class Retrieval(RuleRows):
    """REST: a tree of the most frequent prefixes of the continuations of the newest tokens in a datastore.

    Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding", §3.
    """

    def __init__(self, store: Datastore) -> None:
        super().__init__()
        self._store = store

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text, order = self.texts[row], count()
        tree = DraftTree(int(text[-1]), max_nodes)
        tips: list[tuple[int, int, int, int, int, IntArray]] = []  # negated frequency first

        def grow(parent: int, depth: int, rows: IntArray) -> None:
            found, frequencies = np.unique(rows[:, depth], return_counts=True)
            for token, frequency in zip(found.tolist(), frequencies.tolist(), strict=True):
                if token >= 0:
                    same = rows[rows[:, depth] == token]
                    heapq.heappush(tips, (-frequency, next(order), parent, depth, token, same))

        grow(0, 0, self._store.continuations(text))
        while tips and not tree.is_full:
            _, _, parent, depth, token, rows = heapq.heappop(tips)
            place = tree.child(parent, token)
            if place is not None and depth + 1 < Datastore.LENGTH:
                grow(place, depth + 1, rows)
        return tree.proposal()
