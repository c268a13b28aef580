"""The interface of proposers, the sources of drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead.drafting.tree import TokenTree

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draws:
    """How the nodes of a proposal were drawn, for rejection sampling.

    Attributes:
        distributions: `[m, vocab]`; the distributions, each with sum 1.
        origins: int32 `[k]`; the distribution that node i was drawn from. The children of a node are drawn in order
            from one distribution, without replacement. Their number must not depend on the drawn tokens, and none may
            be dropped.

    Example:
        >>> import torch
        >>> draws = Draws(torch.tensor([[0.2, 0.8], [1.0, 0.0]]), origins=np.array([0, 0, 1], np.int32))
        >>> [round(draws.distributions[origin, token].item(), 1) for origin, token in zip(draws.origins[1:], [1, 0])]
        [0.8, 1.0]
    """

    distributions: Tensor
    origins: IntArray


class Proposal(NamedTuple):
    """A small tree of continuations of a row's last token.

    Attributes:
        tokens: int32 `[k]`; `tokens[0]` is the row's last token, the root.
        parents: int32 `[k]`; the parent of node i is an earlier node, `parents[i] < i`; `parents[0]` is 0.
            No two children of one node hold the same token.
        probabilities: float32 `[k]`; the proposer's estimate of the probability that the target chooses node i
            once it chose its parent; `probabilities[0]` is 1.
        sources: int32 `[k]`; bit s is set if source s of the proposer offered the node. None if it has one source.
        required: Number of leading nodes that the draft must hold at any probability (the Jacobi window); nodes beyond
            the end of the output are still dropped.
        draws: How its nodes were drawn, or None; drawn nodes must all be required.

    Example:
        >>> tokens, parents = np.array([5, 6, 7], np.int32), np.array([0, 0, 1], np.int32)  # 6 7 after the last token 5
        >>> proposal = Proposal(tokens, parents, np.array([1.0, 0.5, 0.9], np.float32))
        >>> proposal.required, proposal.draws is None
        (0, True)
    """

    tokens: IntArray
    parents: IntArray
    probabilities: FloatArray
    sources: IntArray | None = None
    required: int = 0
    draws: Draws | None = None


@dataclass(slots=True)  # not frozen, which would double the time to create one
class Top:
    """The target's most likely tokens after every node of a draft, before any logits processor.

    Attributes:
        tree: The draft; after the prefill only the last token of the prompt.
        tokens: int32 `[nodes, 8]`; the tokens after each node, most likely first.
        probabilities: float32 `[nodes, 8]`; their probabilities.

    Example:
        >>> chances = np.array([[0.6, 0.3, 0.1, 0, 0, 0, 0, 0]], np.float32)
        >>> top = Top(TokenTree.root(5), np.arange(8, dtype=np.int32)[None], chances)
        >>> int(top.tokens[0, 1]), round(float(top.probabilities[0, 1]), 2)  # the second most likely
        (1, 0.3)
    """

    tree: TokenTree
    tokens: IntArray
    probabilities: FloatArray


@dataclass(slots=True)  # like `Top`
class Feedback:
    """The result of one row's draft in one step.

    Attributes:
        tokens: int32 `[n]`; the emitted tokens in order: accepted ones, then the bonus token (none if a stop cut the
            step short). Never empty.
        path: int32 `[a]`; the accepted nodes of the draft from the root, `path[0] == 0`.
        argmax: int32 `[nodes]`; the target's most likely next token after every node of the draft, before any logits
            processor. It may be empty if no proposer of the engine sets `needs_argmax`.
        top: More of the target's likely tokens; None if no proposer of the engine sets `needs_top`.
        hidden: For every layer in a proposer's `hidden_layers`, the target's hidden states at every node of the draft,
            `[nodes, size]`, if the target computed them.
        prompt_hidden: The same at the prompt tokens that the prefill read, `[tokens, size]`: all, or the last ones if
            the call continued a filled cache. Empty except in a row's first feedback.

    Example:
        >>> ids = lambda *tokens: np.array(tokens, np.int32)
        >>> feedback = Feedback(tokens=ids(6, 9), path=ids(0, 1), argmax=ids(6, 9, 3))  # 6 accepted, 9 the bonus token
        >>> int(feedback.argmax[feedback.path[-1]]) == int(feedback.tokens[-1])
        True
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
        model: The target. Its weights may be read (embeddings, LM head); only the engine runs it.
        tokenizer: The target's, if the caller passed one, as `lookahead.generate` does; else None.
        rows: Rows of the batch; a row is identified by its index.
        vocab_size: Proposed token ids must be below this.
        max_length: Maximum tokens of a row, including prompt and padding.
        max_nodes: Maximum nodes of a draft, without the root.
        is_chain: The target verifies only chains: the most likely chain of a proposal is used.
        is_timed: Drafts are sized by measured time (`draft="auto"`), so a proposer may measure time as well.
        by_rejection: Drafts are accepted by rejection sampling: every proposal must have `draws`.
        warp: The position-independent part of sampling (temperature and truncation), for scores `[n, vocab]`. None for
            greedy decoding.
        inputs: The encoder's input of an encoder-decoder target, int32 `[tokens]` for every row without padding; empty
            if it is not text in the decoder's vocabulary. None for a causal target.
        encoded: The encoder's input and output, as `ModelKind.encoded` gives it; None for a causal target.
        predicts: Rows may have predictions, which are passed to `Proposer.expect`.
        is_constrained: Rows may follow a grammar, whose forced tokens are drafted.

    Example:
        >>> sizes = {"rows": 2, "vocab_size": 100, "max_length": 64, "max_nodes": 8}
        >>> ways = {"is_chain": False, "is_timed": True, "by_rejection": False, "warp": None}
        >>> Call(model=None, tokenizer=None, **sizes, **ways).predicts
        False
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
    inputs: Sequence[IntArray] | None = None
    encoded: Any = None
    predicts: bool = False
    is_constrained: bool = False


class Proposer(Protocol):
    """A source of drafts for many rows at once.

    The engine calls `start` once per row, then `propose` and `observe` in turn, and `finish` when the row is done.
    If drafting does not pay, `propose` is not called, and `observe` gets the tokens with an empty `placed`. With
    `draft="auto"` a proposer that is not worth its time gets no new rows, and `finish` is called early if it reads
    hidden states and will not be called for the row again.

    Attributes:
        sources: Names of its sources in the stats; one or more, different from those of other proposers.
        needs_argmax: Whether `observe` reads `Feedback.argmax`.
        needs_top: Whether `observe` reads `Feedback.top`.
        hidden_layers: The hidden states that `observe` reads from `Feedback.hidden`, numbered as in
            `output_hidden_states` of transformers: 0 is the embeddings, 1 the output of the first layer, and -1 the
            output of the last, which the LM head reads.
        reads_inputs: Whether it reads `Call.inputs` by itself: `start` then gets only what the target's decoder wrote.
        reads_offers: Whether `propose_batch` takes the proposals of earlier proposers as a third argument, by proposer
            and row.
        is_judge: Whether it is so much surer than the others that what it passes over is hardly chosen.
        shares_cache: Whether `share_cache` is called before any row starts; it then gets every row of every step.

    Example:
        >>> class Repeat(Proposer):
        ...     sources = ("repeat",)
        ...     def start(self, row, prompt):
        ...         self.last = prompt[-1:]
        ...     def propose(self, row, max_nodes):
        ...         return Proposal(self.last.repeat(2), np.zeros(2, np.int32), np.array([1.0, 0.5], np.float32))
        ...     def observe(self, row, feedback, placed):
        ...         self.last = feedback.tokens[-1:]
        >>> proposer = Repeat()  # for one row; others hold the state of each row
        >>> proposer.start(0, np.array([4, 7], np.int32))
        >>> proposer.propose(0, max_nodes=8).tokens.tolist()
        [7, 7]
    """

    sources: tuple[str, ...]
    needs_argmax: bool = False
    needs_top: bool = False
    hidden_layers: tuple[int, ...] = ()
    reads_inputs: bool = False
    reads_offers: bool = False
    is_judge: bool = False
    shares_cache: bool = False

    def share_cache(self, cache: Any) -> None:
        """Receive the `TreeCache` of the target, whose slots after the committed tokens may be written to draft."""
        return None

    def start(self, row: int, prompt: IntArray) -> None:
        """Begin a new row; `prompt` (int32 `[tokens]`, at least one) ends with the first root."""

    def expect(self, row: int, predictions: Sequence[IntArray]) -> None:
        """Receive the expected outputs of a row, int32 `[tokens]` each; called after `start` if there are any."""
        return None

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """Propose continuations of the row's last token, at most `max_nodes` nodes without the root."""

    def propose_batch(self, rows: Sequence[int], max_nodes: int) -> Sequence[Proposal | None]:
        """The proposal for each of `rows`; with `reads_offers` it takes the earlier proposals as a third argument."""
        return [self.propose(row, max_nodes) for row in rows]

    def observe(self, row: int, feedback: Feedback, placed: IntArray) -> None:
        """Learn from the target's choice.

        Args:
            row: The row that `propose` was called for.
            feedback: The result of the step; `feedback.tokens[-1]` is the next root.
            placed: int32 `[k]`; the draft node of each node of the proposal, 0 if it was dropped (and for the root).
                Empty if nothing was proposed.
        """

    def finish(self, row: int) -> None:
        """Forget the row."""


class BatchProposer(Proposer, Protocol):
    """A proposer that drafts for all rows of a step at once, such as one that runs a model.

    Example:
        >>> class Silent(BatchProposer):
        ...     sources = ("silent",)
        ...     def propose_batch(self, rows, max_nodes):
        ...         return [None for _ in rows]
        >>> Silent().propose_batch([0, 1], max_nodes=8), Silent().propose(0, max_nodes=8)
        ([None, None], None)
    """

    def propose(self, row: int, max_nodes: int) -> Proposal | None:
        """The proposal for one row."""
        return self.propose_batch([row], max_nodes)[0]

    def propose_batch(self, rows: Sequence[int], max_nodes: int) -> Sequence[Proposal | None]:
        """The proposal for each of `rows`; called instead of `propose`."""


ProposerFactory = Callable[[Call], Proposer]
