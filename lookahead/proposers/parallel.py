"""Drafts of trained heads that guess side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lookahead.heads.product import GuessTree, grow_product
from lookahead.heads.rates import HeadRates
from lookahead.proposers.base import Call, IntArray, Outcome, Proposal, Proposer

_GUESSES = 32  # of each head: a draft of any size hardly reaches further down


class Guesser(Protocol):
    """Heads that guess side by side, with what they remember of every row.

    Attributes:
        heads: How many.
    """

    heads: int

    def read(self, row: int, states: Tensor) -> None:
        """Take in the hidden states `[n, size]` of a row's newest tokens."""

    def guess(self, rows: Sequence[int]) -> Tensor:
        """Logits of every head after the newest tokens of some rows, `[heads, rows, vocab]`."""

    def forget(self, row: int) -> None:
        """Forget a row."""


@dataclass(slots=True)
class _Row:
    """One row: its newest token, and what was offered after it."""

    root: int
    unread: list[Tensor] = field(default_factory=list)
    tree: GuessTree | None = None
    promised: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None


class ParallelProposer(Proposer):
    """Combines what heads guess for the next places into a tree, by how far each guess can be trusted.

    Args:
        guesser: The heads.
        rates: What is known of their guesses already, and where more is learned.
        call: The call to draft for.
        name: What the source is called.
        reads_all: Whether the heads read every token's hidden states, not the newest one's alone.
    """

    hidden_layers = (-1,)

    def __init__(self, guesser: Guesser, rates: HeadRates, call: Call, *, name: str, reads_all: bool) -> None:
        self.sources = (name,)
        self._guesser = guesser
        self._rates = rates
        self._call = call
        self._reads_all = reads_all
        self._rows: dict[int, _Row] = {}

    def start(self, row: int, prompt: IntArray) -> None:
        """Meet a new row."""
        self._rows[row] = _Row(int(prompt[-1]))

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer the guesses for one row."""
        return self.propose_batch([row], room)[0]

    def propose_batch(self, rows: Sequence[int], room: int) -> Sequence[Proposal | None]:
        """Let the heads guess for all rows at once, and offer what promises most."""
        with torch.inference_mode():
            for row in rows:
                if self._rows[row].unread:
                    self._guesser.read(row, torch.cat(self._rows[row].unread))
                    self._rows[row].unread.clear()
            logits = self._guesser.guess(rows)[..., : self._call.vocab_size]
            if self._call.warp is not None:
                logits = self._call.warp(logits.flatten(0, 1).float()).view(logits.shape)
            chances, tokens = logits.softmax(-1, dtype=torch.float32).topk(min(_GUESSES, logits.shape[-1]))
        # [heads, rows, guesses], one copy from the device
        packed = torch.cat((tokens.int(), chances.view(torch.int32)), -1).cpu().numpy()
        return [self._offer(row, packed[:, i], room) for i, row in enumerate(rows)]

    def observe(self, row: int, outcome: Outcome, placed: IntArray) -> None:
        """Learn which guesses were right, and keep the hidden states of the accepted tokens for later."""
        state = self._rows[row]
        if state.tree is not None and state.promised is not None:
            tree = state.tree
            self._rates.learn(tree.tokens, tree.parents, tree.guesses, state.promised, outcome.tokens)
        state.tree = None
        state.root = int(outcome.tokens[-1])
        prompt = outcome.prompt_hidden.get(-1)
        if not self._reads_all:
            state.unread = [outcome.hidden[-1][outcome.path[-1:]]]
        else:
            state.unread.append(outcome.hidden[-1][outcome.path] if prompt is None else prompt)

    def finish(self, row: int) -> None:
        """Forget the row; what was learned stays."""
        del self._rows[row]
        self._guesser.forget(row)

    def _offer(self, row: int, packed: IntArray, room: int) -> Proposal | None:
        """The tree of one row's guesses, int32 `[heads, 2 · guesses]`: tokens, then the bits of their probabilities."""
        state = self._rows[row]
        tokens, bits = np.split(packed, 2, axis=1)
        promised = np.ascontiguousarray(bits).view(np.float32)
        tree = grow_product(state.root, np.ascontiguousarray(tokens), self._rates.calibrate(promised), room)
        if len(tree.tokens) == 1:
            return None
        state.tree, state.promised = tree, promised[tree.guesses[:, 0], tree.guesses[:, 1]]
        return Proposal(tree.tokens, tree.parents, tree.probabilities)
