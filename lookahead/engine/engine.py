"""The decoding loop: propose, draft, score, verify, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from torch import Tensor

from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Pacing
from lookahead.drafting.proposal import Feedback, IntArray, Proposal, Proposer, Top, question_of
from lookahead.drafting.select import Draft, FloatArray, drafter_of, fit, merge
from lookahead.drafting.tree import TokenTree
from lookahead.engine.credit import Accounts
from lookahead.engine.outputs import ROOT, Carrying, StepOutput
from lookahead.engine.row import Pick, Row
from lookahead.errors import PromptError
from lookahead.models.cache import RowStates
from lookahead.models.target import OnPrefill, Target
from lookahead.models.tensor_parallel import Ensemble
from lookahead.ngram.prune import FREE, Limits
from lookahead.proposers.validated import CustomProposer
from lookahead.verification.exact import VerifyResult
from lookahead.verification.rejection import RejectionRounds, draw
from lookahead.verification.topk import Scores, read_scores

_NO_ARGMAX = np.zeros(0, np.int32)


class Engine:
    """Decodes rows together; they advance and finish independently, and others may join as they do.

    Args:
        target: The model behind its cache.
        proposers: Where drafts come from; none means plain decoding.
        pacing: Sizes drafts and turns drafting off where it loses; None drafts all that the options allow.
        config: The options.
        batch: The rows that `run` decodes, those of one call of `model.generate`, as many as the cache has.
        keep_cache: Whether to keep the KV of rows that end.
        is_chain: Whether the target verifies chains only.
        by_rejection: Whether what was drawn is accepted by rejection sampling; proposals then tell their draws.
        isolates: Whether an error that concerns one row ends that row alone, which its `StepOutput` then tells.
        by_typicality: Whether what the target finds likely enough is accepted, which is lossy.
        ensemble: The processes that take every pass together; only the one that leads has proposers and pacing.
        learning: Held while proposers and pacing work, which learn together with those of other engines, on any
            thread. Passes and verification run without it, so that threads that share a model decode side by side.

    Attributes:
        batch: As given.
        cache: Where the rows' KV stands.
        sources: What the sources of drafts are called, by their bits in `TokenTree.sources`.
        stats: One per row of the batch.
        kept: For every row that ended its KV per layer, where it is to be kept.
    """

    def __init__(
        self,
        target: Target,
        proposers: Sequence[Proposer],
        pacing: Pacing | None,
        config: LookaheadConfig,
        batch: Sequence[Row] = (),
        *,
        keep_cache: bool = False,
        is_chain: bool = False,
        by_rejection: bool = False,
        isolates: bool = False,
        by_typicality: bool = False,
        ensemble: Ensemble | None = None,
        learning: AbstractContextManager[object] | None = None,
    ) -> None:
        self._target = target
        self._learning = learning if learning is not None else nullcontext()
        self._proposers = proposers
        self._pacing = pacing
        self._config = config
        self._budget = config.node_budget
        self._by_rejection = by_rejection
        self._by_typicality = by_typicality
        self._ensemble = ensemble
        self._trials: list[RejectionRounds] = []
        self.sources = [name for proposer in proposers for name in proposer.sources]
        self._needs_argmax = self._always_needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self._needs_top = any(proposer.needs_top for proposer in proposers)
        self._readers = [each for each in proposers if isinstance(each, CustomProposer) and each.hidden_layers]
        self._observing_s = 0.0  # of the last step
        self._questions = [question_of(proposer) for proposer in proposers]
        self._accounts = None if pacing is None else Accounts(pacing, proposers)
        self._drafter = drafter_of(proposers)
        self._nothing = tuple(_NO_ARGMAX for _ in proposers)
        self._keep_cache = keep_cache
        self._is_chain = is_chain
        self._isolates = isolates
        self.kept: dict[int, list[RowStates]] = {}
        self._seats = list(range(target.cache.slots.rows))[::-1]  # that are free
        self._begun = -len(self._seats)  # rows that joined since an output was begun
        self._rows: list[Row] = []
        self.batch = batch
        self.stats = [row.stats for row in batch]
        self.cache = target.cache
        self.cache.vacate()

    def serving(self) -> AbstractContextManager[None]:
        """Keep the model in service for a whole block, for a loop over `run` that will not pause."""
        return self._target.serving()

    def report_prefill(self, on_prefill: OnPrefill | None) -> None:
        """Let it be called as prompts are read."""
        self._target.on_prefill = on_prefill

    def run(self) -> Iterator[list[StepOutput]]:
        """Decode every row of the batch to its end, yielding what each step emitted.

        Between steps the model is as it was, unless the loop runs inside `serving`.
        """
        with Carrying(), self._target.serving():
            step_outputs = self.admit(self.batch)
        yield step_outputs
        while self._rows:
            with Carrying(), self._target.serving():
                step_outputs = self.step()
            yield step_outputs

    def admit(self, rows: Sequence[Row]) -> list[StepOutput]:
        """Let rows join those that are running; the model must be in service, and the cache have room for them.

        Their prompts are read together in a pass of their own, and the logits of their ends already give every row its
        first token.
        """
        started = time.perf_counter()
        with self._learning:
            for row in rows:
                row.seat = self._seats.pop()
                for proposer in self._proposers:
                    proposer.start(row.seat, row.text)
            self._begun += len(rows)
            if self._begun > 0 and self._pacing is not None:
                self._pacing.begin_output()
                self._begun -= len(self._seats) + len(self._rows) + len(rows)
        first = self.cache.join(len(rows))
        self._rows += rows
        self._target.keeps_hidden = self._reads_hidden
        logits = self._target.prefill([row.text for row in rows], first)
        step_outputs = self._emit(self._bare(rows), logits, self._read(logits, self._needs_top), first)
        now = time.perf_counter()
        for row in rows:
            row.prefilled = now
            row.stats.prefill_s = row.stats.ttft_s = now - started
        return step_outputs

    def step(self, *, is_refilled: bool = False) -> list[StepOutput]:
        """Advance every running row by one target pass; the model must be in service.

        Args:
            is_refilled: Whether a row that ends makes room for another.
        """
        begin = time.perf_counter()
        with self._learning:
            outgrown = self._retire_outgrown()
            if not self._rows:
                return outgrown
            rows = list(self._rows)
            rests = self._pacing is not None and self._pacing.rests(len(rows))
            drafts = self._bare(rows) if rests else self._draft_all(is_refilled)
        if self._ensemble is not None:
            drafts = self._ensemble.agree(drafts)
        drafted = time.perf_counter()
        self._target.keeps_hidden = self._reads_hidden
        logits = self._target.score([draft.tree for draft in drafts])
        nodes = logits.shape[1]
        # A plain step pays for nothing but its token, and one that found nothing while drafting loses for no more.
        can_spare = self._pacing is None or self._pacing.can_spare
        asked = any(draft.placed is not self._nothing and (can_spare or len(draft.tree) > 1) for draft in drafts)
        scores = self._read(logits, self._needs_top and asked)
        if nodes > 1 and not _are_numbers(drafts, logits, scores):
            drafts = self._bare(rows)
            logits = self._score_without_drafts(drafts)
            scores = self._read(logits, with_top=False)
        step_outputs = self._emit(drafts, logits, scores)
        now = time.perf_counter()
        for row in rows:
            row.stats.decode_s = now - row.prefilled
        if self._accounts is not None and not rests:
            verified = [(draft.tree, step_output.path) for draft, step_output in zip(drafts, step_outputs, strict=True)]
            tokens = [len(step_output.tokens) for step_output in step_outputs]
            times = {"host_s": drafted - begin + self._observing_s, "step_s": now - begin}
            with self._learning:
                self._accounts.settle(verified, tokens, nodes=nodes, is_cold=self._target.is_cold, **times)
        return outgrown + step_outputs

    def _score_without_drafts(self, drafts: Sequence[Draft]) -> Tensor:
        """Score the newest tokens alone, where a drafted one overflowed, or was none the model can read.

        A masked key still takes part in 0 · value, so what is no number there is none anywhere in the row's tree.
        """
        for i in range(len(drafts)):
            self.cache.wipe(i, int(self.cache.slots.lengths[i]))
        return self._target.score([draft.tree for draft in drafts])

    @property
    def _reads_hidden(self) -> bool:
        """Whether a proposer wants the hidden states of the next pass."""
        return any(reader.reads_hidden for reader in self._readers)

    def _emit(self, drafts: Sequence[Draft], logits: Tensor, scores: Scores, first: int = 0) -> list[StepOutput]:
        """Verify a tree of every row from `first` on, then let all else follow from what was chosen."""
        rows = self._rows[first:]
        results = [self._verify(i, row, drafts[i], logits, scores.argmax) for i, row in enumerate(rows)]
        step_outputs = []
        for i, (row, draft, result) in enumerate(zip(rows, drafts, results, strict=True)):
            if isinstance(result, Exception):
                self.cache.wipe(first + i)
                step_outputs.append(StepOutput(row.index, _NO_ARGMAX, None, draft, error=result))
                continue
            self._target.commit(first + i, result.path)
            row.count(draft, result, self.sources)
            step_outputs.append(StepOutput(row.index, result.tokens, row.finish_reason, draft, result.path))
        begin = time.perf_counter()
        with self._learning:
            for i, (row, draft, result) in enumerate(zip(rows, drafts, results, strict=True)):
                if not isinstance(result, Exception):
                    self._observe(row, draft, self._outcome(i, draft, result, scores))
            self._target.prompt_hidden.clear()
            self._observing_s = time.perf_counter() - begin
            self._retire([first + i for i, step_output in enumerate(step_outputs) if step_output.finished])
        return step_outputs

    def _outcome(self, i: int, draft: Draft, result: VerifyResult, scores: Scores) -> Feedback:
        """What the proposers are told of row i of a pass."""
        nodes = len(draft.tree)
        heard = scores.argmax[i, :nodes] if self._needs_argmax else _NO_ARGMAX
        hidden = {layer: states[i, :nodes] for layer, states in self._target.hidden.items()}
        read = self._target.prompt_hidden[i] if self._target.prompt_hidden else {}
        return Feedback(result.tokens, result.path, heard, _top_of(draft.tree, scores, i), hidden, read)

    def _draft_all(self, is_refilled: bool) -> list[Draft]:
        """Every row's tree: plain decoding, or as large as makes a step worth while."""
        costs = None
        if self._pacing is not None:
            context = max(row.length for row in self._rows)
            left = [row.left for row in self._rows]
            costs = self._pacing.begin(left, context, self._config.node_budget + 1, is_refilled=is_refilled)
            self._budget = len(costs) - 2 if costs is not None else 0
            self._needs_argmax = self._always_needs_argmax or self._pacing.branch.size is not None
        if not self._proposers or (self._pacing is not None and costs is None):
            return self._bare(self._rows)
        if self._by_rejection:
            return self._draft_draws()
        if costs is None or self._pacing is None:
            return self._propose(FREE)
        drafts = self._propose(costs) if len(self._rows) == 1 else fit(self._propose(FREE), costs, self._pacing.batch)
        if any(len(draft.tree) > 1 for draft in drafts):
            in_step = not is_refilled and len(drafts) > 1 and len({row.tokens for row in self._rows}) == 1
            if not self._pacing.accepts(drafts, in_step_for=max(left) if in_step else 0):
                return [draft.bare() for draft in drafts]
        return drafts

    def _draft_draws(self) -> list[Draft]:
        """Every row's tree of all that was drawn: to leave a node out for what it is would change the distribution."""
        offers = [] if self._pacing is not None and self._pacing.pauses else self._ask()
        drafts = [self._draft(row, offer, FREE) for row, offer in zip(self._rows, offers, strict=False)]
        self._trials = [RejectionRounds(offer, draft.placed) for offer, draft in zip(offers, drafts, strict=True)]
        return drafts or self._bare(self._rows)

    def _propose(self, costs: FloatArray) -> list[Draft]:
        """Every row's tree, of what all proposers offer."""
        if self._drafter is None:
            offers = self._ask()
            return [self._draft(row, offer, costs) for row, offer in zip(self._rows, offers, strict=True)]
        for row in self._rows:
            self._tell(row)
        draft, room = self._drafter.draft, self._config.node_budget
        return [draft(row.seat, room, self._limits(row), costs) for row in self._rows]

    def _ask(self) -> list[list[Proposal | None]]:
        """For every row what every proposer offers."""
        for row in self._rows:
            self._tell(row)
        room = self._config.node_budget // (len(self._proposers) if self._by_rejection else 1)
        offers = [ask([row.seat for row in self._rows], room) for ask in self._questions]
        return [list(each) for each in zip(*offers, strict=True)]

    def _bare(self, rows: Sequence[Row]) -> list[Draft]:
        """The newest token of rows alone, nothing having been asked for."""
        self._trials = []
        return [Draft(TokenTree.root(row.newest), self._nothing) for row in rows]

    def _draft(self, row: Row, proposals: Sequence[Proposal | None], costs: FloatArray) -> Draft:
        """One row's tree, merged from what every proposer offers."""
        sources = [len(proposer.sources) for proposer in self._proposers]
        return merge(row.newest, proposals, self._limits(row), sources=sources, costs=costs)

    def _limits(self, row: Row) -> Limits:
        """What a row's tree may hold."""
        depth = min(row.left - 1, row.positions_left(self._target.positions))
        return Limits(self._budget, depth, self._config.min_probability, self._is_chain and not self._by_rejection)

    def _read(self, logits: Tensor, with_top: bool) -> Scores:
        """The likeliest tokens after every node, as far as anyone asks: the step's one read from the device."""
        wanted = self._needs_argmax or with_top or any(row.chooser.is_plain_greedy for row in self._rows)
        if not wanted and logits.device.type == "cpu":
            return Scores(_NO_ARGMAX)  # elsewhere reading is also what waits for the pass, so that its time is known
        return read_scores(logits, with_top=with_top)

    def _verify(self, i: int, row: Row, draft: Draft, logits: Tensor, argmax: IntArray) -> VerifyResult | Exception:
        """Walk the tree of row i of a pass; what goes wrong there, where that is its own affair."""
        pick: Pick | None = None
        if self._by_rejection:
            pick = self._trials[i].choose if self._trials else _draw
        try:
            heard = argmax[i] if len(argmax) else argmax
            return row.verify(draft, logits[i], heard, pick, is_typical=self._by_typicality)
        except Exception as error:
            if not self._isolates:
                raise
            return error

    def _observe(self, row: Row, draft: Draft, feedback: Feedback) -> None:
        """Let the proposers learn from what happened to their offers.

        After a plain step they are told only once they are asked again, unless they learn from more than tokens:
        many tokens at once cost little more than one.
        """
        is_plain = draft.placed is self._nothing and not feedback.hidden
        if is_plain and not self._needs_argmax and feedback.top is None:
            row.untold.append(feedback.tokens)
            return
        for proposer, placed in zip(self._proposers, draft.placed, strict=True):
            proposer.observe(row.seat, feedback, placed)

    def _tell(self, row: Row) -> None:
        """Let the proposers see what was emitted while they were not asked."""
        if row.untold:
            feedback = Feedback(np.concatenate(row.untold), ROOT, _NO_ARGMAX)
            row.untold.clear()
            for proposer in self._proposers:
                proposer.observe(row.seat, feedback, _NO_ARGMAX)

    def _retire_outgrown(self) -> list[StepOutput]:
        """Take out rows that the model has no more positions for, where one row's error ends that row alone."""
        if self._target.positions is None:
            return []
        errors: dict[int, PromptError] = {}
        for i, row in enumerate(self._rows):
            try:
                row.positions_left(self._target.positions)
            except PromptError as error:
                if not self._isolates:
                    raise
                errors[i] = error
        step_outputs = [StepOutput(self._rows[i].index, _NO_ARGMAX, None, error=errors[i]) for i in errors]
        self._retire(list(errors))
        return step_outputs

    def _retire(self, finished: Sequence[int]) -> None:
        """Take finished rows out, the last active row filling each gap, in the target as in the engine."""
        for i in reversed(finished):
            row = self._rows[i]
            self._tell(row)
            if self._pacing is not None:
                self._pacing.end(row.emitted, is_early=row.left > 0)
            for proposer in self._proposers:
                proposer.finish(row.seat)
            self._seats.append(row.seat)
            if self._keep_cache:
                self.kept[row.index] = self.cache.take(i)
            self._target.retire(i)
            last = self._rows.pop()
            if i < len(self._rows):
                self._rows[i] = last
        if self._rows:
            # Rows share their draws of random numbers only where they all belong to one batch.
            self._rows[0].chooser.forget_before(min(row.emitted for row in self._rows))


def _draw(node: int, chances: Tensor) -> int:
    """The token after a node where nothing was drafted."""
    return draw(chances)


def _are_numbers(drafts: Sequence[Draft], logits: Tensor, scores: Scores) -> bool:
    """Whether the logits at all nodes of some trees are numbers, as far as it can be told without a further read."""
    wrong = scores.argmax < 0 if len(scores.argmax) else logits[..., 0].isnan().numpy()
    return not (wrong.any() and any(wrong[i, : len(draft.tree)].any() for i, draft in enumerate(drafts)))


def _top_of(tree: TokenTree, scores: Scores, i: int) -> Top | None:
    """What the target thinks likely after every node of active row i's tree, where it was read."""
    if scores.top is None or scores.probabilities is None:
        return None
    return Top(tree, scores.top[i, : len(tree)], scores.probabilities[i, : len(tree)])
