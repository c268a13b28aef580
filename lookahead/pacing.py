"""One engine's sense of time: what its steps cost, how large its drafts should be, and whether to draft at all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.cost import FloatArray, StepCost, padded_nodes
from lookahead.drafting import Draft
from lookahead.switch import LONG, Switch

_MARGIN = 1.03  # times the cost of a plain step per token: what a draft must promise to be worth the risk


class Pacing:
    """Sizes drafts by the measured cost of a step, and turns drafting off where it was measured to lose.

    Each step calls `begin`, where that gave costs `accepts`, and at its end `learn`. No clock is read here.

    Args:
        cost: What steps were measured to cost; learns from every step.
        switch: What drafting was measured to save; learns likewise.
        is_padded: Whether trees are padded to few sizes, so that the cost of a step is a staircase.
    """

    def __init__(self, cost: StepCost, switch: Switch, *, is_padded: bool = False) -> None:
        self._cost = cost
        self._is_padded = is_padded
        self._padded = np.zeros(0, np.int64)  # by the nodes of the largest tree those of the pass
        self._switch = switch
        self._rows = self._context = 0
        self._costs: FloatArray | None = None
        self._priced: FloatArray | None = None

    def begin(self, rows: int, context: int, nodes: int) -> FloatArray | None:
        """What drafts of the coming step are to be sized by; None where nothing is to be drafted.

        Args:
            rows: Rows that take it.
            context: Tokens of the longest one.
            nodes: Nodes of the largest tree allowed, its root counted.

        Returns:
            float64 `[nodes + 1]`, the seconds of a step by the nodes of its largest tree.
        """
        self._rows, self._context = rows, context
        self._costs = self._priced = None
        if len(self._padded) != nodes + 1:
            self._padded = np.arange(nodes + 1)
            if self._is_padded:
                self._padded[1:] = [padded_nodes(n, nodes) for n in range(1, nodes + 1)]
        if not self._cost.knows(rows, context) or not self._switch.looks(rows):
            return None
        curve = self._cost.curve(rows, nodes, context)
        self._costs = curve[self._padded] if self._is_padded else curve
        # Looking is paid for whatever comes of it; a draft has to be worth its risk besides.
        priced = self._costs.copy()
        priced[2:] *= _MARGIN
        self._priced = priced + self._switch.look(rows) * priced[1]
        return self._priced

    def accepts(self, drafts: Sequence[Draft], *, in_step: bool) -> bool:
        """Whether drafts of such promise are to be verified.

        Args:
            drafts: One per row.
            in_step: Several rows hold equally many tokens. A pass over such rows needs no mask; accepted drafts end
                that for the rest of the output, so they have to promise more. Padded passes have masks anyway.
        """
        assert self._costs is not None and self._priced is not None
        nodes = max(len(draft.tree) for draft in drafts)
        tokens = sum(float(draft.reach.sum()) for draft in drafts) / len(drafts)
        speedup = tokens * self._costs[1] / self._priced[nodes]
        return self._switch.drafts(self._rows, speedup) and (not in_step or self._is_padded or speedup >= LONG)

    @property
    def pauses(self) -> bool:
        """Whether drafts were found to lose, so that only a long match would be verified."""
        return not self._switch.drafts(self._rows, 1.0)

    def learn(self, nodes: int, tokens: int, host_s: float, step_s: float, *, is_cold: bool = False) -> None:
        """Count the step.

        Args:
            nodes: Nodes of its largest tree, its root counted.
            tokens: Tokens all rows emitted.
            host_s: What drafting took, and letting the proposers learn.
            step_s: What the rest of it took.
            is_cold: Its pass compiled, or did other work that later ones need not do: it tells nothing.
        """
        if is_cold or self._cost.warms_up(nodes):
            return
        nodes = int(self._padded[nodes]) if nodes < len(self._padded) else nodes
        if self._costs is None:
            self._switch.pass_by(self._rows)
        else:
            self._switch.learn(
                self._rows,
                nodes=nodes,
                tokens=tokens / self._rows,
                seconds=host_s + step_s,
                host_s=host_s,
                expected_s=float(self._costs[nodes]),
                plain_s=float(self._costs[1]),
            )
        self._cost.observe(nodes, step_s, rows=self._rows, context=self._context)
