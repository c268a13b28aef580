"""The requests to the decoding loop of a server, and its updates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lookahead.stats import DecodingStats

EndReason = Literal["stop", "length", "criteria", "cancelled"]
OnUpdate = Callable[["Update"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for the outputs of one prompt.

    Attributes:
        ids: Token ids of the prompt.
        inputs: All inputs of the model for a prompt with images or sounds, as its processor returns them.
        options: Options of `lookahead.generate`, such as `max_new_tokens`, `do_sample` or `regex`.
        choices: Number of outputs.
        seed: Seed of the draws of the first output; each further one has the next number. None for random ones.
        prediction: The expected output, as in `lookahead.generate`.
        top_logprobs: Number of most likely tokens to report for every token; None reports no log-probabilities.
        drafts: Whether its tokens are drafted.
        hidden_ends: End-of-sequence tokens that are not part of the text, besides special tokens.
        client: Whose request it is: clients take turns.
        salt: Only requests with the same one share kept keys and values.
    """

    ids: list[int]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    choices: int = 1
    seed: int | None = None
    prediction: Any = None
    top_logprobs: int | None = None
    drafts: bool = True
    hidden_ends: Collection[int] = ()
    client: str = ""
    salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token with its log-probability, and the most likely tokens at its position, by the model's logits.

    The first token of a prompt has none.
    """

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The update of an output after a step.

    Attributes:
        text: New text that later tokens do not change; the last update has the rest.
        tokens: New tokens, including an end-of-sequence token.
        logprobs: Log-probabilities of these tokens, if requested.
        end: Why the output ended; None if it continues, or after an error.
        error: The error that ended the output; None without one.
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
        """Whether this is the last update."""
        return self.end is not None or self.error is not None
