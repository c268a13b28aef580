"""Asks the proposers, merges their proposals into one tree per row, and gives them feedback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Controller, StepPlan
from lookahead.drafting.proposal import Call, Feedback, Proposal, Proposer, Top, question_of
from lookahead.drafting.select import Draft, fit, merge
from lookahead.drafting.tree import TokenTree
from lookahead.engine.row import Row, StepOutput
from lookahead.models.target import Target
from lookahead.ngram.prune import FREE, Limits
from lookahead.proposers.validated import ValidatedProposer
from lookahead.verification.exact import Scores
from lookahead.verification.rejection import RejectionRounds

NO_NODES = np.zeros(0, np.int32)


class TreeDrafter:
    """Asks the proposers of an engine, and merges their proposals into one tree per row."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        controller: Controller | None,
        config: LookaheadConfig,
        call: Call,
        *,
        node_positions: int | None,
    ) -> None:
        by_rejection = call.by_rejection
        self._proposers, self._controller, self._node_positions = proposers, controller, node_positions
        self._max_proposed = config.node_budget // (len(proposers) or 1) if by_rejection else config.node_budget
        self._min_probability = config.min_probability
        self._by_rejection, self._is_chain = by_rejection, call.is_chain and not by_rejection
        self._questions = [question_of(proposer) for proposer in proposers]
        self.hidden_readers = [each for each in proposers if isinstance(each, ValidatedProposer) and each.hidden_layers]
        self._source_counts = [len(proposer.sources) for proposer in proposers]
        # By their bits in `TokenTree.sources`.
        self.sources = [name for proposer in proposers for name in proposer.sources]
        self.needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self.needs_top = any(proposer.needs_top for proposer in proposers)
        self.rounds: list[RejectionRounds] = []  # of every row, for acceptance by rejection

    def draft(self, rows: Sequence[Row], left: Sequence[int], plan: StepPlan) -> list[Draft]:
        """One tree per row, as large as the plan pays for; the last token alone where drafting is off.

        `left` are the tokens that each row may still emit.
        """
        if not plan.drafts:
            return self.bare(rows)
        sizes = [plan.max_nodes] * len(rows)
        if self._node_positions is not None:  # of a model that counts nodes, not depths
            sizes = [min(plan.max_nodes, row.positions_left(self._node_positions)) for row in rows]
        limits = [
            Limits(most, tokens - 1, self._min_probability, self._is_chain, plan.worth)
            for most, tokens in zip(sizes, left, strict=True)
        ]
        plan_costs = FREE if self._by_rejection else plan.costs
        costs = plan_costs if len(rows) == 1 else FREE  # the trees of a batch are sized together, below
        asked = [ask([row.slot for row in rows], self._max_proposed) for ask in self._questions]
        proposed: list[tuple[Proposal | None, ...]] = list(zip(*asked, strict=True))
        drafts = [
            merge(row.last_token, proposals, limit, sources=self._source_counts, costs=costs)
            for row, proposals, limit in zip(rows, proposed, limits, strict=True)
        ]
        if self._by_rejection:
            pairs = zip(proposed, drafts, strict=True)
            self.rounds = [RejectionRounds(proposals, draft.placed) for proposals, draft in pairs]
        if self._controller is None or not len(plan_costs):
            return drafts
        if len(rows) > 1:
            drafts = fit(drafts, plan_costs, plan.value)
        if all(len(draft.tree.tokens) == 1 for draft in drafts) or self._controller.accepts(plan, drafts):
            return drafts
        return [draft.bare() for draft in drafts]

    def bare(self, rows: Sequence[Row]) -> list[Draft]:
        """The last token of every row alone; no proposer is asked."""
        self.rounds = [RejectionRounds((), ()) for _ in rows] if self._by_rejection else []
        return [Draft(TokenTree.root(row.last_token), (NO_NODES,) * len(self._proposers)) for row in rows]

    def start(self, row: Row) -> None:
        """Show the proposers a new row; the n-grams of a summary are in what the encoder has read."""
        text = np.concatenate((row.inputs, row.text))
        for proposer in self._proposers:
            proposer.start(row.slot, row.text if getattr(proposer, "has_encoder", False) else text)

    def observe(self, rows: Sequence[Row], results: Sequence[StepOutput], scores: Scores, target: Target) -> None:
        """Let the proposers learn from a step of all rows of the pass."""
        hidden, prompts = target.hidden, target.prompt_hidden
        for at, (row, result) in enumerate(zip(rows, results, strict=True)):
            draft = result.draft
            if draft is None or result.error is not None:
                continue
            nodes, top = len(draft.tree.tokens), None
            if scores.top is not None and scores.probabilities is not None:
                top = Top(draft.tree, scores.top[at, :nodes], scores.probabilities[at, :nodes])
            argmax = scores.argmax[at, :nodes] if len(scores.argmax) else NO_NODES
            states = {layer: each[at, :nodes] for layer, each in hidden.items()} if hidden else {}
            feedback = Feedback(result.tokens, result.path, argmax, top, states, prompts[at] if prompts else {})
            for proposer, placed in zip(self._proposers, draft.placed, strict=True):
                proposer.observe(row.slot, feedback, placed)
        prompts.clear()

    def finish(self, row: Row) -> None:
        """Let the proposers forget a row."""
        for proposer in self._proposers:
            proposer.finish(row.slot)
