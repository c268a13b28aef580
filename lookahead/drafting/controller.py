"""One engine's sense of time: what its steps cost, how large its drafts should be, and whether to draft at all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lookahead.drafting.batch_value import Batch
from lookahead.drafting.budget import Switch
from lookahead.drafting.cost_model import FloatArray, StepCost, padded_nodes
from lookahead.drafting.lookahead_branch import Branch
from lookahead.drafting.select import Draft

_MARGIN = 1.08  # times the cost of a plain step per token: what a draft must promise to be worth the risk
_RAGGED = 0.025  # plain steps that a step of rows of differing lengths takes more, for the mask that it needs
_LONGEST_REST = 16  # steps taken without a thought while nothing can be looked for; between rests one is measured
_ALONE = Batch(np.full(1, 1e9), np.arange(2.0))  # a token of a single row is a step
_LONG_OUTPUT = 256  # steps; most outputs end sooner, whatever they are allowed


class Pacing:
    """Sizes drafts by the measured cost of a step, and turns drafting off where it was measured to lose.

    Each step calls `rests`, and where that is false `begin`, where that gave costs `accepts`, and at its end `learn`.
    No clock is read here.

    While the lookahead branch is on trial, the switch is told what a step with it would have been without: what the
    branch loses then is on its own account.

    Args:
        cost: What steps were measured to cost; learns from every step.
        switch: What drafting was measured to save; learns likewise.
        branch: Whether the lookahead branch runs, where costs decide that; learns likewise.
        is_padded: Whether trees are padded to few sizes, so that the cost of a step is a staircase.
        runs_to_limit: Whether nothing ends a row before its limit.

    Attributes:
        batch: What a token of each row is worth in the coming step, once `begin` gave costs.
        branch: As given; one that is always off when None.
    """

    def __init__(
        self,
        cost: StepCost,
        switch: Switch,
        branch: Branch | None = None,
        *,
        is_padded: bool = False,
        runs_to_limit: bool = False,
    ) -> None:
        self._cost = cost
        self._is_padded = is_padded
        self._most = 1
        self._switch = switch
        self.branch = branch if branch is not None else Branch(())
        self._runs_to_limit = runs_to_limit
        self._rows = self._context = 0
        self.batch = _ALONE
        self._rest = self._rested = 0  # steps of this rest still to come, and those taken
        self._forgone = 0.0  # plain steps that drafts promised to save and were not taken for
        switch.begin_output()
        self._costs: FloatArray | None = None
        self._priced: FloatArray | None = None

    def rests(self, rows: int) -> bool:
        """Whether the coming step is plain and nobody need know what it takes: to decide and to note take time too."""
        if self._rest > 0 and rows == self._rows:
            self._rest -= 1
            self._rested += 1
            return True
        self._end_rest()
        return False

    def _end_rest(self) -> None:
        """Count the steps that were taken without a thought."""
        if self._rested:
            self._switch.pass_by(self._rows, self._rested)
        self._rest = self._rested = 0

    def begin_output(self) -> None:
        """Begin a further output, or as many of them as there are rows: what may be lost anew is counted by those."""
        self._end_rest()
        self._switch.begin_output()

    def begin(self, left: Sequence[int], context: int, nodes: int, *, is_refilled: bool = False) -> FloatArray | None:
        """What drafts of the coming step are to be sized by; None where nothing is to be drafted.

        Args:
            left: Tokens that each row that takes it may still emit.
            context: Tokens of the longest one.
            nodes: Nodes of the largest tree allowed without the lookahead branch, its root counted.
            is_refilled: Whether a row that ends makes room for another.

        Returns:
            float64 `[nodes + 1]`, or longer by the nodes of the branch: the seconds of a step by the nodes of its
            largest tree.
        """
        rows = len(left)
        self._rows, self._context, self._most = rows, context, nodes
        self._costs = self._priced = None
        self.branch.rest(rows)
        if not self._switch.looks(rows) or not self._cost.knows(rows, context):
            return None
        self.branch.choose(rows, self._curve, partial(self._cost.measured, rows, context))
        nodes = self.branch.nodes_beside(nodes)
        if nodes == 1:
            return None  # the branch is all there is, and it is off
        self._costs = self._curve(nodes)
        if rows > 1:
            lasting = 1.0 if self._runs_to_limit else self._switch.endings.chance_to_last(max(left))
            lasting = 0.0 if is_refilled else lasting  # no row has to wait for the last one
            self.batch = Batch.of(left, self._cost.plain(rows, context), lasting)
        else:
            self.batch = _ALONE
        # Looking is paid for whatever comes of it; a draft has to be worth its risk besides.
        priced = self._costs.copy()
        priced[2:] *= _MARGIN
        self._priced = priced + self._switch.look(rows) * priced[1]
        return self._priced

    def accepts(self, drafts: Sequence[Draft], *, in_step_for: int) -> bool:
        """Whether drafts of such promise are to be verified.

        Args:
            drafts: One per row.
            in_step_for: Where several rows hold equally many tokens, the most steps that they can still take so; else
                0. A pass over such rows needs no mask, unless it is padded. Accepted drafts end that for the rest of
                the output, so they wait until what they promised to save, taken together, is what all later steps
                would take more.
        """
        assert self._costs is not None and self._priced is not None
        nodes = max(len(draft.tree) for draft in drafts)
        tokens = self.batch.steps_saved([float(draft.reach.sum()) for draft in drafts])
        took = float(self._priced[nodes] / self._costs[1])
        if self.branch.size is None and not self._switch.drafts(self._rows, tokens / took, took - 1.0):
            return False
        in_step_for = 0 if self._is_padded else in_step_for
        if in_step_for:
            self._forgone += max(0.0, tokens - took)
        return self._forgone >= _RAGGED * min(in_step_for, _LONG_OUTPUT)

    @property
    def can_spare(self) -> bool:
        """Whether time can be spared for what may help later drafts alone."""
        return self._switch.has_reserve(self._rows)

    @property
    def pauses(self) -> bool:
        """Whether drafts were found to lose, so that only a long match would be verified."""
        return not self._switch.drafts(self._rows, 1.0)

    def learn(
        self,
        nodes: int,
        tokens: Sequence[int],
        host_s: float,
        step_s: float,
        without: tuple[int, Sequence[int]] | None = None,
        apart: tuple[int, Sequence[int], float] | None = None,
        *,
        is_cold: bool = False,
    ) -> None:
        """Count the step.

        Args:
            nodes: Nodes of its largest tree, its root counted.
            tokens: Tokens that each row emitted.
            host_s: What drafting took, and letting the proposers learn.
            step_s: What the rest of it took.
            without: Nodes and tokens, had the branch offered nothing; None where it did not.
            apart: Nodes and tokens without the proposers that are on their own account, and the branch while it is
                on trial, and what these proposers took; None where all answer for the step together.
            is_cold: Its pass compiled, or did other work that later ones need not do: it tells nothing.
        """
        if is_cold or self._cost.warms_up(nodes):
            return
        self._cost.observe(self._width(nodes), step_s, rows=self._rows, context=self._context)
        own_nodes, own_tokens = without if without is not None else (nodes, tokens)
        if self.branch.is_open:
            own = own_nodes, sum(own_tokens) / self._rows
            self.branch.learn(nodes=nodes, tokens=sum(tokens) / self._rows, without=own, costs=self._curve(nodes))
        if self._costs is None:
            self._switch.pass_by(self._rows)
            if not self.branch.is_open:
                self._rest = min(_LONGEST_REST, self._switch.steps_before_look(self._rows))
            return
        on_trial = without is not None and not self.branch.is_proven
        if on_trial:
            host_s -= self.branch.host_s
        if apart is not None:
            own_nodes, own_tokens, apart_s = apart
            host_s -= apart_s
        costs = self._curve(nodes)
        if on_trial or (apart is not None and own_nodes < nodes):
            nodes, step_s = own_nodes, float(costs[own_nodes])
        if on_trial or apart is not None:
            tokens, host_s = own_tokens, max(0.0, host_s)
        self._switch.learn(
            self._rows,
            nodes=nodes,
            tokens=self.batch.steps_saved(tokens),
            step_s=step_s,
            usual_s=float(costs[nodes]),
            host_s=host_s,
            plain_s=float(costs[1]),
        )

    def end(self, tokens: int, *, is_early: bool) -> None:
        """Count an output of so many tokens, which ended before its limit or did not."""
        self._switch.endings.count(tokens, is_early=is_early)

    def _curve(self, nodes: int) -> FloatArray:
        """What a step like the coming one costs, by the nodes of its largest tree."""
        curve = self._cost.curve(self._rows, self._width(nodes), self._context)
        return curve[[0] + [self._width(n) for n in range(1, nodes + 1)]] if self._is_padded else curve

    def _width(self, nodes: int) -> int:
        """Nodes of the pass over trees of at most so many."""
        return padded_nodes(nodes, self._most) if self._is_padded else nodes
