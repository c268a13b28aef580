"""When an output ends, decided token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from lookahead.model.known_code import CRITERIA
from lookahead.verification.acceptance import Acceptance
from lookahead.verification.per_row import is_per_row
from lookahead.verification.sampling import foreign_processor

FinishReason = Literal["stop", "length", "criteria"]
"""Why an output ended: an end-of-sequence token or a stop string, a limit on its length, or another criterion."""

_REASONS: dict[type, FinishReason] = {EosTokenCriteria: "stop", StopStringCriteria: "stop", MaxLengthCriteria: "length"}


def reason_of(criterion: object) -> FinishReason:
    """The finish reason of a criterion; a subclass counts as custom."""
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
    custom: tuple[tuple[FinishReason, Callable[[Tensor, Sequence[Tensor]], bool]], ...] = ()


def end_tokens(value: Any) -> list[int]:
    """The tokens that end an output, of an `eos_token_id` as `model.generate` takes it.

    Example:
        >>> end_tokens(None), end_tokens(2), end_tokens(torch.tensor([2, 7]))
        ([], [2], [2, 7])
    """
    value = value.tolist() if isinstance(value, Tensor) else value
    return [value] if isinstance(value, int) else list(value or ())


def pads_after_end(criteria: StoppingCriteriaList) -> bool:
    """Whether transformers pads a row of a batch after its end, as it does with an end-of-sequence token."""
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def has_own(options: Mapping[str, Any]) -> bool:
    """Whether options of `model.generate` hold a user's criteria, or processors that are not per row."""
    processors = options.get("logits_processor") or ()
    return bool(options.get("stopping_criteria")) or not all(map(is_per_row, processors))


def stateful_name(processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: GenerationConfig) -> str:
    """The name of the first processor or criterion that may keep a state or look across rows, or an empty string."""
    others = [criterion for criterion in criteria if type(criterion) not in CRITERIA]
    names = [str(getattr(other, "__qualname__", type(other).__qualname__)) for other in others]  # it may be a function
    return next(iter(names), "") or foreign_processor(processors, config)


def stateful_reason(
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    rows: int,
    acceptance: Acceptance,
) -> str:
    """Why calls of a processor or criterion would differ from `model.generate`, or an empty string.

    Rows of a batch advance at different rates, and an acceptance may call processors for tokens that are not emitted.

    Args:
        processors: The processors of the call.
        criteria: The stopping criteria of the call.
        config: The generation configuration of the call.
        rows: Rows of the batch, at least 1.
        acceptance: The acceptance of the call.
    """
    if rows > 1 and (name := stateful_name(processors, criteria, config)):
        return (
            f"{name} may keep a state, or look at other rows, so it must see every step of the whole batch: the {rows} "
            "rows are decoded plainly; a single prompt is drafted for, and so are processors of lookahead.PerRow"
        )
    if acceptance.looks_ahead and (name := foreign_processor(processors, config, is_tentative=True)):
        return (
            f"{name} may keep a state, and acceptance={acceptance.name!r} would ask it about tokens that are not "
            "emitted: the call is decoded plainly; with acceptance='exact' a prompt by itself is drafted for"
        )
    return ""


def stopping_rule(criteria: StoppingCriteriaList, config: GenerationConfig) -> StoppingRule:
    """Separate the criteria that count tokens from those that must be called."""
    eos, limits, others = set[int](), list[int](), list[Any]()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            limits.append(criterion.max_length)
        else:
            others.append(criterion)
    shows_scores = config.return_dict_in_generate and config.output_scores

    def ask(criterion: StoppingCriteriaList, ids: Tensor, scores: Sequence[Tensor]) -> bool:
        steps = tuple(cast(Any, step[None]) for step in scores) if shows_scores else None
        return bool(criterion(cast(torch.LongTensor, ids), steps))

    custom = tuple((reason_of(c), partial(ask, StoppingCriteriaList([c]))) for c in others)
    return StoppingRule(
        max_length=min(limits, default=cast(int, config.max_length)), eos_tokens=frozenset(eos), custom=custom
    )
