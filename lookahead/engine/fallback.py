"""Plain decoding by transformers, for calls that cannot be decoded speculatively."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from lookahead.backend.protocol import OnPrefill
from lookahead.drafting.tree import IntArray
from lookahead.engine.row import StepOutput
from lookahead.stats import DecodingStats
from lookahead.verification.rules import FinishReason, pads_after_end, reason_of

# If several reasons end a row at one token, the first applies, as in `StoppingRule.finish_reason`.
_STRONGEST_FIRST: tuple[FinishReason, ...] = ("stop", "criteria", "length")


class PlainLoop:
    """Has the interface of `Engine`; runs transformers' own loop once and returns all tokens in one step.

    The loop, `sample`, takes `stopping_criteria` and returns ids, int64 `[batch, tokens + new]`. `lengths`, int64
    `[batch]`, are the lengths of prompts without padding; `context` is the maximum tokens of a row, None for no limit;
    `reason` says why nothing is drafted.
    """

    takes_streamer = True

    def __init__(
        self,
        sample: Callable[..., Any],
        input_ids: Tensor,
        lengths: NDArray[np.int64],
        criteria: StoppingCriteriaList,
        context: int | None = None,
        reason: str = "",
    ) -> None:
        self._criteria = _RecordingCriteria(criteria)
        # `model.generate` runs its loops without gradients; this one may run outside it.
        self.sample = partial(torch.no_grad()(sample), stopping_criteria=self._criteria)
        self._width = input_ids.shape[1]
        self._context = context
        self.stats = [DecodingStats(prompt_tokens=int(n), fallback_reason=reason) for n in lengths]

    def serving(self, *, is_alone: bool = False) -> AbstractContextManager[None]:
        """Does nothing: the model runs unchanged."""
        return nullcontext()

    def report_prefill(self, on_prefill: OnPrefill | None) -> None:
        """Does nothing: the loop of transformers reads the prompt in one pass."""

    def end_if(self, is_cancelled: Callable[[], bool]) -> None:
        """End at the first token after which `is_cancelled` holds."""
        self._criteria.append(_Cancelled(is_cancelled))

    def run(self) -> Iterator[list[StepOutput]]:
        """Decode every row to its end and yield all of it at once."""
        start = time.perf_counter()
        output = self.sample()
        sequences: Tensor = getattr(output, "sequences", output)
        seconds = time.perf_counter() - start
        step_outputs = []
        new: list[IntArray] = [*sequences[:, self._width :].cpu().numpy().astype(np.int32)]
        for row, ids in enumerate(new):
            stats, limit = self.stats[row], self._width + len(ids)
            if self._context is not None:
                limit = min(limit, self._width - stats.prompt_tokens + self._context + 1)
            end, reason = self._criteria.ends.get(row, (limit, "criteria"))
            tokens = ids[: (min(end, limit) if self._criteria.pads else limit) - self._width]
            stats.backend, stats.emitted_tokens = "transformers", len(tokens)
            stats.target_forwards = stats.bitwise_forwards = stats.acceptance_histogram[1] = len(tokens) - 1
            # The prefill of the loop is not timed separately.
            stats.decode_s = stats.ttft_s = seconds
            step_outputs.append(StepOutput(row, tokens, reason if end <= limit else "length"))
        yield step_outputs


class _Cancelled(StoppingCriteria):
    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Whether the rows end here."""
        return torch.full((len(input_ids),), self._is_cancelled(), device=input_ids.device)


class _RecordingCriteria(StoppingCriteriaList):
    """Stopping criteria that record the end of every row: the number of its ids, and the reason.

    With an end-of-sequence token (`pads`) transformers pads a row after its end; else the row continues until all end.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.ends: dict[int, tuple[int, FinishReason]] = {}
        self.pads = pads_after_end(criteria)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Call all criteria, once and in order, as transformers' own list does."""
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        fired = dict.fromkeys(_STRONGEST_FIRST, done)
        for criterion in self:
            reason = reason_of(criterion)
            fired[reason] = fired[reason] | criterion(input_ids, scores, **kwargs)
            done = done | fired[reason]
        for row in done.nonzero().flatten().tolist():
            reason = next(reason for reason in _STRONGEST_FIRST if fired[reason][row])
            self.ends.setdefault(row, (input_ids.shape[1], reason))
        return done
