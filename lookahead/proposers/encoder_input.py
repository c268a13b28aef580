"""Proposers that have read what the encoder reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer, question_of
from lookahead.proposers.validated import CustomProposer


class Informed:
    """Stands before a proposer and shows it the encoder's input ahead of a row's own tokens.

    A summary's n-grams are in the document, which a decoder's own text does not hold: its prompt is one start token.

    Args:
        proposer: What drafts.
        inputs: For every row of the batch the encoder's input without its padding, int32 `[tokens]`.
    """

    def __init__(self, proposer: Proposer, inputs: Sequence[IntArray]) -> None:
        self._proposer = proposer
        self._inputs = inputs
        self._question = question_of(proposer)
        self.sources = proposer.sources
        self.needs_argmax = proposer.needs_argmax
        self.needs_top = proposer.needs_top
        self.hidden_layers = proposer.hidden_layers

    def start(self, row: int, prompt: IntArray) -> None:
        """Show it a new row, behind the encoder's input."""
        self._proposer.start(row, np.concatenate((self._inputs[row], prompt)))

    def propose(self, row: int, room: int) -> Proposal | None:
        """What it offers for one row."""
        return self._question([row], room)[0]

    def propose_batch(self, rows: Sequence[int], room: int) -> Sequence[Proposal | None]:
        """What it offers for some rows."""
        return self._question(rows, room)

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Let it learn."""
        self._proposer.observe(row, feedback, placed)

    def finish(self, row: int) -> None:
        """Let it forget the row."""
        self._proposer.finish(row)


class InformedCustom(Informed):
    """The same for a proposer that is asked only as long as it is worth its time."""

    def __init__(self, proposer: CustomProposer, inputs: Sequence[IntArray]) -> None:
        super().__init__(proposer, inputs)
        self._custom = proposer

    def settle(self, *, alone: float, tokens: float, step_s: float) -> float | None:
        """Let it learn what it was worth, as `CustomProposer.settle`."""
        return self._custom.settle(alone=alone, tokens=tokens, step_s=step_s)


def informed(proposer: Proposer, inputs: Sequence[IntArray]) -> Informed:
    """A proposer behind one of the two."""
    if isinstance(proposer, CustomProposer):
        return InformedCustom(proposer, inputs)
    return Informed(proposer, inputs)
