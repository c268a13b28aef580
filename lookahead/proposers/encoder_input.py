"""Proposers that draft from the encoder's input too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer, question_of


class EncoderInputProposer:
    """Wraps a proposer and shows it the encoder's input before a row's own tokens.

    The n-grams of a summary are in the document, while the decoder's prompt is one start token. The inputs are those of
    every row of the batch without padding, int32 `[tokens]`.
    """

    def __init__(self, proposer: Proposer, inputs: Sequence[IntArray]) -> None:
        self._proposer = proposer
        self._inputs = inputs
        self.propose_batch = question_of(proposer)
        self.sources = proposer.sources
        self.needs_argmax = proposer.needs_argmax
        self.needs_top = proposer.needs_top
        self.hidden_layers = proposer.hidden_layers
        if hasattr(proposer, "settle"):
            self.settle = proposer.settle

    def start(self, row: int, prompt: IntArray) -> None:
        """Show it the encoder's input and the prompt of a new row."""
        self._proposer.start(row, np.concatenate((self._inputs[row], prompt)))

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """Its proposal for one row."""
        return self.propose_batch([row], max_nodes)[0]

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Pass the feedback on."""
        self._proposer.observe(row, feedback, placed)

    def finish(self, row: int) -> None:
        """Finish the row."""
        self._proposer.finish(row)
