"""What a proposer is: the one interface every source of drafts implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lookahead.tree import TokenTree

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class Proposal(NamedTuple):
    """A small tree of continuations of a row's newest committed token.

    Attributes:
        tokens: int32 `[k]`; `tokens[0]` is the newest committed token, the root.
        parents: int32 `[k]`; the parent of node i is an earlier node, `parents[i] < i`; `parents[0]` is 0.
            No two children of one node hold the same token.
        probabilities: float32 `[k]`; the chance, as the proposer sees it, that the target chooses node i
            once it chose the parent of i; `probabilities[0]` is 1.
        sources: int32 `[k]`; bit s is set where source s of the proposer offered the node. None where it has
            but one.
        required: How many of the first nodes must stand in the draft, whatever their probabilities (the
            Jacobi window); only a node deeper than the output may still grow is left out all the same.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: FloatArray
    sources: IntArray | None = None
    required: int = 0


@dataclass(frozen=True, slots=True)
class Top:
    """What the target thought likely after every node of a draft, before any logits processor.

    Attributes:
        tree: The draft, with what every proposer offered; after the prefill the last token of the prompt alone.
        tokens: int32 `[nodes, 8]`; the likeliest tokens after each node, the likeliest first.
        probabilities: float32 `[nodes, 8]`; their probabilities.
    """

    tree: TokenTree
    tokens: IntArray
    probabilities: FloatArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row's draft in one step.

    Attributes:
        tokens: int32 `[n]`; the tokens the step emitted, in order: those accepted, then the bonus token
            (none where a stop cut the step short). Never empty.
        path: int32 `[a]`; the accepted nodes of the draft from the root, `path[0] == 0`.
        argmax: int32 `[nodes]`; the target's likeliest next token after every node of the draft, before any
            logits processor. Empty when no proposer of the engine asked for it (`needs_argmax`).
        top: More of what it thinks likely; None when no proposer of the engine asked for it (`needs_top`).
    """

    tokens: IntArray
    path: IntArray
    argmax: IntArray
    top: Top | None = None


class Proposer(Protocol):
    """A source of drafts for many rows at once.

    The engine calls `start` once per row, then `propose` and `observe` in turn, and `finish` when the row is done.
    Where drafting does not pay it leaves `propose` out: the next `observe` then tells, with an empty `placed`, what
    one step emitted, or many steps together where the proposer does not read `argmax`. A proposer never sees the
    target model, only what it chose.

    Attributes:
        sources: What its sources are called in the configuration and in the stats; one or more.
        needs_argmax: Whether `observe` reads `Outcome.argmax`.
        needs_top: Whether `observe` reads `Outcome.top`.
    """

    sources: tuple[str, ...]
    needs_argmax: bool
    needs_top: bool

    def start(self, row: int, prompt: IntArray) -> None:
        """Meet a new row; `prompt` (int32 `[tokens]`, at least one) ends with the first root."""

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer continuations of the row's newest token, at most `room` nodes besides the root."""

    def observe(self, row: int, outcome: Outcome, placed: IntArray) -> None:
        """Learn what the target chose.

        Args:
            row: The row that `propose` was called for.
            outcome: What the step did; `outcome.tokens[-1]` is the next root.
            placed: int32 `[k]`; for each node of this proposer's proposal the node of the draft it became,
                0 where it was left out (and for the root). Empty when nothing was proposed.
        """

    def finish(self, row: int) -> None:
        """Forget the row."""
