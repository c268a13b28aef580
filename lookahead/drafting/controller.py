"""The controller decides before every step whether and how much to draft, by measured costs and savings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

from lookahead.drafting.branch import TEACHING_GAIN, LookaheadBranch
from lookahead.drafting.budget import DraftingBudget
from lookahead.drafting.cost_model import FloatArray, StepCost, padded_nodes
from lookahead.drafting.proposal import IntArray, Proposer
from lookahead.drafting.select import BatchValue, Draft
from lookahead.drafting.tree import TokenTree, count_within, without_sources
from lookahead.ngram.prune import FREE
from lookahead.utils.jit import njit

_MARGIN = 1.08  # factor on the cost of drafted nodes: the expected gain of a draft must cover its risk
_LONGEST = 4.0  # plain steps that one with drafts of several rows may take: requests that come wait for its end
_P_RUNS_TO_LIMIT = 0.5  # assumed probability that rows run to their limits although a token may end them


class StepPlan(NamedTuple):
    """The decision before a step; without a controller, the maximum that the options allow.

    Example:
        >>> plan = StepPlan(rows=1, context=300, drafts=True, max_nodes=16)
        >>> plan.drafts, plan.max_nodes, plan.has_branch
        (True, 16, False)
    """

    rows: int
    context: int = 0  # tokens of the longest row
    drafts: bool = False  # whether the proposers are called
    max_nodes: int = 0  # of a draft, without the root
    costs: FloatArray = FREE  # seconds of a step by nodes per row, [max_nodes + 2] or shorter; empty: free
    plain_s: float = 1.0
    value: BatchValue | None = None  # of tokens; None for a single row, whose steps are saved one a token
    has_branch: bool = False  # whether the lookahead branch is on
    node_bonus_tokens: float = 0.0  # additional worth of a verified node in tokens, since a source learns from it
    ragged_nodes: int = 0  # of all trees, if the pass computes no padding; nodes per row are then a mean


class StepRecord(NamedTuple):
    """The result of a step.

    Example:
        >>> import numpy as np
        >>> tree, path = TokenTree.from_parents([5, 6, 7], [0, 0, 0]), np.array([0, 1])  # 6 is accepted, then 8 emitted
        >>> StepRecord([(tree, path)], tokens=[2], nodes=3, host_s=0.001, step_s=0.012).is_cold
        False
    """

    verified: Sequence[tuple[TokenTree, IntArray]]  # for every row the tree and the accepted nodes, the root first
    tokens: Sequence[int]  # emitted by each row
    nodes: float  # computed per row, the root included
    host_s: float  # of drafting and the proposers' learning
    step_s: float  # of the whole step
    is_cold: bool = False  # whether its pass did one-time work such as compiling; its time is ignored


@dataclass(eq=False)
class Controller:
    """Decides before every step of an engine whether and how much to draft, and learns from every step.

    The time of a proposer that has not earned it is charged only to that proposer's budget: the drafting budget is
    charged the step without it. So a proposer that costs too much is turned off alone, and one that earns its time
    counts even if the others earn nothing. The same holds for a lookahead branch on trial.

    It reads no clock. The cost model, the budget and the branch learn from every step.

    Example:
        >>> import numpy as np
        >>> controller = Controller(StepCost(), DraftingBudget(), node_budget=8)
        >>> plan = controller.plan([100], context=20)  # one row; the first step is plain
        >>> plain = TokenTree.root(5), np.zeros(1, np.int32)
        >>> controller.record(plan, StepRecord([plain], tokens=[1], nodes=1, host_s=0.0, step_s=0.01))
        >>> later = controller.plan([99], context=21)
        >>> plan.drafts, later.drafts, later.max_nodes
        (False, True, 8)
        >>> likely = Draft(TokenTree.from_parents([6, 7], [0, 0]), (), path_probs=np.array([1.0, 0.9]))
        >>> controller.accepts(later, [likely])
        True
    """

    cost: StepCost
    budget: DraftingBudget
    branch: LookaheadBranch | None = None  # None if costs do not decide whether it runs
    proposers: Sequence[Proposer] = ()  # in the order of their sources' bits
    _: KW_ONLY
    node_budget: int  # of a draft without the lookahead branch and the root
    is_padded: bool = False  # trees are padded to a few sizes
    runs_to_limit: bool = False  # nothing ends a row before its limit
    teaches: bool = False  # a source learns from the logits at all nodes
    by_rejection: bool = False  # all drawn nodes must be verified, so that a draft cannot be sized

    def __post_init__(self) -> None:
        first = 0
        self._budgeted: dict[int, Any] = {}  # proposers with their own budget, by their bits
        for proposer in self.proposers:
            bits = (1 << len(proposer.sources)) - 1 << first
            first += len(proposer.sources)
            if hasattr(proposer, "settle"):
                self._budgeted[bits] = proposer
            elif self.branch is not None and proposer.sources == ("jacobi",):
                self.branch.bits = bits
        self._curve = self._padded_curve if self.is_padded else self.cost.curve
        self.budget.begin_output()

    def plan(self, left: Sequence[int], context: int, *, is_refilled: bool = False, ragged_nodes: int = 0) -> StepPlan:
        """Decide the drafts of the coming step.

        `left` are the tokens that each row may still emit, `context` the tokens of the longest row. With `is_refilled`
        a waiting request replaces a row that ends; passes of at most `ragged_nodes` nodes in all compute no padding.
        """
        rows, branch = len(left), self.branch
        plain = StepPlan(rows, context)
        if branch is not None:
            branch.rest(rows)
        prices = self.budget.prices(rows)
        if prices is None or not self.cost.knows(rows, context):
            return plain
        if self.by_rejection and not self.budget.verifies(rows, 1.0):
            return plain
        nodes = self.node_budget
        if branch is not None:
            branch.choose(partial(self._curve, rows, context=context), self.cost.measured(rows, context))
            nodes = branch.nodes_beside(nodes)
        if nodes == 0:
            return plain  # the branch is the only source, and it is off
        curve, (proposing, most_at_risk) = self._curve(rows, nodes + 1, context), prices
        value = None
        if rows > 1:
            # If rows are refilled, no row waits for the last one.
            p_runs_to_limit = 0.0 if is_refilled else 1.0 if self.runs_to_limit else _P_RUNS_TO_LIMIT
            value = BatchValue.of(left, self.cost.plain(rows, context), p_runs_to_limit)
            most_at_risk = min(most_at_risk, _LONGEST - 1.0)
        plain_s, has_branch = float(curve[1]), branch is not None and branch.is_on
        affordable = _add_costs_of_drafts(curve, proposing, most_at_risk)
        nodes = nodes if has_branch else affordable
        if ragged_nodes:  # a row may use nodes that others do not need
            ragged_nodes = max(rows, min(ragged_nodes, rows * (nodes + 1)))
            nodes = max(nodes, min(nodes * rows, self.node_budget))
        bonus = TEACHING_GAIN if self.teaches else 0.0
        return StepPlan(rows, context, True, nodes, curve, plain_s, value, has_branch, bonus, ragged_nodes)

    def accepts(self, plan: StepPlan, drafts: Sequence[Draft]) -> bool:
        """Whether drafts, one per row, are verified."""
        if plan.has_branch:
            return True
        expected = [sum(draft.path_probs.tolist()) for draft in drafts]
        tokens = expected[0] if plan.value is None else plan.value.steps_saved(expected)
        sizes = [len(draft.tree.tokens) for draft in drafts]
        took = _at(plan.costs, sum(sizes) / len(sizes) if plan.ragged_nodes else max(sizes)) / plan.plain_s
        return self.budget.verifies(plan.rows, tokens / took, took - 1.0)

    def record(self, plan: StepPlan, step: StepRecord) -> None:
        """Learn from a step."""
        rows, nodes, tokens, host_s = plan.rows, step.nodes, step.tokens, step.host_s
        apart, apart_s = self._charge(step) if self._budgeted else (0, 0.0)
        if step.is_cold:
            return
        if nodes > 1 and not self.cost.is_warm:
            self.cost.is_warm = True
            return
        if not plan.drafts:
            is_probe = self.budget.record_plain(rows)
            # While the budget is empty most steps are not measured, since high costs would decay too soon.
            if not (is_probe or self.branch is not None) and self.cost.knows(rows, plan.context):
                return
        step_s = step.step_s - host_s
        computed = self._padded(nodes) if self.is_padded else nodes
        plain_s, usual_s = self.cost.observe(computed, step_s, rows=rows, context=plan.context)
        if self.branch is not None:
            curve = self._curve(rows, math.ceil(nodes), plan.context)
            bits, branch_s = self.branch.record(step.verified, tokens, math.ceil(nodes), curve)
            apart, apart_s = apart | bits, apart_s + branch_s
        if not plan.drafts:
            return
        # Drafts that gave NaN were scored again without their nodes, which loses all of them.
        is_again = nodes > 1 and all(len(tree.tokens) == 1 for tree, _ in step.verified)
        if apart and not is_again:
            curve = self._curve(rows, math.ceil(nodes), plan.context)
            own_nodes, tokens = without_sources(step.verified, tokens, apart)
            step_s = _at(curve, own_nodes) if own_nodes < nodes else step_s
            nodes, host_s = min(own_nodes, nodes), max(0.0, host_s - apart_s)
            usual_s = _at(curve, nodes)
        self.budget.record(
            rows,
            drafted=nodes > 1,
            tokens=tokens[0] if plan.value is None else plan.value.steps_saved(tokens),
            forward=step_s / plain_s,
            usual=usual_s / plain_s,
            proposing=host_s / plain_s,
        )

    def _charge(self, step: StepRecord) -> tuple[int, float]:
        """Settle with every proposer that has a budget; returns the bits and seconds charged only to these budgets."""
        apart, apart_s, rows = 0, 0.0, len(step.tokens)
        for bits, proposer in self._budgeted.items():
            alone = sum(count_within(tree, path, bits) for tree, path in step.verified) / rows
            took = proposer.settle(alone=alone, tokens=sum(step.tokens) / rows, step_s=step.step_s)
            if took is not None:
                apart, apart_s = apart | bits, apart_s + took
        return apart, apart_s

    def _padded_curve(self, rows: int, nodes: int, context: int) -> FloatArray:
        """Seconds of a step by the nodes of its largest tree, 0 up to `nodes`, if trees are padded."""
        widths = [0, *(self._padded(n) for n in range(1, nodes + 1))]
        return self.cost.curve(rows, widths[-1], context)[widths]

    def _padded(self, nodes: float) -> int:
        """Nodes of a pass over trees that have `nodes` nodes at most."""
        return padded_nodes(math.ceil(nodes), self.node_budget + 1)


@njit()
def _add_costs_of_drafts(curve, proposing, most_at_risk):
    """Add what drafts cost to the seconds of steps; returns the nodes of the largest draft that the budget covers."""
    plain, nodes = curve[1], 0
    while nodes + 1 < len(curve) and curve[nodes + 1] <= plain * (1.0 + most_at_risk):
        nodes += 1
    for at in range(len(curve)):
        # Proposing costs in any case; the margin applies only to drafted nodes.
        curve[at] = curve[at] * (_MARGIN if at > 1 else 1.0) + proposing * plain
    return max(1, nodes - 1)


def _at(curve: FloatArray, nodes: float) -> float:
    """The cost of a step, interpolated in a curve."""
    low = int(nodes)
    if low + 1 >= len(curve):
        return float(curve[-1])
    return float(curve[low] + (nodes - low) * (curve[low + 1] - curve[low]))
