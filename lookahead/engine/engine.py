"""The decoding loop: plan, draft, score, verify and commit, observe, record, retire."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from lookahead.backend.protocol import Backend, BitPolicy, OnPrefill
from lookahead.config import LookaheadConfig
from lookahead.drafting.controller import Controller, StepPlan, StepRecord
from lookahead.drafting.proposal import Call, Feedback, Proposal, Proposer, Top
from lookahead.drafting.select import Draft, fit, merge
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.engine.row import Row, StepOutput
from lookahead.kernels.topk import Scores, read_scores
from lookahead.model.model_state import plan_of, state_of
from lookahead.model.slots import RowCopy
from lookahead.model.stamp import stamp_of
from lookahead.model.tensor_parallel import tensor_parallel_group
from lookahead.ngram.prune import FREE, Limits
from lookahead.ngram.successors import TOP
from lookahead.proposers.forced import ForcedTokens
from lookahead.proposers.validated import ValidatedProposer
from lookahead.verification.acceptance import EXACT, Acceptance

if TYPE_CHECKING:
    from lookahead.backend.read_prompt import Prefix, ReadPrompt

_log = logging.getLogger(__name__)
NO_NODES = np.zeros(0, np.int32)


class Engine:
    """Decodes rows together; rows advance and finish independently, and others may join meanwhile.

    Args:
        backend: Scores the trees of the model.
        proposers: The sources of drafts; empty means plain decoding.
        controller: Decides whether and how much to draft; None drafts all that the options allow.
        config: The options.
        call: The call that the proposers were made for.
        batch: The rows that `run` decodes, all rows of one call of `model.generate` and of the cache.
        acceptance: Chooses the tokens of the rows.
        policy: The policy for the bits of the rows' logits.
        keep_cache: Whether `kept` holds the KV per layer of every finished row.
        isolates: Whether an error of one row ends only that row; its `StepOutput` then holds the error.
    """

    def __init__(
        self,
        backend: Backend,
        proposers: Sequence[Proposer],
        controller: Controller | None,
        config: LookaheadConfig,
        call: Call,
        batch: Sequence[Row] = (),
        *,
        acceptance: Acceptance = EXACT,
        policy: BitPolicy = BitPolicy.ROUNDED,
        keep_cache: bool = False,
        isolates: bool = False,
    ) -> None:
        self._backend, self._proposers, self._controller = backend, proposers, controller
        self._acceptance, self._policy = acceptance, policy
        self._on_prefill: OnPrefill | None = None
        self._config, self._call = config, call
        plan = plan_of(call.model)
        # Only the leading process has proposers and a controller.
        self._tp_group = tensor_parallel_group(call.model) if plan.processes > 1 else None
        self._runs_users_code = bool(plan.user_code) or any(
            isinstance(proposer, ValidatedProposer) for proposer in proposers
        )
        # Proposers and controller may share learned state with engines on other threads. Passes and verification run
        # without the lock, so threads that share a model decode in parallel.
        self._learning = state_of(call.model).learned.lock
        self._plan_without_controller = StepPlan(0, drafts=bool(proposers), max_nodes=call.max_nodes)
        self._questions: list[tuple[Callable[..., Sequence[Proposal | None]], bool]] = [
            (proposer.propose_batch, getattr(proposer, "reads_offers", False)) for proposer in proposers
        ]
        self._judge = first = 0  # the bits of proposers that are surer than others
        for proposer in proposers:
            self._judge |= getattr(proposer, "is_judge", False) * ((1 << len(proposer.sources)) - 1 << first)
            first += len(proposer.sources)
        self._max_proposed = call.max_nodes // (len(proposers) or 1) if call.by_rejection else call.max_nodes
        self._source_counts = [len(proposer.sources) for proposer in proposers]
        self.sources = [name for proposer in proposers for name in proposer.sources]  # in the order of their bits
        self._readers = [
            proposer for proposer in proposers if isinstance(proposer, ValidatedProposer) and proposer.hidden_layers
        ]
        self._needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self._needs_top = any(proposer.needs_top for proposer in proposers)
        self._has_forced = bool(proposers) and isinstance(proposers[-1], ForcedTokens)
        self._keep_cache, self._isolates = keep_cache, isolates
        self.kept: dict[int, RowCopy] = {}
        self._free_slots = list(range(backend.cache.slots.rows))[::-1]
        self._rows_since_output_start = -len(self._free_slots)  # rows that joined since an output began
        self._rows: list[Row] = []
        self.batch = batch
        self._is_watched = any(row.is_edited for row in batch)  # a user's code is called, which may change the model
        self.stats = [row.stats for row in batch]
        self.cache = backend.cache
        for proposer in proposers:
            if getattr(proposer, "shares_cache", False):
                proposer.share_cache(self.cache)
        self.cache.slots.active = 0  # rows join in `admit`; their KV stays
        is_solo = isolates or (policy is BitPolicy.SOLO and len(batch) > 1)
        self.reads_alone = is_solo and backend.reads_alone(policy)
        self.packs_prompts = backend.packs_prompts

    def serving(self, *, is_alone: bool = False) -> AbstractContextManager[None]:
        """Keep the model in service for a block, for a loop over `run` without pauses.

        `is_alone` says that the caller runs no code of a user's in the block.
        """
        is_alone = is_alone and not (self._runs_users_code or any(row.runs_users_code for row in self.batch))
        return self._backend.serving(is_alone=is_alone and not any(row.runs_users_code for row in self._rows))

    def report_prefill(self, on_prefill: OnPrefill | None) -> None:
        """Set the callback that reports the progress of a prefill."""
        self._on_prefill = on_prefill

    def run(self) -> Iterator[list[StepOutput]]:
        """Decode every row of the batch to its end, yielding the outputs of each step.

        Between steps the model is restored, unless the loop runs inside `serving`.
        """
        groups = [[row] for row in self.batch] if self.reads_alone else [self.batch]
        with self._backend.serving():
            outputs = [output for rows in groups for output in self.admit(rows)]
        yield outputs
        while self._rows:
            with self._backend.serving():
                outputs = self.step()
            yield outputs

    def admit(
        self, rows: Sequence[Row], read: ReadPrompt | None = None, prefixes: Sequence[Prefix] = ()
    ) -> list[StepOutput]:
        """Add rows to the running ones; the model must be in service and the cache have room.

        Their prompts are read together, after their `prefixes` if given; the prompt of a single row may be `read`
        already. The logits after the prompts give every row its first token.
        """
        started = time.perf_counter()
        if self._is_watched:
            self._backend.has_changed()
        with self._learning:
            for row in rows:
                row.slot = self._free_slots.pop()
                text = row.source  # the n-grams of a summary are in the encoder's input
                for proposer in self._proposers:
                    proposer.start(row.slot, row.text if getattr(proposer, "reads_inputs", False) else text)
                    if row.predictions:
                        proposer.expect(row.slot, row.predictions)
            self._rows_since_output_start += len(rows)
            if self._rows_since_output_start > 0 and self._controller is not None:
                self._controller.budget.begin_output()
                self._rows_since_output_start -= len(self._free_slots) + len(self._rows) + len(rows)
        first, slots = self.cache.slots.active, self.cache.slots
        slots.active += len(rows)
        self._rows += rows
        self._backend.keeps_hidden = any(reader.reads_hidden for reader in self._readers)
        joining = next((row.encoded for row in rows if row.encoded is not None), None)
        texts = [row.text for row in rows]
        for i, prefix in enumerate(prefixes, first):
            prefix.copy_to(self.cache, i)
            self._rows[i].stats.reused_tokens = prefix.tokens
        if read is None:
            # With a store of prefixes, that alone says what a prompt may copy of another.
            before = self._texts_before(rows, first) if self.packs_prompts and not prefixes else None
            as_whole, progress = any(prefix.keeps_bits for prefix in prefixes), self._on_prefill
            logits = self._backend.read(
                texts, first, encoded=joining, texts=before, as_whole=as_whole, on_prefill=progress
            )
            for row, reused in zip(rows, self._backend.reused_tokens, strict=True):
                row.stats.reused_tokens = max(row.stats.reused_tokens, reused)
        else:
            logits = read.copy_to(self.cache, first)
            rows[0].stats.reused_tokens = read.reused
        report, plan = self._backend.report(self._policy), plan_of(self._call.model)
        if self._call.is_chain not in plan.reported:
            plan.reported.add(self._call.is_chain)
            _log.info("%s", report)
        is_whole = self._backend.is_read_whole if read is None else read.is_whole
        changed = [prefix.tokens > 0 and not prefix.keeps_bits for prefix in prefixes] or [False] * len(rows)
        for row, is_changed in zip(rows, changed, strict=True):
            row.encoded, row.stats.backend, row.stats.dtype = None, report.summary, report.dtype
            row.policy = self._policy if is_whole and not is_changed else BitPolicy.ROUNDED
        drafts, scores = self._root_only(rows), read_scores(logits, TOP if self._needs_top else 0)
        results = self._verify(drafts, logits, scores, first)
        with self._learning:
            self._observe(rows, results, scores)
            outputs = self._retire(results, first)
        now = time.perf_counter()
        for row in rows:
            row.prefilled = now
            row.stats.prefill_s = row.stats.ttft_s = row.stats.prefill_s + now - started
        return outputs

    def _texts_before(self, rows: Sequence[Row], first: int) -> list[IntArray]:
        """The prompts of the running rows before new ones; empty for those that other weights have read."""
        number = stamp_of(self._call.model).number
        for row in rows:
            row.read = number, row.text
        return [text[: len(text) * (by == number)] for by, text in (row.read for row in self._rows[:first])]

    def step(self, *, is_refilled: bool = False, is_timed: bool = True) -> list[StepOutput]:
        """Advance all rows by one pass; the model must be in service.

        With `is_refilled` a waiting request replaces a row that ends. Without `is_timed` the time of the pass is
        ignored, for example because it has fewer threads.
        """
        begin = time.perf_counter()
        with self._learning:
            if not self._rows:
                return []
            positions, plan = self._backend.positions, self._plan_without_controller
            left = [row.stopping.max_length - row.length if row.drafts else 1 for row in self._rows]
            if positions is not None:  # the model can read no tokens beyond them
                left = [min(n, 1 + row.positions_left(positions)) for n, row in zip(left, self._rows, strict=True)]
            if self._controller is not None:
                context = max([row.length for row in self._rows])
                ragged_nodes = self._backend.ragged_nodes if self._backend.is_ragged else 0
                plan = self._controller.plan(left, context, is_refilled=is_refilled, ragged_nodes=ragged_nodes)
            is_changed = self._is_watched and self._backend.has_changed()
            drafts = self._root_only(self._rows) if is_changed else self._draft(left, plan)
        drafted = time.perf_counter()
        drafts, logits, scores, nodes = self._score(drafts, plan)
        results = self._verify(drafts, logits, scores)
        with self._learning:
            verified = time.perf_counter()
            self._observe(self._rows, results, scores)
            now = time.perf_counter()
            for row in self._rows:
                row.stats.decode_s = now - row.prefilled
            if self._controller is not None:
                walked = [(draft.tree, result.path) for draft, result in zip(drafts, results, strict=True)]
                tokens, host_s = [len(result.tokens) for result in results], drafted - begin + now - verified
                is_cold = self._backend.is_cold or not is_timed
                record = StepRecord(walked, tokens, nodes, host_s, now - begin, is_cold)
                self._controller.record(plan, record)
            return self._retire(results)

    def _draft(self, left: Sequence[int], plan: StepPlan) -> list[Draft]:
        """One tree per row within the plan; only the last token if drafting is off.

        `left` are the tokens that each row may still emit.
        """
        rows, by_rejection, backend = self._rows, self._call.by_rejection, self._backend
        if not plan.drafts:
            return self._root_only(rows)
        sizes = [plan.max_nodes] * len(rows)
        if backend.counts_nodes and backend.positions is not None:  # the model counts nodes, not depths
            sizes = [min(plan.max_nodes, *(row.positions_left(backend.positions) for row in rows))] * len(rows)
        is_chain, least = self._call.is_chain and not by_rejection, self._config.min_probability
        plan_costs = FREE if by_rejection else plan.costs
        costs = plan_costs if len(rows) == 1 else FREE  # the trees of a batch are sized together below
        slots, proposals = [row.slot for row in rows], list[Sequence[Proposal | None]]()
        for ask, reads_offers in self._questions:
            proposals.append(ask(slots, self._max_proposed, *([proposals] if reads_offers else [])))
        proposed: list[Sequence[Proposal | None]] = list(zip(*proposals, strict=True))
        if self._has_forced:
            most = self._max_proposed
            proposed = [row.constrain(offers, most, least) for row, offers in zip(rows, proposed, strict=True)]
        drafts = [
            merge(
                row.last_token, proposals, Limits(size, tokens - 1, least, is_chain, plan.node_bonus_tokens),
                sources=self._source_counts, costs=costs, judge=self._judge, ends=row.ends,
            )
            for row, proposals, size, tokens in zip(rows, proposed, sizes, left, strict=True)
        ]  # fmt: skip
        if self._controller is None or not len(plan_costs):
            return drafts
        if plan.value is not None:
            drafts = fit(drafts, plan_costs, plan.value, ragged_nodes=plan.ragged_nodes)
        if all(len(draft.tree.tokens) == 1 for draft in drafts) or self._controller.accepts(plan, drafts):
            return drafts
        return [draft.root_only() for draft in drafts]

    def _root_only(self, rows: Sequence[Row]) -> list[Draft]:
        """A tree of only the last token for every row, without calling proposers."""
        return [Draft(TokenTree.root(row.last_token), (NO_NODES,) * len(self._proposers)) for row in rows]

    def _score(self, drafts: list[Draft], plan: StepPlan) -> tuple[list[Draft], Tensor, Scores, float]:
        """Run one pass over all trees; returns the scored drafts, their logits and scores, and computed nodes per row.

        If a drafted token gives NaN, the newest tokens are scored alone: a masked key still contributes 0 · value, so
        one NaN spreads through the row's tree.
        """
        if self._tp_group is not None:
            drafts = self._tp_group.agree(drafts)
        backend, needs_top = self._backend, self._needs_top and plan.drafts
        greedy = [row.chooser.is_plain_greedy for row in self._rows]
        backend.keeps_hidden = any(reader.reads_hidden for reader in self._readers)
        backend.keeps_logits = not all(greedy)
        backend.reads_top = TOP if needs_top else 0
        logits = backend.score([draft.tree for draft in drafts], self._policy)
        needs_argmax = self._needs_argmax or plan.has_branch
        scores, nodes = Scores(NO_NODES), float(logits.shape[1])
        if backend.is_ragged:
            nodes = sum(len(draft.tree.tokens) for draft in drafts) / len(drafts)
        # On a GPU reading also waits for the pass, which makes its time measurable.
        if needs_argmax or needs_top or any(greedy) or logits.device.type != "cpu":
            scores = read_scores(logits, backend.reads_top, backend.ranks)
        if nodes > 1:
            wrong = scores.argmax < 0 if len(scores.argmax) else logits[..., 0].isnan().numpy()
            if wrong.any() and any(wrong[i, : len(draft.tree.tokens)].any() for i, draft in enumerate(drafts)):
                drafts = self._root_only(self._rows)
                for i in range(len(drafts)):
                    self.cache.wipe(i, int(self.cache.slots.lengths[i]))
                logits = backend.score([draft.tree for draft in drafts], self._policy)
                scores = read_scores(logits, backend.reads_top, backend.ranks)
        return drafts, logits, scores, nodes

    def _verify(self, drafts: Sequence[Draft], logits: Tensor, scores: Scores, first: int = 0) -> list[StepOutput]:
        """Walk the trees of all rows from `first` on, keep the KV of accepted nodes, and count them.

        With `isolates`, the error of a row becomes its result.
        """
        results: list[StepOutput] = []
        for i, draft in enumerate(drafts):
            row = self._rows[first + i]
            try:
                argmax = scores.argmax[i] if len(scores.argmax) else scores.argmax
                results.append(row.verify(draft, logits[i], argmax, self._acceptance))
            except Exception as error:
                if not self._isolates:
                    raise
                results.append(StepOutput(row.index, NO_NODES, None, draft, error=error))
        for i, (draft, result) in enumerate(zip(drafts, results, strict=True), first):
            if result.error is not None:
                self.cache.wipe(i)
            else:
                self.cache.commit(i, result.path)
                self._rows[i].count(draft, result, self.sources)
        return results

    def _observe(self, rows: Sequence[Row], results: Sequence[StepOutput], scores: Scores) -> None:
        """Let the proposers learn from a step of all rows of the pass."""
        hidden, prompts = self._backend.hidden, self._backend.prompt_hidden
        for at, (row, result) in enumerate(zip(rows, results, strict=True)):
            draft = result.draft
            if draft is None or result.error is not None:
                continue
            nodes, top = len(draft.tree.tokens), None
            if scores.top is not None and scores.probabilities is not None:
                top = Top(draft.tree, scores.top[at, :nodes], scores.probabilities[at, :nodes])
            argmax = scores.argmax[at, :nodes] if len(scores.argmax) else NO_NODES
            states = {layer: states[at, :nodes] for layer, states in hidden.items()} if hidden else {}
            feedback = Feedback(result.tokens, result.path, argmax, top, states, prompts[at] if prompts else {})
            for proposer, placed in zip(self._proposers, draft.placed, strict=True):
                proposer.observe(row.slot, feedback, placed)
        prompts.clear()

    def _retire(self, results: list[StepOutput], first: int = 0) -> list[StepOutput]:
        """Remove the finished rows from `first` on."""
        for i in reversed(range(len(results))):
            if results[i].finish_reason is not None or results[i].error is not None:
                self._remove(first + i)
        for row in self._rows if self._isolates else self._rows[:1]:
            if not row.chooser.is_plain_greedy:
                # Rows share random draws only if they all belong to one batch, whose last rows may yet be read.
                sharing = (
                    [row] if self._isolates else [*self._rows, *(other for other in self.batch if not other.emitted)]
                )
                row.chooser.forget_before(min(other.emitted for other in sharing))
        return results

    def end(self, index: int) -> None:
        """Remove the row with this index early, if it runs."""
        for i, row in enumerate(self._rows):
            if row.index == index:
                self._remove(i)
                return

    def _remove(self, i: int) -> None:
        """Remove a row; the last active row fills the gap, in the backend and in the engine."""
        row = self._rows[i]
        for proposer in self._proposers:
            proposer.finish(row.slot)
        self._free_slots.append(row.slot)
        if self._keep_cache:
            self.kept[row.index] = self.cache.extract_row(i)
        self._backend.retire(i)
        last = self._rows.pop()
        if i < len(self._rows):
            self._rows[i] = last
