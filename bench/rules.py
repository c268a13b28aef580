"""A drafting rule of other projects as a proposer: SAM decoding with Token Recycling.

It and RACER accept most tokens a pass of the rules that were measured (`bench/results/ablation*.json`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.drafting.proposal import Feedback, Proposal
from lookahead.ngram.successors import TOP
from lookahead.plugins.heads.target import unembed

IntArray = NDArray[np.int32]
_CERTAIN = 0.999  # probability of a drafted token: the whole draft is verified
_HIT_RATES = (0.4, 0.11, 0.065, 0.04, 0.025, 0.018, 0.014, 0.01)  # of the successors of a token, by rank
_ROWS = 256  # hidden states whose logits are computed at once


class DraftTree:
    """A draft of at most `max_nodes` nodes under construction. The children of a node have different tokens."""

    def __init__(self, root: int, max_nodes: int) -> None:
        self.tokens, self.parents = [root], [0]
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}  # nodes by parent and token

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node with a token, created if missing; None if the tree is full."""
        place = self._places.get((parent, token))
        if place is None and len(self.tokens) <= self._max_nodes:
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


@torch.inference_mode()
def likeliest(model: PreTrainedModel, hidden: Tensor, most: int) -> IntArray:
    """The likeliest tokens after hidden states `[n, size]` of the last layer: int32 `[n, most]`, likeliest first.

    A smaller vocabulary gives fewer columns.
    """
    logits = (unembed(model, part) for part in hidden.split(_ROWS))
    return torch.cat([part.topk(min(most, part.shape[-1])).indices for part in logits]).cpu().numpy().astype(np.int32)


class SamRecycling:
    """SAM decoding with Token Recycling: the chain after a long match in the text, else a tree of recycled successors.

    As in SAM's paper and code, a match needs 5 tokens, and the first occurrence of the longest match counts that is
    followed by a whole draft, else the first one. Token Recycling shows its static tree in a figure. Here a tree of any
    size has the likeliest nodes by the product of the measured hit rates of their ranks. The newest 8 likeliest
    successors of every token are kept, including all draft nodes, and with a model those of the prompt's tokens.
    Scaled: the chain (40 tokens in the paper) and the tree (80) have `nodes` each. Matches are found by search instead
    of a suffix automaton. Drafts are not sized.

    Sources: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3; Luo et al. 2024, "Turning
        Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", §3.
    """

    SHORTEST = 5  # tokens of a match
    sources: tuple[str, ...] = ("rule",)
    needs_argmax, needs_top = False, True

    def __init__(self, vocab_size: int, nodes: int, model: PreTrainedModel | None = None) -> None:
        self._nodes, self._model, self._texts = nodes, model, dict[int, IntArray]()
        self._ranks, self._parents = static_tree(nodes)
        self.successors = np.full((vocab_size, TOP), -1, np.int32)  # -1: unknown
        self.hidden_layers: tuple[int, ...] = () if model is None else (-1,)

    def start(self, row: int, prompt: IntArray) -> None:
        self._texts[row] = prompt

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        hidden = feedback.prompt_hidden.get(-1)
        if self._model is not None and hidden is not None:
            self.successors[self._texts[row][-len(hidden) :]] = likeliest(self._model, hidden, TOP)
        self._texts[row] = np.concatenate((self._texts[row], feedback.tokens))
        if feedback.top is not None:
            self.successors[feedback.top.tree.tokens] = feedback.top.tokens

    def finish(self, row: int) -> None:
        del self._texts[row]

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self._texts[row]
        tree = DraftTree(int(text[-1]), max_nodes)
        if _first_longest(text, 1)[1] < self.SHORTEST:
            self._recycle(tree, max_nodes)
        else:
            whole, _ = _first_longest(text, self._nodes)
            place = whole or text[:-1].tolist().index(text[-1]) + 1
            tree.add(text[place : place + self._nodes].tolist())
        return tree.proposal()

    def _recycle(self, tree: DraftTree, max_nodes: int) -> None:
        """Add the static tree without the nodes that are not known as successors of their parents."""
        places = dict[int, int | None]({0: 0})
        for node in range(1, min(max_nodes, len(self._ranks) - 1) + 1):
            before = places.get(self._parents[node])
            token = -1 if before is None else int(self.successors[tree.tokens[before], self._ranks[node]])
            if before is not None and token >= 0:
                places[node] = tree.child(before, token)


def static_tree(nodes: int) -> tuple[list[int], list[int]]:
    """Ranks and parents of the nodes of a static tree, the root first."""
    ranks, parents, order = [0], [0], count()
    tips = [(-_HIT_RATES[0], next(order), 0, 0)]  # negated probability, order, parent and rank of a node
    for node in range(1, nodes + 1):
        prob, _, parent, rank = heapq.heappop(tips)
        ranks.append(rank)
        parents.append(parent)
        heapq.heappush(tips, (prob * _HIT_RATES[0], next(order), node, 0))
        if rank + 1 < TOP:
            heapq.heappush(tips, (prob / _HIT_RATES[rank] * _HIT_RATES[rank + 1], next(order), parent, rank + 1))
    return ranks, parents


@njit(cache=True)
def _first_longest(text, ahead):
    """The position after the first of the longest matches of the end of a text that `ahead` tokens follow.

    Also its length; zeros if there is none.
    """
    place, longest = 0, 0
    for end in range(1, len(text) - ahead + 1):
        length = 0
        while length < end and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length > longest:
            place, longest = end, length
    return place, longest
