"""Proposers that know the output, are always wrong, or draw random trees. No proposal may change a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer

Offer = Callable[[int, list[int], int], Proposal | None]


class Scripted(Proposer):
    """A proposer that returns the proposals of a function.

    Args:
        offer: Takes a row's index in the batch, its text so far and the maximum number of nodes; returns a proposal.
    """

    sources = ("scripted",)

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._ids: dict[int, list[int]] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        self._ids[row] = prompt.tolist()

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        return self._offer(row, self._ids[row], max_nodes)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        self._ids[row] += feedback.tokens.tolist()

    def finish(self, row: int) -> None:
        del self._ids[row]


@contextmanager
def drafting_by(offer: Offer) -> Iterator[None]:
    """Let every engine created in the block draft with one scripted proposer."""
    with patch("lookahead.decoding.assembly.make_proposers", lambda *arguments: [Scripted(offer)]):
        yield


def chain(tokens: list[int]) -> Proposal:
    """A proposal of one continuation; `tokens[0]` is the root."""
    parents = np.maximum(np.arange(len(tokens)) - 1, 0).astype(np.int32)
    return Proposal(np.array(tokens, np.int32), parents, np.ones(len(tokens), np.float32))


def nothing(row: int, text: list[int], max_nodes: int) -> None:
    """No draft."""


def perfect(answers: list[list[int]]) -> Offer:
    """Draft the output of every row; `answers` are the whole texts, including the prompts."""
    return lambda row, text, max_nodes: chain(answers[row][len(text) - 1 : len(text) + max_nodes] or text[-1:])


def always_wrong(answers: list[list[int]], vocab_size: int) -> Offer:
    """Draft, for every row, tokens that are not in its output."""

    def offer(row: int, text: list[int], max_nodes: int) -> Proposal:
        return chain(
            [text[-1], *((token + 1) % vocab_size for token in answers[row][len(text) : len(text) + max_nodes])]
        )

    return offer


def among_decoys(answers: list[list[int]], vocab_size: int) -> Offer:
    """Draft the output of every row, and before every right token a likelier wrong one, followed by a right one."""

    def offer(row: int, text: list[int], max_nodes: int) -> Proposal:
        tokens, parents, chances, right = [text[-1]], [0], [1.0], 0
        for token in answers[row][len(text) : len(text) + min(5, max_nodes // 3)]:
            decoy = len(tokens)
            tokens += [(token + 1) % vocab_size, token, token]
            parents += [right, decoy, right]
            chances += [0.9, 0.9, 0.8]
            right = len(tokens) - 1
        return Proposal(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(chances, np.float32))

    return offer


def random_trees(vocab_size: int) -> Offer:
    """Draft trees of maximum size and random shape, seeded by the text."""

    def offer(row: int, text: list[int], max_nodes: int) -> Proposal:
        rng = np.random.default_rng([row, len(text)])
        tokens, parents, edges = [text[-1]], [0], set[tuple[int, int]]()
        while len(tokens) <= max_nodes:
            edge = (int(rng.integers(len(tokens))), int(rng.integers(vocab_size)))
            if edge not in edges:
                edges.add(edge)
                parents.append(edge[0])
                tokens.append(edge[1])
        chances: NDArray[np.float32] = np.full(len(tokens), 0.999, np.float32)
        return Proposal(np.array(tokens, np.int32), np.array(parents, np.int32), chances)

    return offer
