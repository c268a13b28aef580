"""The order in which the summarizer learns: language, then copying, then extracting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training with one mixture of rows."""

    name: str
    share: float  # of all training tokens, 0 to 1
    mixture: Mapping[str, float]  # share of the rows of each kind in `rows.KINDS`
    shortest: int  # row in tokens; lengths are log-uniform up to the longest
    longest: int
    batch_tokens: int  # of one optimizer step, padding included


PHASES = (
    Phase("language", 0.05, {"language": 0.6, "tiled": 0.4}, 96, 160, 4096),
    Phase("copying", 0.10, {"tiled": 0.3, "ambiguous": 0.4, "copy": 0.15, "language": 0.15}, 96, 256, 6144),
    Phase("extracting", 0.27, {"summary": 0.55, "copy": 0.2, "ambiguous": 0.25}, 100, 420, 8192),
    Phase("long passages", 0.58, {"summary": 0.65, "copy": 0.2, "ambiguous": 0.15}, 120, 960, 8192),
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
