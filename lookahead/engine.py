"""The decoding loop: propose, draft, score, verify, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.accounts import Accounts
from lookahead.cache import RowStates
from lookahead.config import LookaheadConfig
from lookahead.drafting import Draft, FloatArray, drafter_of, fit, merge
from lookahead.emission import ROOT, Emission
from lookahead.errors import PromptError
from lookahead.ngram.cut import FREE, Limits
from lookahead.pacing import Pacing
from lookahead.proposers.base import IntArray, Outcome, Proposal, Proposer, Top, question_of
from lookahead.rejection import Trials, draw
from lookahead.sampling import TokenChooser, not_a_number
from lookahead.scores import Scores, read_scores
from lookahead.stats import DecodingStats
from lookahead.stopping import StoppingRule
from lookahead.target import Target
from lookahead.tree import TokenTree, sum_by_source
from lookahead.typical import Walk, longest_typical
from lookahead.verify import Verdict, verify, verify_greedy

_NO_ARGMAX = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Row:
    """A row that is being decoded; `ids[:length]` is what `model.generate` would hold, padding included."""

    index: int
    ids: NDArray[np.int64]
    length: int
    emitted: int = 0
    untold: list[IntArray] = field(default_factory=list)  # emitted since the proposers were asked last
    stats: DecodingStats = field(default_factory=DecodingStats)


class Engine:
    """Decodes a batch of prompts together; rows advance and finish independently.

    Args:
        target: The model behind its cache, with room for as many rows as there are prompts.
        proposers: Where drafts come from; none means plain decoding.
        pacing: Sizes drafts and turns drafting off where it loses; None drafts all that the options allow.
        config: The options.
        chooser: How a token is chosen.
        stopping: When a row ends.
        prompts: int64 `[batch, tokens]`, left-padded as `model.generate` takes them.
        lengths: int64 `[batch]`, tokens of each prompt without its padding, at least 1.
        keep_cache: Whether to keep the KV of rows that end.
        is_chain: Whether the target verifies chains only.
        by_rejection: Whether what was drawn is accepted by rejection sampling; proposals then tell their draws.
        by_typicality: Whether what the target finds likely enough is accepted, which is lossy.

    Attributes:
        chooser: As given.
        sources: What the sources of drafts are called, by their bits in `TokenTree.sources`.
        stats: One per row of the batch.
        padding: int64 `[batch]`, padding tokens before each prompt.
        kept: For every row that ended its KV per layer, where it is to be kept.
    """

    def __init__(
        self,
        target: Target,
        proposers: Sequence[Proposer],
        pacing: Pacing | None,
        config: LookaheadConfig,
        chooser: TokenChooser,
        stopping: StoppingRule,
        prompts: Tensor,
        lengths: NDArray[np.int64],
        *,
        keep_cache: bool = False,
        is_chain: bool = False,
        by_rejection: bool = False,
        by_typicality: bool = False,
    ) -> None:
        self._target = target
        self._proposers = proposers
        self._pacing = pacing
        self._config = config
        self.chooser = chooser
        self._stopping = stopping
        self._device = prompts.device
        self._budget = config.node_budget
        self._by_rejection = by_rejection
        self._by_typicality = by_typicality
        self._trials: list[Trials] = []
        self.sources = [name for proposer in proposers for name in proposer.sources]
        self._needs_argmax = self._always_needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self._needs_top = any(proposer.needs_top for proposer in proposers)
        self._needs_hidden = any(proposer.hidden_layers for proposer in proposers)
        self._observing_s = 0.0  # of the last step
        self._questions = [question_of(proposer) for proposer in proposers]
        self._accounts = None if pacing is None else Accounts(pacing, proposers)
        self._drafter = drafter_of(proposers)
        self._nothing = tuple(_NO_ARGMAX for _ in proposers)
        padded = prompts.cpu().numpy()
        self._keep_cache = keep_cache
        self._is_chain = is_chain
        self._is_simple = chooser.is_plain_greedy and stopping.custom is None
        self.padding = padded.shape[1] - lengths
        self.kept: dict[int, list[RowStates]] = {}
        self._prompts = [
            np.ascontiguousarray(ids[len(ids) - n :], np.int32) for ids, n in zip(padded, lengths, strict=True)
        ]
        self._rows: list[_Row] = []
        for index, ids in enumerate(padded):
            room = np.empty(max(stopping.max_length, len(ids) + 1), np.int64)
            room[: len(ids)] = ids
            self._rows.append(_Row(index, room, len(ids), stats=DecodingStats(prompt_tokens=int(lengths[index]))))
        self.stats = [row.stats for row in self._rows]

    def serving(self) -> AbstractContextManager[None]:
        """Keep the model in service for a whole block, for a loop over `run` that will not pause."""
        return self._target.serving()

    def run(self) -> Iterator[list[Emission]]:
        """Decode every row to its end, yielding what each step emitted.

        Between steps the model is as it was, unless the loop runs inside `serving`.
        """
        started = time.perf_counter()
        for row, prompt in zip(self._rows, self._prompts, strict=True):
            for proposer in self._proposers:
                proposer.start(row.index, prompt)
        with self._target.serving():
            emissions = self._prefill()
        prefilled = time.perf_counter()
        for stats in self.stats:
            stats.prefill_s = stats.ttft_s = prefilled - started
        yield emissions
        while self._rows:
            with self._target.serving():
                emissions = self.step()
            now = time.perf_counter()
            for emission in emissions:
                self.stats[emission.row].decode_s = now - prefilled
            yield emissions

    def _prefill(self) -> list[Emission]:
        """Read the prompts; the logits of their ends already give every row its first token."""
        logits = self._target.prefill(self._prompts)
        return self._emit(self._bare_all(), logits, self._read(logits, with_top=self._needs_top))

    def step(self) -> list[Emission]:
        """Advance every running row by one target pass; the model must be in service."""
        begin = time.perf_counter()
        rests = self._pacing is not None and self._pacing.rests(len(self._rows))
        drafts = self._bare_all() if rests else self._draft_all()
        drafted = time.perf_counter()
        logits = self._target.score([draft.tree for draft in drafts])
        # A plain step pays for nothing but its token, and one that found nothing while drafting loses for no more.
        can_spare = self._pacing is None or self._pacing.can_spare
        asked = any(draft.placed is not self._nothing and (can_spare or len(draft.tree) > 1) for draft in drafts)
        with_top = self._needs_top and asked
        emissions = self._emit(drafts, logits, self._read(logits, with_top=with_top))
        if self._accounts is not None and not rests:
            tokens = [len(emission.tokens) for emission in emissions]
            host_s, step_s = drafted - begin + self._observing_s, time.perf_counter() - begin
            verified = [(draft.tree, emission.path) for draft, emission in zip(drafts, emissions, strict=True)]
            nodes, is_cold = logits.shape[1], self._target.is_cold
            self._accounts.settle(verified, tokens, nodes=nodes, host_s=host_s, step_s=step_s, is_cold=is_cold)
        return emissions

    def _emit(self, drafts: Sequence[Draft], logits: Tensor, scores: Scores) -> list[Emission]:
        """Verify every row's tree, then let the cache, the stats and the proposers follow from what was chosen."""
        with nullcontext() if self._is_simple else self._target.resting():
            verdicts = [self._verify(i, draft, logits, scores.argmax) for i, draft in enumerate(drafts)]
        emissions = []
        for i, (row, draft, verdict) in enumerate(zip(self._rows, drafts, verdicts, strict=True)):
            self._target.commit(i, verdict.path)
            self._count(row.stats, draft, verdict)
            emissions.append(Emission(row.index, verdict.tokens, verdict.finished, draft, verdict.path))
        begin = time.perf_counter()
        for i, (row, draft, verdict) in enumerate(zip(self._rows, drafts, verdicts, strict=True)):
            heard = scores.argmax[i, : len(draft.tree)] if self._needs_argmax else _NO_ARGMAX
            nodes = len(draft.tree)
            hidden = {layer: states[i, :nodes] for layer, states in self._target.hidden.items()}
            read = self._target.prompt_hidden[i] if self._target.prompt_hidden else {}
            top = _top_of(draft.tree, scores, i)
            self._observe(row, draft, Outcome(verdict.tokens, verdict.path, heard, top, hidden, read))
        self._target.prompt_hidden.clear()
        self._observing_s = time.perf_counter() - begin
        self._retire([i for i, verdict in enumerate(verdicts) if verdict.finished])
        return emissions

    def _draft_all(self) -> list[Draft]:
        """Every row's tree: plain decoding, or as large as makes a step worth while."""
        costs = None
        if self._pacing is not None:
            context = max(row.length for row in self._rows)
            left = [self._stopping.max_length - row.length for row in self._rows]
            costs = self._pacing.begin(left, context, self._config.node_budget + 1)
            self._budget = len(costs) - 2 if costs is not None else 0
            self._needs_argmax = self._always_needs_argmax or self._pacing.branch.size is not None
        if not self._proposers or (self._pacing is not None and costs is None):
            return self._bare_all()
        if self._by_rejection:
            return self._draft_draws()
        if costs is None or self._pacing is None:
            return self._propose(FREE)
        drafts = self._propose(costs) if len(self._rows) == 1 else fit(self._propose(FREE), costs, self._pacing.batch)
        if any(len(draft.tree) > 1 for draft in drafts):
            in_step = len(drafts) > 1 and len({row.length - self.padding[row.index] for row in self._rows}) == 1
            if not self._pacing.accepts(drafts, in_step_for=max(left) if in_step else 0):
                return [draft.bare() for draft in drafts]
        return drafts

    def _draft_draws(self) -> list[Draft]:
        """Every row's tree of all that was drawn: to leave a node out for what it is would change the distribution."""
        offers = [] if self._pacing is not None and self._pacing.pauses else self._ask()
        drafts = [self._draft(row, offer, FREE) for row, offer in zip(self._rows, offers, strict=False)]
        self._trials = [Trials(offer, draft.placed) for offer, draft in zip(offers, drafts, strict=True)]
        return drafts or self._bare_all()

    def _propose(self, costs: FloatArray) -> list[Draft]:
        """Every row's tree, of what all proposers offer."""
        if self._drafter is None:
            offers = self._ask()
            return [self._draft(row, offer, costs) for row, offer in zip(self._rows, offers, strict=True)]
        for row in self._rows:
            self._tell(row)
        draft, room = self._drafter.draft, self._config.node_budget
        return [draft(row.index, room, self._limits(row), costs) for row in self._rows]

    def _ask(self) -> list[list[Proposal | None]]:
        """For every row what every proposer offers."""
        for row in self._rows:
            self._tell(row)
        room = self._config.node_budget // (len(self._proposers) if self._by_rejection else 1)
        offers = [ask([row.index for row in self._rows], room) for ask in self._questions]
        return [list(each) for each in zip(*offers, strict=True)]

    def _bare_all(self) -> list[Draft]:
        """Every row's newest token alone, nothing having been asked for."""
        self._trials = []
        return [Draft(TokenTree.root(int(row.ids[row.length - 1])), self._nothing) for row in self._rows]

    def _draft(self, row: _Row, proposals: Sequence[Proposal | None], costs: FloatArray) -> Draft:
        """One row's tree, merged from what every proposer offers."""
        sources = [len(proposer.sources) for proposer in self._proposers]
        return merge(int(row.ids[row.length - 1]), proposals, self._limits(row), sources=sources, costs=costs)

    def _limits(self, row: _Row) -> Limits:
        """What a row's tree may hold."""
        depth = min(self._stopping.max_length - row.length - 1, self._positions_left(row))
        return Limits(self._budget, depth, self._config.min_probability, self._is_chain and not self._by_rejection)

    def _positions_left(self, row: _Row) -> int:
        """Positions the model has behind the newest token of a row.

        Raises:
            PromptError: It has none for that token; on a GPU the model would bring the process down.
        """
        if self._target.positions is None:
            return row.ids.size
        length = row.length - int(self.padding[row.index])
        if length > self._target.positions:
            raise PromptError(
                f"row {row.index} has {length} tokens and the model positions for {self._target.positions}; "
                "lower max_new_tokens or max_length"
            )
        return self._target.positions - length

    def _read(self, logits: Tensor, *, with_top: bool) -> Scores:
        """The likeliest tokens after every node, as far as anyone asks: the step's one read from the device."""
        wanted = self.chooser.is_plain_greedy or self._needs_argmax or with_top
        if not wanted and logits.device.type == "cpu":
            return Scores(_NO_ARGMAX)  # elsewhere reading is also what waits for the pass, so that its time is known
        return read_scores(logits, with_top=with_top)

    def _verify(self, i: int, draft: Draft, logits: Tensor, argmax: IntArray) -> Verdict:
        """Walk the tree of active row i; its ids grow by the tokens it emits."""
        row = self._rows[i]
        if self._is_simple:
            limit = self._stopping.max_length - row.length
            verdict = verify_greedy(draft.tree, argmax[i], self._stopping.eos_tokens, limit)
            if verdict.tokens[-1] < 0:
                raise not_a_number(row.index, row.emitted + len(verdict.tokens) - 1)
            row.ids[row.length : row.length + len(verdict.tokens)] = verdict.tokens
            row.length += len(verdict.tokens)
            row.emitted += len(verdict.tokens)
            return verdict

        typical: Walk = {}
        if self._by_typicality and len(draft.tree) > 1:
            typical = longest_typical(draft.tree, partial(self._chances_after, row, draft.tree, logits[i]))

        def choose(node: int) -> int:
            place: dict[str, Any] = {"row": row.index, "step": row.emitted}
            if node in typical:
                self.chooser.chances(self._ids(row), logits[i, node], **place)
                row.stats.total_variation += 1.0 - typical[node][1]
                return typical[node][0]
            if self._by_rejection:
                chances = self.chooser.chances(self._ids(row), logits[i, node], **place)
                return self._trials[i].choose(node, chances) if self._trials else draw(chances)
            return self.chooser.choose(self._ids(row), logits[i, node], **place)

        def is_finished(token: int) -> bool:
            row.ids[row.length] = token
            row.length += 1
            row.emitted += 1
            return self._stopping.is_finished(row.index, self._ids(row), self.chooser.scores[row.index])

        return verify(draft.tree, choose, is_finished)

    def _chances_after(self, row: _Row, tree: TokenTree, logits: Tensor, path: list[int]) -> Tensor:
        """What the target would draw from after a path of nodes, of `[nodes, vocab]` logits."""
        end = row.length + len(path) - 1
        row.ids[row.length : end] = tree.tokens[path[1:]]
        ids = torch.from_numpy(row.ids[:end])[None].to(self._device)
        step = row.emitted + len(path) - 1
        return self.chooser.chances(ids, logits[path[-1]], row=row.index, step=step, is_tentative=True)

    def _ids(self, row: _Row) -> Tensor:
        """The row's ids so far, int64 `[1, tokens]`, on the device of the prompts."""
        return torch.from_numpy(row.ids[: row.length])[None].to(self._device)

    def _observe(self, row: _Row, draft: Draft, outcome: Outcome) -> None:
        """Let the proposers learn from what happened to their offers.

        After a plain step they are told only once they are asked again, unless they learn from more than tokens:
        many tokens at once cost little more than one.
        """
        is_plain = draft.placed is self._nothing and not self._needs_hidden
        if is_plain and not self._needs_argmax and outcome.top is None:
            row.untold.append(outcome.tokens)
            return
        for proposer, placed in zip(self._proposers, draft.placed, strict=True):
            proposer.observe(row.index, outcome, placed)

    def _tell(self, row: _Row) -> None:
        """Let the proposers see what was emitted while they were not asked."""
        if row.untold:
            outcome = Outcome(np.concatenate(row.untold), ROOT, _NO_ARGMAX)
            row.untold.clear()
            for proposer in self._proposers:
                proposer.observe(row.index, outcome, _NO_ARGMAX)

    def _count(self, stats: DecodingStats, draft: Draft, verdict: Verdict) -> None:
        """Count a verified draft; the first token of a row comes from the prefill, not from a draft's pass."""
        if stats.emitted_tokens:
            stats.target_forwards += 1
            stats.acceptance_histogram[len(verdict.tokens)] += 1
        stats.emitted_tokens += len(verdict.tokens)
        if len(draft.tree) == 1:
            return
        stats.drafted_tokens += len(draft.tree) - 1
        stats.accepted_tokens += len(verdict.path) - 1
        stats.expected_tokens += float(draft.reach.sum()) - 1.0
        sums = sum_by_source(draft.tree, draft.reach, verdict.path, len(self.sources))
        for name, (drafted, accepted, expected) in zip(self.sources, sums.tolist(), strict=True):
            stats.forwards_by_source[name] += drafted > 0
            stats.drafted_by_source[name] += int(drafted)
            stats.accepted_by_source[name] += int(accepted)
            stats.expected_by_source[name] += expected

    def _retire(self, finished: Sequence[int]) -> None:
        """Take finished rows out, the last active row filling each gap, in the target as in the engine."""
        for i in reversed(finished):
            row = self._rows[i]
            self._tell(row)
            if self._pacing is not None:
                self._pacing.end(row.emitted, is_early=row.length < self._stopping.max_length)
            for proposer in self._proposers:
                proposer.finish(row.index)
            if self._keep_cache:
                self.kept[row.index] = self._target.cache.take(i)
            self._target.retire(i)
            last = self._rows.pop()
            if i < len(self._rows):
                self._rows[i] = last
        if self._rows:
            self.chooser.forget_before(min(row.emitted for row in self._rows))


def _top_of(tree: TokenTree, scores: Scores, i: int) -> Top | None:
    """What the target thinks likely after every node of active row i's tree, where it was read."""
    if scores.top is None or scores.probabilities is None:
        return None
    return Top(tree, scores.top[i, : len(tree)], scores.probabilities[i, : len(tree)])
