"""A request of a scheduler, and the result of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from lookahead.decoding.loops import loops
from lookahead.decoding.plan import RequestPlan
from lookahead.decoding.validation import validate_call
from lookahead.engine.engine import NO_NODES
from lookahead.engine.row import StepOutput
from lookahead.model.facts import input_device
from lookahead.stats import DecodingStats
from lookahead.verification.rules import FinishReason


@dataclass(slots=True, eq=False)
class Request:
    """A prompt in a scheduler.

    Attributes:
        index: Its number, unique among unfinished requests.
        ids: The tokens of the prompt, if the scheduler plans it.
        max_new_tokens: Replaces this option of the scheduler's reader; None keeps it.
        prediction: The expected output as token ids.
        plan: How it is decoded, or makes that at its turn; None until its turn if the scheduler plans it.
        row: Its `Row`; None until its turn if it shares none, and if transformers decodes it.
        encoder_tokens: Tokens that an encoder has read for its row.
        seed: Seed of torch's random numbers if it shares no rows; None leaves them.
        turn: Requests begin in the order of their turns, and within one the shorter prompts first.
        salt: Only requests with the same one share kept keys and values.
        came_at: Tokens of prompts that had been read when it was first looked at; None before that.
        unread: Tokens of its prompt that no kept text has, and the `newest` of the store at that time.
        stats: Its counters.
        last: The tokens of its last step; None before the first.
        is_cancelled: Whether `Scheduler.cancel` was called.
        is_over: Whether it has left the scheduler, finished or cancelled.
    """

    index: int
    ids: Sequence[int] = ()
    max_new_tokens: int | None = None
    prediction: Any = None
    plan: RequestPlan | Callable[[], RequestPlan] | None = None
    row: Any = None
    encoder_tokens: int = 0
    seed: int | None = None
    turn: int = 0
    salt: str = ""
    came_at: int | None = None
    unread: tuple[int, int] | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)
    last: StepOutput | None = None
    is_cancelled: bool = False
    is_over: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether it is over and was not cancelled before its end."""
        return self.last is not None and self.last.finished

    @property
    def token_ids(self) -> list[int]:
        """The new tokens so far, including an end-of-sequence token."""
        if self.last is None or self.last.error is not None:
            return []
        row, tokens = self.row, self.last.tokens  # without a row, a single step emits all tokens
        new: list[int] = (tokens if row is None else row.ids[row.length - row.emitted : row.length]).tolist()
        return new

    def join(self, plan: RequestPlan, *, shares_rows: bool = True) -> None:
        """Make its row if its plan and its model can share a batch."""
        validate_call(plan.call.model, plan.call.generation_config, plan.call.model_kwargs)
        if not (shares_rows and plan.can_join):
            return
        (row,), encoded = plan.rows()
        row.index, row.device, row.encoded = self.index, input_device(plan.call.model), encoded
        if encoded is not None:
            self.encoder_tokens = len(self.ids)
        self.row, self.stats = row, row.stats

    def take(self, last: StepOutput) -> None:
        """Take the output of a step."""
        self.last, self.is_over = last, last.finished

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.take(StepOutput(self.index, NO_NODES, None, error=cast(Exception, error)))


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one prompt.

    Attributes:
        index: The number of the prompt, from 0.
        text: Its new text, without special tokens.
        token_ids: Its new tokens, including an end-of-sequence token.
        stats: Its counters; seconds are wall time, shared with other rows.
        error: Why the prompt could not be served; None if it was. Other prompts are not affected.
        finish_reason: Why the output ended, `"stop"`, `"length"` or `"criteria"` as in `GenerationResult`; None after
            an error.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    stats: DecodingStats = field(default_factory=DecodingStats)
    error: Exception | None = None
    finish_reason: FinishReason | None = None

    @property
    def loops(self) -> bool:
        """Whether the output repeats one phrase up to its end (`lookahead.decoding.loops`)."""
        return loops(self.token_ids)
