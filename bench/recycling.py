"""Drafting rules of other projects that reuse the target's logits: Token Recycling, SAM decoding with it, LogitSpec."""

from __future__ import annotations

import heapq
from itertools import count

import numpy as np
import torch
from numba import njit
from torch import Tensor
from transformers import PreTrainedModel

from bench.baselines import DraftTree, IntArray, RuleRows, first_longest
from bench.datastores import Datastore
from lookahead.drafting.proposal import Feedback, Proposal
from lookahead.ngram.successors import TOP
from lookahead.plugins.heads.layers import unembed

_HIT_RATES = (0.4, 0.11, 0.065, 0.04, 0.025, 0.018, 0.014, 0.01)  # of the successors of a token, by rank
_ROWS = 256  # hidden states whose logits are computed at once


@torch.inference_mode()
def likeliest(model: PreTrainedModel, hidden: Tensor, most: int) -> IntArray:
    """The likeliest tokens after hidden states `[n, size]` of the last layer: int32 `[n, most]`, likeliest first.

    A smaller vocabulary gives fewer columns.
    """
    logits = (unembed(model, part) for part in hidden.split(_ROWS))
    return torch.cat([each.topk(min(most, each.shape[-1])).indices for each in logits]).cpu().numpy().astype(np.int32)


class Recycled(RuleRows):
    """Base class of rules that keep the newest 8 likeliest successors of every token, including all draft nodes.

    With a model, the successors after the prompt's tokens are kept too.
    """

    needs_top = True

    def __init__(self, vocab_size: int, model: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.successors = np.full((vocab_size, TOP), -1, np.int32)  # -1: unknown
        self._model = model
        self.hidden_layers = () if model is None else (-1,)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        hidden = feedback.prompt_hidden.get(-1)
        if self._model is not None and hidden is not None:
            self.successors[self.texts[row][-len(hidden) :]] = likeliest(self._model, hidden, TOP)
        super().observe(row, feedback, placed)
        if feedback.top is not None:
            self.successors[feedback.top.tree.tokens] = feedback.top.tokens


class TokenRecycling(Recycled):
    """Token Recycling: the target's newest 8 likeliest successors of every token, on a static tree.

    The paper shows its tree in a figure. Here a tree of any size has the likeliest nodes by the product of the measured
    hit rates of their ranks. The root does not count in `nodes`. As in the paper's code, the prompt's logits are not
    kept.

    Source: Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
        Recycling", §3.
    """

    def __init__(self, vocab_size: int, nodes: int = 80, model: PreTrainedModel | None = None) -> None:
        super().__init__(vocab_size, model)
        self._ranks, self._parents = static_tree(nodes)

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """The static tree without the nodes that are not known as successors of their parents."""
        tree, places = DraftTree(int(self.texts[row][-1]), max_nodes), dict[int, int | None]({0: 0})
        for node in range(1, min(max_nodes, len(self._ranks) - 1) + 1):
            before = places.get(self._parents[node])
            token = -1 if before is None else int(self.successors[tree.tokens[before], self._ranks[node]])
            if before is not None and token >= 0:
                places[node] = tree.child(before, token)
        return tree.proposal()


class SamRecycling(TokenRecycling):
    """SAM decoding with Token Recycling: the chain after a long match in the text or in a datastore, else the tree.

    As in the paper and its code, a match needs 5 tokens, and a match in the datastore counts 5 tokens less. The first
    occurrence of a match counts, in the text the first one followed by a whole draft. The successors after the prompt's
    tokens are kept too. Scaled: the chain (40 tokens in the paper) and the tree (80) have `nodes` each. Matches are
    found by search instead of a suffix automaton.

    Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3.
    """

    SHORTEST, BIAS = 5, 5  # minimum tokens of a match, and extra tokens needed in the datastore

    def __init__(
        self, vocab_size: int, nodes: int, store: Datastore | None = None, model: PreTrainedModel | None = None
    ) -> None:
        super().__init__(vocab_size, nodes, model)
        self._nodes, self._store = nodes, store

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self.texts[row]
        _, in_text = first_longest(text, 1, len(text))
        stored, in_store = self._store.first_longest(text, self._nodes) if self._store is not None else (text[:0], 0)
        if max(in_text, in_store - self.BIAS) < self.SHORTEST:
            return super().propose(row, max_nodes)
        tree = DraftTree(int(text[-1]), max_nodes)
        if in_text >= in_store - self.BIAS:
            place = first_longest(text, 1, len(text), self._nodes)[0] or first_longest(text, 1, 1)[0]
            tree.add(text[place : place + self._nodes].tolist())
        else:
            tree.add(stored.tolist())
        return tree.proposal()


class LogitSpec(RuleRows):
    """LogitSpec: the next likeliest tokens in the logits of the newest token are guesses at the token after it.

    The newest token and every guess are continued from the longest match of up to 3 tokens in the text: the newest
    occurrence followed by 20 tokens, else the first. As in the paper's code, guesses are ordered by rank in the logits
    that gave the newest token. The first 8 guesses have chains of 4 tokens including themselves, the next 24 of 3, and
    later ones have no chain. Scaled: the chain of the newest token has 20 of 64 nodes in the paper, and the same share
    of `nodes` here. Logits of all ranks are computed from hidden states.

    Source: Liu et al. 2025, "LogitSpec: Accelerating Retrieval-based Speculative Decoding via Next Next Token
        Speculation", §3.
    """

    hidden_layers: tuple[int, ...] = (-1,)
    LONGEST, AHEAD = 3, 20  # maximum tokens of a match, and tokens that should follow it
    NODES = 64  # of the paper's tree, including the root

    def __init__(self, nodes: int, model: PreTrainedModel) -> None:
        super().__init__()
        self._model, self._nodes = model, nodes
        self._guesses: dict[int, list[int]] = {}

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        text = self.texts[row]
        tree = DraftTree(int(text[-1]), max_nodes)
        tree.add(self._after(text, [])[: max(1, self.AHEAD * self._nodes // self.NODES)])
        for rank, guess in enumerate(self._guesses.get(row, [])):
            if guess != text[-1]:
                length = 4 if rank <= 8 else 3 if rank <= 32 else 1
                tree.add([guess, *self._after(text, [guess])][:length])
        return tree.proposal()

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        super().observe(row, feedback, placed)
        last = feedback.hidden[-1][int(feedback.path[-1])]
        self._guesses[row] = likeliest(self._model, last[None], self._nodes + 1)[0].tolist()

    def finish(self, row: int) -> None:
        super().finish(row)
        self._guesses.pop(row, None)

    def _after(self, text: IntArray, guess: list[int]) -> list[int]:
        """The tokens that followed the last tokens of the text and a guess, in the text before its last token."""
        known, context = text[:-1], np.append(text[-self.LONGEST :], guess).astype(np.int32)
        place = _place_after(known, context[-self.LONGEST :], self.AHEAD)
        return known[place : place + self.AHEAD].tolist() if place else []


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
def _place_after(text, context, ahead):
    """The position after the longest match of the end of `context`, newest with `ahead` tokens, else first; or 0."""
    for size in range(len(context), 0, -1):
        first = 0
        for end in range(len(text) - 1, size - 1, -1):
            match = 0
            while match < size and text[end - 1 - match] == context[len(context) - 1 - match]:
                match += 1
            if match == size:
                first = end
                if end + ahead <= len(text):
                    break
        if first:
            return first
    return 0
