"""The drafting rules of others, as chains, for comparison on recorded outputs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

IntArray = NDArray[np.int32]


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
        """What followed there."""
        place = _first_longest(tokens, self._shortest, self._longest)
        return tokens[place : place + self._length] if place > 0 else tokens[:0]


class FirstOccurrence:
    """The rule of SAM decoding: the first place of the longest match of any length, 40 tokens drafted.

    Source: Hu et al. 2024, "SAM Decoding: Speculative Decoding via Suffix Automaton", §3.1 (the automaton's states
        keep the end of their first occurrence).
    """

    def __init__(self, length: int = 40) -> None:
        self._length = length
        self._next: list[dict[int, int]] = [{}]
        self._link, self._span, self._first = [-1], [0], [0]
        self._whole = self._state = self._read = 0

    def draft(self, tokens: IntArray) -> IntArray:
        """What followed there."""
        for token in tokens[self._read :].tolist():
            # The state of the longest suffix seen before, found before the token itself enters the automaton.
            while self._state > 0 and token not in self._next[self._state]:
                self._state = self._link[self._state]
            self._state = self._next[self._state].get(token, 0)
            self._extend(token)
        place = self._first[self._state]
        return tokens[place : place + self._length] if self._state > 0 else tokens[:0]

    def _extend(self, token: int) -> None:
        """Add one token: Blumer et al. 1985, the online construction."""
        self._read += 1
        new = self._add(self._span[self._whole] + 1, self._read, {})
        at = self._whole
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at >= 0:
            target = self._next[at][token]
            if self._span[target] == self._span[at] + 1:
                self._link[new] = target
            else:
                copy = self._add(self._span[at] + 1, self._first[target], dict(self._next[target]))
                self._link[copy] = self._link[target]
                self._link[target] = self._link[new] = copy
                while at >= 0 and self._next[at].get(token) == target:
                    self._next[at][token] = copy
                    at = self._link[at]
        self._whole = new

    def _add(self, span: int, first: int, following: dict[int, int]) -> int:
        """A new state, linked to the empty one for now."""
        self._next.append(following)
        self._link.append(0)
        self._span.append(span)
        self._first.append(first)
        return len(self._next) - 1


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
