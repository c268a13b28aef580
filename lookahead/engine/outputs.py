"""What a step gives: the tokens of one row, or an error of the user's code."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from lookahead.drafting.select import Draft
from lookahead.drafting.tree import IntArray
from lookahead.verification.stopping import FinishReason

ROOT = np.zeros(1, np.int32)
"""A path of no accepted nodes."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Tokens one row emitted in one step.

    Attributes:
        row: The row's place in the batch.
        tokens: int32 `[n]`, n at least 1 but where there was an error.
        finish_reason: Why the row's output ends here; None where it goes on, or there was an error.
        draft: What was verified; None where transformers decoded.
        path: int32 `[a]`, the nodes of the draft that were accepted, its root first.
        error: What ended the row, where nothing should have; it then emitted nothing in this step.
    """

    row: int
    tokens: IntArray
    finish_reason: FinishReason | None
    draft: Draft | None = None
    path: IntArray = field(default_factory=lambda: ROOT)
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        """Whether the row's output ends here."""
        return self.finish_reason is not None or self.error is not None


class Carried(RuntimeError):
    """Brings a `StopIteration` of the user's code, its cause, out of a generator, which can raise none itself."""


class Carrying:
    """Carries a `StopIteration` that is raised in the block; `contextlib` would let it through as it is."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, StopIteration):
            raise Carried("generator raised StopIteration") from error
