"""The decoding loop: propose, draft, score, verify, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lookahead.cache import RowStates
from lookahead.config import LookaheadConfig
from lookahead.cost import FloatArray, StepCost
from lookahead.drafting import Draft, merge
from lookahead.errors import PromptError
from lookahead.proposers.base import IntArray, Outcome, Proposer, Top
from lookahead.sampling import TokenChooser, not_a_number
from lookahead.scores import Scores, read_scores
from lookahead.stats import DecodingStats
from lookahead.stopping import StoppingRule
from lookahead.target import Target
from lookahead.tree import TokenTree, count_by_source
from lookahead.verify import Verdict, verify, verify_greedy

_NO_ARGMAX = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens one row emitted in one step.

    Attributes:
        row: The row's place in the batch.
        tokens: int32 `[n]`, n at least 1.
        finished: The row's output ends here.
    """

    row: int
    tokens: IntArray
    finished: bool


@dataclass(slots=True)
class _Row:
    """A row that is being decoded; `ids[:length]` is what `model.generate` would hold, padding included."""

    index: int
    ids: NDArray[np.int64]
    length: int
    emitted: int = 0
    stats: DecodingStats = field(default_factory=DecodingStats)


class Engine:
    """Decodes a batch of prompts together; rows advance and finish independently.

    Args:
        target: The model behind its cache, with room for as many rows as there are prompts.
        proposers: Where drafts come from; none means plain decoding.
        cost: What a step was measured to cost; learns from every step.
        config: The options.
        chooser: How a token is chosen.
        stopping: When a row ends.
        prompts: int64 `[batch, tokens]`, left-padded as `model.generate` takes them.
        lengths: int64 `[batch]`, tokens of each prompt without its padding, at least 1.
        keep_cache: Whether to keep the KV of rows that end.
        is_chain: Whether the target verifies chains only.

    Attributes:
        chooser: As given.
        stats: One per row of the batch.
        padding: int64 `[batch]`, padding tokens before each prompt.
        kept: For every row that ended its KV per layer, where it is to be kept.
    """

    def __init__(
        self,
        target: Target,
        proposers: Sequence[Proposer],
        cost: StepCost,
        config: LookaheadConfig,
        chooser: TokenChooser,
        stopping: StoppingRule,
        prompts: Tensor,
        lengths: NDArray[np.int64],
        *,
        keep_cache: bool = False,
        is_chain: bool = False,
    ) -> None:
        self._target = target
        self._proposers = proposers
        self._cost = cost
        self._config = config
        self.chooser = chooser
        self._stopping = stopping
        self._device = prompts.device
        self._budget = config.node_budget
        self._needs_argmax = any(proposer.needs_argmax for proposer in proposers)
        self._needs_top = any(proposer.needs_top for proposer in proposers)
        self._sources = [name for proposer in proposers for name in proposer.sources]
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
        for row in self._rows:
            self._positions_left(row)
        logits = self._target.prefill(self._prompts)
        nothing = tuple(_NO_ARGMAX for _ in self._proposers)
        drafts = [Draft(TokenTree.root(int(row.ids[row.length - 1])), nothing) for row in self._rows]
        return self._emit(drafts, logits, self._read(logits))

    def step(self) -> list[Emission]:
        """Advance every running row by one target pass; the model must be in service."""
        drafts = self._draft_all()
        begin = time.perf_counter()
        logits = self._target.score([draft.tree for draft in drafts])
        scores = self._read(logits)
        self._cost.observe(logits.shape[0] * logits.shape[1], time.perf_counter() - begin)
        for row, draft in zip(self._rows, drafts, strict=True):
            self._count_draft(row.stats, draft)
        return self._emit(drafts, logits, scores)

    def _emit(self, drafts: Sequence[Draft], logits: Tensor, scores: Scores) -> list[Emission]:
        """Verify every row's tree, then let the cache, the stats and the proposers follow from what was chosen."""
        with nullcontext() if self._is_simple else self._target.resting():
            verdicts = [self._verify(i, draft, logits, scores.argmax) for i, draft in enumerate(drafts)]
        emissions = []
        for i, (row, draft, verdict) in enumerate(zip(self._rows, drafts, verdicts, strict=True)):
            self._target.commit(i, verdict.path)
            self._count_verdict(row.stats, draft, verdict)
            heard = scores.argmax[i, : len(draft.tree)] if self._needs_argmax else _NO_ARGMAX
            self._observe(row, draft, Outcome(verdict.tokens, verdict.path, heard, _top_of(draft.tree, scores, i)))
            emissions.append(Emission(row.index, verdict.tokens, verdict.finished))
        self._retire([i for i, verdict in enumerate(verdicts) if verdict.finished])
        return emissions

    def _draft_all(self) -> list[Draft]:
        """Every row's tree, as large as the measured cost of a step makes worth while."""
        is_sized = self._proposers and self._config.draft == "auto"
        costs = self._cost.curve(len(self._rows), self._budget + 1) if is_sized else None
        return [self._draft(row, costs) for row in self._rows]

    def _draft(self, row: _Row, costs: FloatArray | None) -> Draft:
        """One row's tree, merged from what every proposer offers."""
        proposals = [proposer.propose(row.index, self._budget) for proposer in self._proposers]
        return merge(
            int(row.ids[row.length - 1]),
            proposals,
            budget=self._budget,
            max_depth=min(self._stopping.max_length - row.length - 1, self._positions_left(row)),
            sources=[len(proposer.sources) for proposer in self._proposers],
            min_probability=self._config.min_probability,
            costs=costs,
            is_chain=self._is_chain,
        )

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
                "shorten the prompt, or lower max_new_tokens or max_length"
            )
        return self._target.positions - length

    def _read(self, logits: Tensor) -> Scores:
        """The likeliest tokens after every node, as far as anyone asks: the step's one read from the device."""
        wanted = self.chooser.is_plain_greedy or self._needs_argmax or self._needs_top
        if not wanted and logits.device.type == "cpu":
            return Scores(_NO_ARGMAX)  # elsewhere reading is also what waits for the pass, so that its time is known
        return read_scores(logits, with_top=self._needs_top)

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

        def choose(node: int) -> int:
            return self.chooser.choose(self._ids(row), logits[i, node], row=row.index, step=row.emitted)

        def is_finished(token: int) -> bool:
            row.ids[row.length] = token
            row.length += 1
            row.emitted += 1
            return self._stopping.is_finished(row.index, self._ids(row), self.chooser.scores[row.index])

        return verify(draft.tree, choose, is_finished)

    def _ids(self, row: _Row) -> Tensor:
        """The row's ids so far, int64 `[1, tokens]`, on the device of the prompts."""
        return torch.from_numpy(row.ids[: row.length])[None].to(self._device)

    def _observe(self, row: _Row, draft: Draft, outcome: Outcome) -> None:
        """Let the proposers learn from what happened to their offers."""
        for proposer, placed in zip(self._proposers, draft.placed, strict=True):
            proposer.observe(row.index, outcome, placed)

    def _count_draft(self, stats: DecodingStats, draft: Draft) -> None:
        """Count a draft that was verified."""
        stats.target_forwards += 1
        stats.drafted_tokens += len(draft.tree) - 1
        drafted = count_by_source(draft.tree, np.arange(len(draft.tree), dtype=np.int32), len(self._sources))
        for name, count in zip(self._sources, drafted, strict=True):
            stats.drafted_by_source[name] += count

    def _count_verdict(self, stats: DecodingStats, draft: Draft, verdict: Verdict) -> None:
        """Count what was emitted; the first token of a row comes from the prefill, not from a draft's pass."""
        if stats.target_forwards:
            stats.acceptance_histogram[len(verdict.tokens)] += 1
        stats.emitted_tokens += len(verdict.tokens)
        stats.accepted_tokens += len(verdict.path) - 1
        accepted = count_by_source(draft.tree, verdict.path, len(self._sources))
        for name, count in zip(self._sources, accepted, strict=True):
            stats.accepted_by_source[name] += count

    def _retire(self, finished: Sequence[int]) -> None:
        """Take finished rows out, the last active row filling each gap, in the target as in the engine."""
        for i in reversed(finished):
            for proposer in self._proposers:
                proposer.finish(self._rows[i].index)
            if self._keep_cache:
                self.kept[self._rows[i].index] = self._target.cache.take(i)
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
