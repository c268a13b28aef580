"""Asks the proposers, merges their proposals into one tree per row, and gives them feedback."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Controller, StepPlan
from lookahead.drafting.proposal import Feedback, Proposal, Proposer, Top, question_of
from lookahead.drafting.select import Draft, fit, merge
from lookahead.drafting.tree import TokenTree
from lookahead.engine.row import ROOT, Row
from lookahead.models.target import Target
from lookahead.ngram.prune import FREE, Limits
from lookahead.proposers.ngram import NgramProposer
from lookahead.proposers.validated import ValidatedProposer
from lookahead.verification.exact import Scores, VerifyResult
from lookahead.verification.rejection import RejectionRounds

NO_NODES = np.zeros(0, np.int32)


class TreeDrafter:
    """Asks the proposers of an engine, and merges their proposals into one tree per row."""

    def __init__(
        self,
        proposers: Sequence[Proposer],
        controller: Controller | None,
        config: LookaheadConfig,
        target: Target,
        *,
        is_chain: bool,
        by_rejection: bool,
    ) -> None:
        self._proposers, self._controller, self._target = proposers, controller, target
        self._max_proposed = config.node_budget // (len(proposers) or 1) if by_rejection else config.node_budget
        self._min_probability = config.min_probability
        self._by_rejection, self._is_chain = by_rejection, is_chain and not by_rejection
        self._questions = [question_of(proposer) for proposer in proposers]
        only = proposers[0] if len(proposers) == 1 else None
        self._single = only if isinstance(only, NgramProposer) and not by_rejection else None  # nothing to merge
        self.hidden_readers = [each for each in proposers if isinstance(each, ValidatedProposer) and each.hidden_layers]
        self._source_counts = [len(proposer.sources) for proposer in proposers]
        # By their bits in `TokenTree.sources`.
        self.sources = [name for proposer in proposers for name in proposer.sources]
        self.needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self.needs_top = any(proposer.needs_top for proposer in proposers)
        self.nothing = tuple(NO_NODES for _ in proposers)  # `Draft.placed` where no proposer was asked
        self.rounds: list[RejectionRounds] = []  # of every row; empty where nothing was drawn

    def draft(self, rows: Sequence[Row], plan: StepPlan) -> list[Draft]:
        """One tree per row, as large as the plan pays for; the last token alone where drafting is off."""
        if not plan.drafts:
            return self.bare(rows)
        limits, least = [], max(self._min_probability, plan.min_probability)
        for row in rows:
            if row.pending:
                self._observe_pending(row)
            depth, most = row.left - 1, plan.max_nodes
            if self._target.positions is not None:
                left = row.positions_left(self._target.positions)
                depth, most = min(depth, left), min(most, left) if self._target.counts_nodes else most
            limits.append(Limits(most, depth, least, self._is_chain, plan.worth))
        plan_costs = FREE if self._by_rejection else plan.costs
        costs = plan_costs if len(rows) == 1 else FREE  # the trees of a batch are sized together, below
        nodes = self._max_proposed
        if self._single is not None:
            drafts = [
                self._single.draft(row.slot, nodes, limit, costs) for row, limit in zip(rows, limits, strict=True)
            ]
        else:
            asked = [ask([row.slot for row in rows], nodes) for ask in self._questions]
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
        self.rounds = []
        return [Draft(TokenTree.root(row.last_token), self.nothing) for row in rows]

    def start(self, row: Row) -> None:
        """Show the proposers a new row; the n-grams of a summary are in what the encoder has read."""
        text = np.concatenate((row.inputs, row.text))
        for proposer in self._proposers:
            proposer.start(row.slot, row.text if getattr(proposer, "has_encoder", False) else text)

    def observe(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Draft],
        results: Sequence[VerifyResult],
        scores: Scores,
        target: Target,
        needs_argmax: bool,
    ) -> None:
        """Let the proposers learn from a step of all rows of the pass.

        The tokens of plain steps are collected until the proposers are asked again, unless one reads more than tokens.
        """
        hidden, prompts = target.hidden, target.prompt_hidden
        for at, (row, draft, result) in enumerate(zip(rows, drafts, results, strict=True)):
            if result.error is not None:
                continue
            if draft.placed is self.nothing and not (hidden or needs_argmax) and scores.top is None:
                row.pending.append(result.tokens)
                continue
            nodes, top = len(draft.tree.tokens), None
            if scores.top is not None and scores.probabilities is not None:
                top = Top(draft.tree, scores.top[at, :nodes], scores.probabilities[at, :nodes])
            argmax = scores.argmax[at, :nodes] if needs_argmax else NO_NODES
            states = {layer: each[at, :nodes] for layer, each in hidden.items()} if hidden else {}
            feedback = Feedback(result.tokens, result.path, argmax, top, states, prompts[at] if prompts else {})
            for proposer, placed in zip(self._proposers, draft.placed, strict=True):
                proposer.observe(row.slot, feedback, placed)
        prompts.clear()

    def _observe_pending(self, row: Row) -> None:
        """Let the proposers observe the tokens that were emitted while they were not asked."""
        feedback = Feedback(np.concatenate(row.pending), ROOT, NO_NODES)
        row.pending.clear()
        for proposer in self._proposers:
            proposer.observe(row.slot, feedback, NO_NODES)

    def finish(self, row: Row) -> None:
        """Let the proposers forget a row, once they have observed all of it."""
        if row.pending:
            self._observe_pending(row)
        for proposer in self._proposers:
            proposer.finish(row.slot)
