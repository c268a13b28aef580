"""What a proposer is: the one interface every source of drafts implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import TokenTree

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draws:
    """How the nodes of a proposal were drawn, which rejection sampling needs to know.

    Attributes:
        distributions: `[m, vocab]`; what was drawn from, each adding up to 1.
        origins: int32 `[k]`; which of them node i was drawn from. The children of a node come from one, without
            replacement, in the order in which they stand. How many are drawn at a node must not depend on what they
            turn out to be, and none may be left out.
    """

    distributions: Tensor
    origins: IntArray


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
        draws: Where its nodes were drawn, how; then all of them must be required.
    """

    tokens: IntArray
    parents: IntArray
    probabilities: FloatArray
    sources: IntArray | None = None
    required: int = 0
    draws: Draws | None = None


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
class Feedback:
    """What became of one row's draft in one step.

    Attributes:
        tokens: int32 `[n]`; the tokens the step emitted, in order: those accepted, then the bonus token
            (none where a stop cut the step short). Never empty.
        path: int32 `[a]`; the accepted nodes of the draft from the root, `path[0] == 0`.
        argmax: int32 `[nodes]`; the target's likeliest next token after every node of the draft, before any
            logits processor. Empty when no proposer of the engine asked for it (`needs_argmax`).
        top: More of what it thinks likely; None when no proposer of the engine asked for it (`needs_top`).
        hidden: For every layer a proposer of the engine asked for (`hidden_layers`) the target's hidden states at
            every node of the draft, `[nodes, size]`, where the target computed them.
        prompt_hidden: The same at the tokens of the prompt that the prefill read, `[tokens, size]`: all of them, or
            the last ones where the call went on from a filled cache. Empty but in a row's first feedback.
    """

    tokens: IntArray
    path: IntArray
    argmax: IntArray
    top: Top | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    prompt_hidden: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call of `generate` that a proposer is made for.

    Attributes:
        model: The target. Its weights may be read (its embeddings, its head); to run it is the engine's business.
        tokenizer: The target's, where the caller gave one, as `lookahead.generate` does; else None.
        rows: Rows of the batch; a row is told by its place in it.
        vocab_size: Token ids that can be proposed are those below.
        max_length: Most tokens a row will hold, its prompt included and its padding too.
        max_nodes: Most nodes of a draft, the root not counted.
        is_chain: The target verifies chains only: of a proposal no more than its likeliest chain will be used.
        is_timed: Drafts are sized by the time they take (`draft="auto"`), so a proposer may watch the clock as well.
        by_rejection: Drafts are accepted by rejection sampling: every proposal must tell its `draws`.
        warp: What sampling does to scores `[n, vocab]` that is the same at every place: temperature and truncation.
            None where the target's choice is the likeliest token.
    """

    model: Any
    tokenizer: Any
    rows: int
    vocab_size: int
    max_length: int
    max_nodes: int
    is_chain: bool
    is_timed: bool
    by_rejection: bool
    warp: Callable[[Tensor], Tensor] | None


class Proposer(Protocol):
    """A source of drafts for many rows at once.

    The engine calls `start` once per row, then `propose` and `observe` in turn, and `finish` when the row is done.
    Where drafting does not pay it leaves `propose` out: the next `observe` then tells, with an empty `placed`, what
    one step emitted, or many steps together where no proposer of the engine reads `argmax` or hidden states. With
    `draft="auto"` a row is not shown to a proposer that would not be worth its time, and one that reads hidden states
    is told to `finish` a row when it will not be asked for it again.

    Attributes:
        sources: What its sources are called in the stats; one or more, and no other proposer's.
        needs_argmax: Whether `observe` reads `Feedback.argmax`.
        needs_top: Whether `observe` reads `Feedback.top`.
        hidden_layers: The hidden states that `observe` reads from `Feedback.hidden`, numbered as by
            `output_hidden_states` of transformers: 0 is the embeddings, 1 what the first layer gives, and -1 the
            last, which the head reads.
    """

    sources: tuple[str, ...]
    needs_argmax: bool = False
    needs_top: bool = False
    hidden_layers: tuple[int, ...] = ()

    def start(self, row: int, prompt: IntArray) -> None:
        """Meet a new row; `prompt` (int32 `[tokens]`, at least one) ends with the first root."""

    def propose(self, row: int, room: int) -> Proposal | None:
        """Offer continuations of the row's newest token, at most `room` nodes besides the root."""

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Learn what the target chose.

        Args:
            row: The row that `propose` was called for.
            feedback: What the step did; `feedback.tokens[-1]` is the next root.
            placed: int32 `[k]`; for each node of this proposer's proposal the node of the draft it became,
                0 where it was left out (and for the root). Empty when nothing was proposed.
        """

    def finish(self, row: int) -> None:
        """Forget the row."""


@runtime_checkable
class BatchProposer(Proposer, Protocol):
    """A proposer that drafts for all rows of a step at once, as one that runs a model does."""

    def propose_batch(self, rows: Sequence[int], room: int) -> Sequence[Proposal | None]:
        """What `propose` gives, for every one of `rows`; `propose` itself is not called then."""


ProposerFactory = Callable[[Call], Proposer]


def question_of(proposer: Proposer) -> Callable[[Sequence[int], int], Sequence[Proposal | None]]:
    """How to ask a proposer about several rows: at once where it can, else one after the other."""
    if isinstance(proposer, BatchProposer):
        return proposer.propose_batch
    return lambda rows, room: [proposer.propose(row, room) for row in rows]
