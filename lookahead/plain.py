"""Plain decoding by transformers itself, for what cannot be decoded speculatively."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import StoppingCriteriaList

from lookahead.emission import Carrying, Emission
from lookahead.stats import DecodingStats


class PlainLoop:
    """Stands in for an `Engine`: one call of transformers' own loop, and the same report of what it emitted.

    Args:
        sample: Runs the loop by `stopping_criteria`; returns ids, int64 `[batch, tokens + new]`.
        input_ids: int64 `[batch, tokens]`.
        lengths: int64 `[batch]`, tokens of each prompt without its padding.
        criteria: When a row ends.

    Attributes:
        sample: As given, by these criteria.
        stats: One per row.
    """

    def __init__(
        self, sample: Callable[..., Any], input_ids: Tensor, lengths: NDArray[np.int64], criteria: StoppingCriteriaList
    ) -> None:
        self._criteria = _Heard(criteria)
        self.sample = partial(sample, stopping_criteria=self._criteria)
        self._width = input_ids.shape[1]
        self.stats = [DecodingStats(prompt_tokens=int(length)) for length in lengths]

    def serving(self) -> AbstractContextManager[None]:
        """Nothing to prepare: the model runs as it is."""
        return nullcontext()

    def run(self) -> Iterator[list[Emission]]:
        """Decode every row to its end and yield all of it at once."""
        start = time.perf_counter()
        with Carrying():
            output = self.sample()
        sequences: Tensor = getattr(output, "sequences", output)
        seconds = time.perf_counter() - start
        emissions = []
        for row, ids in enumerate(sequences[:, self._width :].cpu().numpy().astype(np.int32)):
            tokens = ids[: self._criteria.ends.get(row, self._width + len(ids)) - self._width]
            stats = self.stats[row]
            stats.emitted_tokens = len(tokens)
            stats.target_forwards = stats.acceptance_histogram[1] = len(tokens) - 1
            # The loop is not watched: its prefill cannot be told from its steps.
            stats.decode_s = stats.ttft_s = seconds
            emissions.append(Emission(row, tokens, finished=True))
        yield emissions


class _Heard(StoppingCriteriaList):
    """Criteria that are asked as ever; what they say of every row is kept.

    Attributes:
        ends: Ids after which a row is padded, by its place.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.ends: dict[int, int] = {}
        # Without an end-of-sequence token transformers pads nothing: a row goes on until all have ended.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Ask all of them, once."""
        done = super().__call__(input_ids, scores, **kwargs)
        if self._pads:
            for row in done.nonzero().flatten().tolist():
                self.ends.setdefault(row, input_ids.shape[1])
        return done
