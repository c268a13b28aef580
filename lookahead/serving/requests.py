"""Requests to the decoding loop of a server, their outputs, and the updates for clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lookahead.decoding.request import Request
from lookahead.decoding.text_pieces import TextPieces
from lookahead.engine.row import Row
from lookahead.errors import UnsupportedModelError
from lookahead.model.calls import kind_of
from lookahead.model.facts import input_device, prefills_at_once
from lookahead.stats import DecodingStats

_PART = 512  # tokens of a prompt that are read at once
_LEAST_LOG = -9999.0  # JSON has no infinity
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


class Output:
    """An output of a client.

    Args:
        request: Its request in a scheduler.
        tokenizer: The tokenizer.
        on_update: Gets its updates.
        asked: The client's request.

    Attributes:
        client: Whose it is.
        has_begun: Whether an update was sent.
    """

    def __init__(
        self, request: Request, tokenizer: PreTrainedTokenizerBase, on_update: OnUpdate, asked: GenerationRequest
    ) -> None:
        self.request, self.client, self.has_begun, self._top = request, asked.client, False, asked.top_logprobs
        self._hidden_ends = frozenset(asked.hidden_ends)
        self._pieces, self._on_update = TextPieces(tokenizer), on_update

    def cancel(self) -> None:
        """End it soon; its last update says `"cancelled"`, unless it has ended."""
        self.request.is_cancelled = True

    def tell(self) -> None:
        """Send what the last step wrote, or that the output was cancelled."""
        request, self.has_begun = self.request, True
        last = request.last
        if last is None or (request.is_over and not request.is_finished):
            self._on_update(Update(text=self._pieces.end(), end="cancelled", stats=request.stats))
            return
        tokens = last.tokens.tolist()
        is_hidden = last.finish_reason == "stop" and tokens[-1] in self._hidden_ends
        text = self._pieces.put(tokens[:-1] if is_hidden else tokens)
        if last.finish_reason is not None:
            text += self._pieces.end()
        end, error, logprobs = last.finish_reason, last.error, list[TokenLogprobs]()
        if request.row is not None and self._top is not None and error is None:
            logprobs = self._logprobs(request.row, tokens)
        self._on_update(Update(text=text, tokens=tokens, logprobs=logprobs, end=end, error=error, stats=request.stats))

    def _logprobs(self, row: Row, tokens: list[int]) -> list[TokenLogprobs]:
        """Log-probabilities of new tokens, from the logits that the chooser kept; the logits are dropped."""
        kept: list[Tensor] = row.chooser.logits[row.place]
        logprobs = [_logprobs_of(token, logits, self._top or 0) for token, logits in zip(tokens, kept, strict=True)]
        kept.clear()
        row.chooser.scores[row.place].clear()
        return logprobs


@torch.inference_mode()
def prompt_logprobs(model: PreTrainedModel, ids: list[int], top: int) -> list[TokenLogprobs]:
    """The log-probabilities of a prompt's tokens, and `top` likely ones at each place.

    A long prompt is read in parts, so that its logits take little memory; a thread may be interrupted between them.

    Raises:
        UnsupportedModelError: The model cannot read a prompt in parts.
    """
    causal_lm: Any = model
    if kind_of(model).has_encoder or (len(ids) > _PART and prefills_at_once(model)):
        why = "an encoder reads it" if kind_of(model).has_encoder else "it is too long to be read at once"
        raise UnsupportedModelError(f"{type(model).__name__} gives no log-probabilities of this prompt: {why}")
    logprobs, cache = [TokenLogprobs(ids[0], None, [])], None
    for start in range(0, len(ids), _PART):
        part = torch.tensor([ids[start : start + _PART]], device=input_device(model))
        read = causal_lm(part, past_key_values=cache, use_cache=len(ids) > _PART)
        cache = read.get("past_key_values")
        following = ids[start + 1 : start + 1 + _PART]
        logprobs += [_logprobs_of(token, logits, top) for token, logits in zip(following, read.logits[0], strict=False)]
    return logprobs


def _logprobs_of(token: int, logits: Tensor, top: int) -> TokenLogprobs:
    logs = torch.log_softmax(logits.float(), -1).clamp_min(_LEAST_LOG)
    best = logs.topk(min(top, len(logs)))
    return TokenLogprobs(token, float(logs[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
