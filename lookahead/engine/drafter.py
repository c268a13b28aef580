"""From what the proposers offer to one tree per row, and back: what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Controller, StepPlan
from lookahead.drafting.proposal import Feedback, Proposal, Proposer, Top, question_of
from lookahead.drafting.select import Draft, FloatArray, drafter_of, fit, merge
from lookahead.drafting.tree import TokenTree
from lookahead.engine.outputs import ROOT
from lookahead.engine.row import Row
from lookahead.ngram.prune import FREE, Limits
from lookahead.proposers.validated import ValidatedProposer
from lookahead.verification.exact import VerifyResult
from lookahead.verification.rejection import RejectionRounds
from lookahead.verification.topk import Scores

NO_NODES = np.zeros(0, np.int32)


class TreeDrafter:
    """Asks the proposers of an engine, and makes one tree per row of what they offer.

    Args:
        proposers: Where drafts come from.
        controller: Has the last word on a draft; None drafts all that the options allow.
        config: The options.
        positions: Positions the model has a table for; None where there is no end to them.
        is_chain: Whether the target verifies chains only.
        by_rejection: Whether drafts are accepted by rejection sampling.

    Attributes:
        sources: The names of the sources, by their bits in `TokenTree.sources`.
        needs_argmax, needs_top: Whether a proposer reads these of every step.
        nothing: What `Draft.placed` is where no proposer was asked.
        rounds: What was drawn for every row, to be tried; empty where nothing was drawn.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        controller: Controller | None,
        config: LookaheadConfig,
        positions: int | None,
        *,
        is_chain: bool,
        by_rejection: bool,
    ) -> None:
        self._proposers = proposers
        self._controller = controller
        self._config = config
        self._positions = positions
        self._is_chain = is_chain and not by_rejection
        self._by_rejection = by_rejection
        self._questions = [question_of(proposer) for proposer in proposers]
        self._single = None if by_rejection else drafter_of(proposers)
        self._readers = [each for each in proposers if isinstance(each, ValidatedProposer) and each.hidden_layers]
        self.sources = [name for proposer in proposers for name in proposer.sources]
        self.needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self.needs_top = any(proposer.needs_top for proposer in proposers)
        self.nothing = tuple(NO_NODES for _ in proposers)
        self.rounds: list[RejectionRounds] = []

    @property
    def reads_hidden(self) -> bool:
        """Whether a proposer reads the hidden states of the next pass."""
        return any(reader.reads_hidden for reader in self._readers)

    def draft(self, rows: Sequence[Row], plan: StepPlan) -> list[Draft]:
        """One tree per row, as large as the plan pays for; the newest tokens alone where that is not worth it."""
        if not plan.drafts:
            return self.bare(rows)
        for row in rows:
            self._tell(row)
        costs = FREE if self._by_rejection else plan.costs
        if len(rows) == 1 or not len(costs):
            drafts = self._propose(rows, plan.max_nodes, costs)
        else:
            drafts = fit(self._propose(rows, plan.max_nodes, FREE), costs, plan.value)
        if self._controller is None or not len(costs) or all(len(draft.tree) == 1 for draft in drafts):
            return drafts
        return drafts if self._controller.accepts(plan, drafts) else [draft.bare() for draft in drafts]

    def bare(self, rows: Sequence[Row]) -> list[Draft]:
        """The newest token of every row alone, nobody having been asked."""
        self.rounds = []
        return [Draft(TokenTree.root(row.last_token), self.nothing) for row in rows]

    def _propose(self, rows: Sequence[Row], max_nodes: int, costs: FloatArray) -> list[Draft]:
        """One tree per row, of what all proposers offer."""
        limits = [self._limits(row, max_nodes) for row in rows]
        room = self._config.node_budget
        if self._single is not None:
            return [self._single.draft(row.slot, room, limit, costs) for row, limit in zip(rows, limits, strict=True)]
        room = room // len(self._proposers) if self._by_rejection else room
        slots = [row.slot for row in rows]
        offers: list[tuple[Proposal | None, ...]] = list(
            zip(*[ask(slots, room) for ask in self._questions], strict=True)
        )
        counts = [len(proposer.sources) for proposer in self._proposers]
        drafts = [
            merge(row.last_token, offer, limit, sources=counts, costs=costs)
            for row, offer, limit in zip(rows, offers, limits, strict=True)
        ]
        if self._by_rejection:
            self.rounds = [RejectionRounds(offer, draft.placed) for offer, draft in zip(offers, drafts, strict=True)]
        return drafts

    def _limits(self, row: Row, max_nodes: int) -> Limits:
        """What a row's tree may hold."""
        depth = row.left - 1
        if self._positions is not None:
            depth = min(depth, row.positions_left(self._positions))
        return Limits(max_nodes, depth, self._config.min_probability, self._is_chain)

    def start(self, row: Row) -> None:
        """Show the proposers a new row."""
        for proposer in self._proposers:
            proposer.start(row.slot, row.text)

    def observe(
        self,
        row: Row,
        draft: Draft,
        result: VerifyResult,
        scores: Scores,
        at: int,
        hidden: Mapping[int, Tensor],
        prompt_hidden: Mapping[int, Tensor],
        *,
        needs_argmax: bool,
    ) -> None:
        """Let the proposers learn from what happened to their offers.

        After a plain step they are told only once they are asked again, unless they learn from more than tokens: many
        tokens at once cost little more than one.

        Args:
            row: The row.
            draft: What was verified.
            result: What the target chose.
            scores: What was read of the pass.
            at: The row's place in the pass.
            hidden: The hidden states of the pass, `[rows, nodes, size]` by layer.
            prompt_hidden: Those of the row's prompt, after its prefill.
            needs_argmax: Whether a proposer reads the argmax of this step.
        """
        if draft.placed is self.nothing and not (hidden or needs_argmax) and scores.top is None:
            row.pending.append(result.tokens)
            return
        nodes, top = len(draft.tree), None
        if scores.top is not None and scores.probabilities is not None:
            top = Top(draft.tree, scores.top[at, :nodes], scores.probabilities[at, :nodes])
        argmax = scores.argmax[at, :nodes] if needs_argmax else NO_NODES
        states = {layer: each[at, :nodes] for layer, each in hidden.items()} if hidden else {}
        feedback = Feedback(result.tokens, result.path, argmax, top, states, prompt_hidden)
        for proposer, placed in zip(self._proposers, draft.placed, strict=True):
            proposer.observe(row.slot, feedback, placed)

    def _tell(self, row: Row) -> None:
        """Let the proposers see what was emitted while they were not asked."""
        if row.pending:
            feedback = Feedback(np.concatenate(row.pending), ROOT, NO_NODES)
            row.pending.clear()
            for proposer in self._proposers:
                proposer.observe(row.slot, feedback, NO_NODES)

    def finish(self, row: Row) -> None:
        """Let the proposers forget a row, once they know all of it."""
        self._tell(row)
        for proposer in self._proposers:
            proposer.finish(row.slot)
