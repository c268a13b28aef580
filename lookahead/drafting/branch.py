"""Controls the lookahead branch: decides by costs when it runs, and accounts for its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lookahead.drafting.budget import Budget, Ema
from lookahead.drafting.cost_model import FloatArray
from lookahead.drafting.sizes import MAX_NODES_LIMIT, BranchSize
from lookahead.drafting.tree import IntArray, TokenTree, without_sources

_EXPECTED_GAIN = 0.27  # expected tokens per step of an untried branch, per doubling of the window
TEACHING_GAIN = 0.012  # additional worth of a verified node in tokens, if a source learns from its logits
_WINDOW_SHARE = 1 / 3  # share of `TEACHING_GAIN` for a node of the window
_HYSTERESIS = 1.03  # predicted speedup required to switch
_REVIEW_EVERY = 16  # steps between two reviews
_SLOW = 1 / 64  # EMA rate
_FORGET = 1 / 512  # rate at which a low gain ratio recovers while the branch is off


@dataclass(slots=True)
class BranchState:
    """Learned state of the lookahead branch for one batch size; costs in plain steps, tokens and nodes per row.

    Example:
        >>> states: dict[int, BranchState] = {}
        >>> LookaheadBranch(BranchSize(), states).rest(rows=4)
        >>> states[2].is_on, states[2].budget.is_proven
        (False, True)
    """

    # Its price is computed from step costs, which are averages already.
    budget: Budget = field(default_factory=lambda: Budget(price=Ema(0.2)))
    is_on: bool = False
    steps: int = 1  # since `is_on` changed
    tokens: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))  # of a step without the branch
    nodes: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0))
    host: Ema = field(default_factory=lambda: Ema(_SLOW))  # time of its proposer
    gain_ratio: Ema = field(default_factory=lambda: Ema(_SLOW, value=1.0, count=4))  # tokens added / tokens expected


class LookaheadBranch:
    """Turns the lookahead branch on and off, separately for batch sizes 1, 2, 3-4, … rows.

    Its cost is known before a step: its nodes. Its gain is known after: the accepted tokens that no other source
    offered. Every 16 steps, tokens per cost with and without it are compared; an untried branch is expected to add
    tokens by the logarithm of its window. Its `Budget` bounds the cost of trials: it starts while the budget is proven,
    and stops as soon as the budget does not afford another step.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", §4 (steps
        saved grow linearly with the logarithm of the window).

    Example:
        >>> import numpy as np
        >>> branch, plain = LookaheadBranch(BranchSize()), (TokenTree.root(5), np.zeros(1, np.int32))
        >>> for _ in range(15):  # a step takes 10 ms at any number of nodes
        ...     branch.rest(rows=1)
        ...     branch.choose(lambda nodes: np.full(nodes + 1, 0.01), measured=64)
        ...     _ = branch.record([plain], [1], 1, np.full(2, 0.01))
        >>> branch.rest(rows=1)
        >>> branch.choose(lambda nodes: np.full(nodes + 1, 0.01), measured=64)
        >>> branch.is_on, branch.nodes_beside(8)
        (True, 63)
    """

    def __init__(
        self,
        size: BranchSize,
        states: dict[int, BranchState] | None = None,  # learned earlier for the model, by batch size
        *,
        max_nodes: int = MAX_NODES_LIMIT,  # of a draft with the branch, without the root
        teaches: bool = False,  # a source learns from the logits at all nodes, as `recycled` does
    ) -> None:
        self.is_on = False  # in the coming step
        self.host_s = 0.0  # seconds of its proposer in this step
        self._size = size
        self._states = states if states is not None else {}
        self._state: BranchState  # of the number of rows, from `rest` on
        self._max_nodes = max_nodes
        self._teaching = TEACHING_GAIN if teaches else 0.0  # worth of a verified node in tokens, accepted or not
        self.bits = 0  # bits of its source in a tree, set by the controller

    def rest(self, rows: int) -> None:
        """Begin a step of `rows` rows with the branch off."""
        self.is_on, self.host_s = False, 0.0
        self._state = self._states.setdefault((rows - 1).bit_length(), BranchState())

    def choose(self, curve: Callable[[int], FloatArray], measured: int) -> None:
        """Decide whether it runs in the coming step, after `rest`.

        `curve` gives the seconds of a step of 0 up to a number of nodes per row; `measured` is the largest measured
        number.
        """
        state, is_on = self._state, self._state.is_on
        if is_on and not state.budget.affords:
            is_on = False
        elif state.steps % _REVIEW_EVERY == 0 and (is_on or state.budget.is_proven):
            is_on = self._pays(curve, measured)
        if is_on != state.is_on:
            state.is_on, state.steps, state.gain_ratio.count = is_on, 0, 4
        self.is_on = is_on

    def nodes_beside(self, nodes: int) -> int:
        """Maximum nodes of the coming draft, given the maximum without the branch."""
        return min(nodes + self._size.nodes, self._max_nodes) if self.is_on else nodes

    def record(
        self, verified: Sequence[tuple[TokenTree, IntArray]], tokens: Sequence[int], nodes: int, costs: FloatArray
    ) -> tuple[int, float]:
        """Count a step; returns the bits and seconds of its proposer that are charged only to its budget.

        `verified` holds the tree and the accepted nodes of each row, `tokens` the tokens each row emitted. The largest
        tree had `nodes`; `costs` are the seconds of a step by that number.
        """
        state, is_on, rows, plain_s = self._state, self.is_on, len(tokens), float(costs[1])
        own_nodes, own = without_sources(verified, tokens, self.bits) if is_on else (nodes, tokens)
        own_tokens = sum(own) / rows
        state.steps += 1
        state.nodes.add(own_nodes)
        state.tokens.add(own_tokens)
        if not is_on:
            ratio = state.gain_ratio.value
            state.gain_ratio.value = max(ratio, ratio + _FORGET * (1.0 - ratio))
            if not state.budget.is_proven:  # a trial may lose no more after a long time off
                state.budget.settle(0.0, own_tokens, is_asked=False)
            return 0, 0.0
        host = state.host.add(min(1.0, self.host_s / plain_s))  # more is one-time compiling or loading
        added, own_s = sum(tokens) / rows - own_tokens, float(costs[own_nodes])
        spent_s = float(costs[nodes]) - own_s + host * plain_s
        state.gain_ratio.add(added / max(_expected_gain(self._size), 0.1))
        # In its time the other sources would have produced tokens at their average rate.
        state.budget.charge(spent_s=spent_s, alone=added, tokens=state.tokens.value + added, step_s=own_s + spent_s)
        return (0, 0.0) if state.budget.is_proven else (self.bits, self.host_s)

    def _pays(self, curve: Callable[[int], FloatArray], measured: int) -> bool:
        """Whether decoding with the branch gives more tokens per cost than without.

        Beyond the measured nodes the cost is the highest measured one; a single step corrects it.
        """
        state, size, nodes = self._state, self._size, round(self._state.nodes.value)
        # Nodes that the branch adds to a tree: guesses share prefixes, and unlikely ones are dropped.
        whole = nodes + size.window_nodes + size.guesses
        costs = curve(whole)
        costs = costs / costs[1]
        without = state.tokens.value / costs[nodes] * (1.0 if state.is_on else _HYSTERESIS)
        tokens = state.tokens.value + state.gain_ratio.value * _expected_gain(size)
        tokens += _WINDOW_SHARE * self._teaching * size.window_nodes
        rate = tokens / (costs[max(nodes, min(whole, measured))] + state.host.value)
        return bool(rate * (_HYSTERESIS if state.is_on else 1.0) > without)


def _expected_gain(size: BranchSize) -> float:
    """Expected tokens per step of an untried branch."""
    return min(size.ngram_size - 1.0, _EXPECTED_GAIN * math.log2(size.window_nodes + 2)) if size.guesses else 0.0
