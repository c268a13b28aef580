"""When an output ends, decided token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

FinishReason = Literal["stop", "length", "criteria"]
"""Why an output ended: an end-of-sequence token or a stop string, a limit on its length, or another criterion."""

Criterion = Callable[[Tensor, Sequence[Tensor]], bool]

_REASONS: dict[type, FinishReason] = {EosTokenCriteria: "stop", StopStringCriteria: "stop", MaxLengthCriteria: "length"}


def reason_of(criterion: object) -> FinishReason:
    """The reason a criterion stands for; a subclass counts as a custom one."""
    return _REASONS.get(type(criterion), "criteria")


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When the output of a row ends.

    Attributes:
        max_length: Ids at which a row ends, prompt and padding included, as in `model.generate`.
        eos_tokens: Tokens that end an output.
        custom: Every other criterion with its reason. It takes a row's ids, int64 `[1, tokens]`, and its scores so far,
            each `[vocab]`.
    """

    max_length: int
    eos_tokens: frozenset[int]
    custom: tuple[tuple[FinishReason, Criterion], ...] = ()

    def within(self, context: int) -> StoppingRule:
        """The rule for a model with a context of so many ids; one more id follows the last of them."""
        return replace(self, max_length=min(self.max_length, context + 1))
