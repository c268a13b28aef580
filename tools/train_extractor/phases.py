"""The order in which the summarizer learns: language, then copying, then extracting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training with one mixture of rows.

    Attributes:
        name: What it is called in logs.
        share: Share of all training tokens it takes, 0 to 1.
        mixture: Share of the rows of each kind in `rows.KINDS`.
        shortest, longest: Bounds of the row length, in tokens; lengths are log-uniform between them.
        batch_tokens: Tokens of one optimizer step, padding included.
    """

    name: str
    share: float
    mixture: Mapping[str, float]
    shortest: int
    longest: int
    batch_tokens: int


PHASES = (
    Phase(
        name="language",
        share=0.05,
        mixture={"language": 0.6, "tiled": 0.4},
        shortest=96,
        longest=160,
        batch_tokens=4096,
    ),
    Phase(
        name="copying",
        share=0.10,
        mixture={"tiled": 0.3, "ambiguous": 0.4, "copy": 0.15, "language": 0.15},
        shortest=96,
        longest=256,
        batch_tokens=6144,
    ),
    Phase(
        name="extracting",
        share=0.27,
        mixture={"summary": 0.55, "copy": 0.2, "ambiguous": 0.25},
        shortest=100,
        longest=420,
        batch_tokens=8192,
    ),
    Phase(
        name="long passages",
        share=0.58,
        mixture={"summary": 0.65, "copy": 0.2, "ambiguous": 0.15},
        shortest=120,
        longest=960,
        batch_tokens=8192,
    ),
)
"""The recipe. Copying does not emerge from language modelling or extracts alone at this size."""


def phase_at(tokens: int, budget: int) -> Phase:
    """The phase that training is in after so many of its tokens."""
    end = 0.0
    for phase in PHASES:
        end += phase.share
        if tokens < end * budget:
            return phase
    return PHASES[-1]


TRAINED_LENGTH = 1152
"""Tokens of a prompt and its extract together that the longest rows come to; the tokenizer states it as its limit."""
