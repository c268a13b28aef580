"""When an output ends, told token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lookahead.tree import IntArray


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When the output of a row ends.

    Attributes:
        max_length: Ids at which a row ends, prompt and padding included, as `model.generate` counts them.
        eos_tokens: int32 `[k]`; tokens that end an output.
        custom: Every other criterion: takes a row's ids, int64 `[1, tokens]`, and its scores so far, each `[vocab]`;
            None where there is none.
    """

    max_length: int
    eos_tokens: IntArray
    custom: Callable[[Tensor, Sequence[Tensor]], bool] | None = None

    @property
    def is_only_length(self) -> bool:
        """Whether nothing ends a row before `max_length`."""
        return self.custom is None and not self.eos_tokens.size

    def is_finished(self, ids: Tensor, scores: Sequence[Tensor] = ()) -> bool:
        """Whether a row whose ids, int64 `[1, tokens]`, end with its newest token ends there."""
        # Every criterion is asked, as `model.generate` does: one that counts its calls must see them all.
        custom = self.custom is not None and self.custom(ids, scores)
        return custom or ids.shape[1] >= self.max_length or int(ids[0, -1]) in self.eos_tokens
