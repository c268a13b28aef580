"""Stateful processors and criteria, as in grammars and evaluation harnesses. They must see every step exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

Call = tuple[list[list[int]], Any]


class Grammar(LogitsProcessor):
    """Learns the number of rows at the first call, then reads each row's newest token.

    Attributes:
        calls: The arguments of its calls: the ids, and the shape of the scores.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._states: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        newest = input_ids[:, -1].tolist() if self.calls else [0] * len(input_ids)
        self._states = [s + t for s, t in zip(self._states or newest, newest, strict=True)]
        self.calls.append((input_ids.tolist(), scores.shape))
        scores = scores.clone()
        for row, state in enumerate(self._states):
            scores[row, state % 3 :: 3] -= 40
        return scores


class DoneTracker(StoppingCriteria):
    """A row is done once it has ended with a sequence of tokens; the batch is done once all rows are.

    Args:
        sequence: The tokens.
        rows: Rows of the batch.
        by_row: Whether it reports every row, or only the whole batch.

    Attributes:
        calls: The arguments of its calls: the ids, and the shapes of the scores.
    """

    def __init__(self, sequence: Sequence[int], rows: int, *, by_row: bool = False) -> None:
        self.calls: list[Call] = []
        self._sequence, self._done, self._by_row = list(sequence), [False] * rows, by_row

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls.append((input_ids.tolist(), scores and [step.shape for step in scores]))
        for row, ids in enumerate(input_ids[:, -len(self._sequence) :].tolist()):
            self._done[row] |= ids == self._sequence
        return torch.tensor(self._done) if self._by_row else all(self._done)


def calls_of(options: dict[str, Any]) -> list[Any]:
    """The calls of the processors and criteria of a call; None for one that does not record them."""
    given = [*options.get("logits_processor", ()), *options.get("stopping_criteria", ())]
    return [getattr(each, "calls", None) for each in given]
