"""What the decoding loop of a server is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lookahead.errors import LookaheadError
from lookahead.stats import DecodingStats

EndReason = Literal["stop", "length", "criteria", "cancelled"]
OnUpdate = Callable[["Update"], None]


class QueueFullError(LookaheadError):
    """As many requests wait as may; `retry_after_s` is when to ask again."""

    retry_after_s = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one output is asked for.

    Attributes:
        ids: Token ids of the prompt.
        options: Options of `model.generate`, such as `max_new_tokens`, `do_sample` or `stop_strings`.
        seed: Of the draws; None for any.
        prediction: What the output will largely be, as of `lookahead.generate`.
        json_schema: A JSON schema that the output follows.
        regex: A regular expression that it matches, in place of a schema.
        grammar: A grammar that it follows, in place of a schema.
        top_logprobs: The likeliest tokens to report for every token, from 0 on; None reports no logarithms at all.
    """

    ids: list[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    prediction: Any = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token with its log-probability, and the likeliest tokens in its place, by the model's logits."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step added to an output.

    Attributes:
        text: New text that later tokens do not change; the last update has the rest.
        tokens: New tokens, an end-of-sequence token included.
        logprobs: Of these tokens, where they were asked for.
        end: Why the output ended; None where it goes on, or where there was an error.
        error: What ended the output otherwise.
        stats: The counters so far.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: EndReason | None = None
    error: Exception | None = None
    stats: DecodingStats = field(default_factory=DecodingStats)

    @property
    def is_last(self) -> bool:
        """Whether nothing follows."""
        return self.end is not None or self.error is not None


class Ticket:
    """A request that was taken."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        """End the output soon; the last update says `"cancelled"`, unless it has ended."""
        self.is_cancelled = True
