"""Plain decoding by transformers itself, for models that cannot verify drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lookahead.emission import Emission
from lookahead.stats import DecodingStats
from lookahead.stopping import FinishReason, StoppingRule
from lookahead.target import OnPrefill


class PlainLoop:
    """Stands in for an `Engine`: one call of transformers' own loop, and the same report of what it emitted.

    Args:
        sample: Runs the loop; returns ids, int64 `[batch, tokens + new]`.
        input_ids: int64 `[batch, tokens]`.
        lengths: int64 `[batch]`, tokens of each prompt without its padding.
        stopping: When a row ends.
        context: Tokens of a row that the model may read; None for no limit.

    Attributes:
        sample: As given.
        stats: One per row.
    """

    def __init__(
        self,
        sample: Callable[..., Any],
        input_ids: Tensor,
        lengths: NDArray[np.int64],
        stopping: StoppingRule,
        context: int | None = None,
    ) -> None:
        self.sample = sample
        self._width = input_ids.shape[1]
        self._stopping, self._context = stopping, context
        self.stats = [DecodingStats(prompt_tokens=int(length)) for length in lengths]

    def serving(self) -> AbstractContextManager[None]:
        """Nothing to prepare: the model runs as it is."""
        return nullcontext()

    def report_prefill(self, on_prefill: OnPrefill | None) -> None:
        """Transformers' loop reads the prompt in one pass and tells nothing of it."""

    def run(self) -> Iterator[list[Emission]]:
        """Decode every row to its end and yield all of it at once."""
        start = time.perf_counter()
        output = self.sample()
        sequences: Tensor = getattr(output, "sequences", output)
        seconds = time.perf_counter() - start
        emissions = []
        for row, ids in enumerate(sequences[:, self._width :].cpu().numpy().astype(np.int32)):
            ends = np.flatnonzero(np.isin(ids, self._stopping.eos_tokens))
            stats, rule = self.stats[row], self._stopping
            if self._context is not None:
                rule = rule.within(self._width - stats.prompt_tokens + self._context)
            tokens = (ids[: ends[0] + 1] if len(ends) else ids)[: rule.max_length - self._width]
            stats.emitted_tokens = len(tokens)
            stats.target_forwards = stats.acceptance_histogram[1] = len(tokens) - 1
            # The loop is not watched: its prefill cannot be told from its steps.
            stats.decode_s = stats.ttft_s = seconds
            emissions.append(
                Emission(row, tokens, self._reason(row, sequences[row : row + 1, : self._width + len(tokens)], rule))
            )
        yield emissions

    def _reason(self, row: int, ids: Tensor, rule: StoppingRule) -> FinishReason:
        """Why a row ended, whose ids are int64 `[1, tokens + new]`."""
        # The loop has asked the criteria of a user's own, which may count their calls; stop strings only read.
        strings = tuple((reason, criterion) for reason, criterion in rule.custom if reason == "stop")
        return replace(rule, custom=strings).finish_reason(row, ids) or "criteria"
