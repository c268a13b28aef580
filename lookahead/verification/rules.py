"""How the rows of a call choose their tokens, exactly as in transformers' own sampling loop, and when they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import FloatTensor, LongTensor, Tensor
from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from lookahead.errors import LogitsError
from lookahead.kernels.topk import likeliest
from lookahead.model.known_code import CRITERIA, is_known
from lookahead.verification.acceptance import Acceptance
from lookahead.verification.per_row import ForcingProcessor, is_per_row


class TokenChooser:
    """Chooses one token per row and HuggingFace step from raw logits.

    Greedy decoding takes the argmax of the processed logits. Sampling makes the same draw as
    `torch.multinomial(probs, 1)`: `argmax(probs / noise)` with exponential noise of the shape of `probs`. The noise of
    HuggingFace step t is drawn once for the whole batch, when the first row reaches t. So rows that advance at
    different rates get the random numbers of `model.generate`.

    Attributes:
        logits: For every row float32 `[vocab]` per emitted token, before any processor; empty unless kept.
        scores: The same after the processors.
        forcing: For every row the processor that knows forced tokens; None without one.
        is_known: Whether all processors are of transformers, and call no function of a user's.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        *,
        do_sample: bool,
        batch_size: int,
        keep: bool = False,
        generator: torch.Generator | None = None,  # of the noise; None for torch's global one
    ) -> None:
        own = {i: processor.objects(batch_size) for i, processor in enumerate(processors) if is_per_row(processor)}
        self._processors = [LogitsProcessorList() for _ in range(batch_size)]
        if processors:
            self._processors = [_for_row(processors, own, row, batch_size) for row in range(batch_size)]
        self.forcing = [
            next((processor for processor in own if isinstance(processor, ForcingProcessor)), None)
            for own in self._processors
        ]
        self.is_known = all(
            type(processor) in _ROW_WISE and is_known(type(processor).__call__) for processor in processors
        )
        self._do_sample = do_sample
        self._keep = keep
        self.logits: list[list[Tensor]] = [[] for _ in range(batch_size)]
        self.scores: list[list[Tensor]] = [[] for _ in range(batch_size)]
        self._batch_size = batch_size
        # Whether every choice is the argmax of the raw logits and no scores are kept.
        self.is_plain_greedy = not do_sample and not keep and not processors
        self._noise: deque[Tensor] = deque()
        self._generator = generator
        self._first_step = 0

    def choose(self, prefix: Tensor, logits: Tensor, *, row: int, step: int) -> int:
        """Choose a token from raw logits `[vocab]`; call it once per emitted token, in order.

        `prefix`, int64 `[1, tokens]`, are the ids of `model.generate` before the token, padding included. The row has
        emitted `step` tokens before it.

        Raises:
            LogitsError: Logits of the model are NaN, or processors leave no probabilities to sample from: NaN,
                infinity, or minus infinity for all tokens. Greedy decoding then takes the result of `torch.argmax`.
        """
        scores = self._process(prefix, logits, row, keep=self._keep)
        if self._do_sample:
            probs = torch.softmax(scores, -1)
            scores = probs / self._noise_of(step, probs)[row]
        token = int(likeliest(scores))
        if token < 0:
            if self._do_sample or logits.isnan().any():
                raise not_a_number(row, step)
            token = int(scores.argmax())  # a processor wrote NaN, which transformers treats as the highest score
        return token

    def chances(self, prefix: Tensor, logits: Tensor, *, row: int, step: int, is_tentative: bool = False) -> Tensor:
        """The probabilities `[vocab]` that `choose` would draw from.

        Args:
            prefix: As in `choose`.
            logits: As in `choose`.
            row: The row of the batch.
            step: Tokens that the row has emitted.
            is_tentative: Whether tokens of the prefix may not be emitted; then no scores are kept.

        Raises:
            LogitsError: The scores are not numbers.
        """
        chances = torch.softmax(self._process(prefix, logits, row, keep=self._keep and not is_tentative)[0], -1)
        if int(likeliest(chances)) < 0:
            raise not_a_number(row, step)
        return chances

    def _process(self, prefix: Tensor, logits: Tensor, row: int, *, keep: bool) -> Tensor:
        """Scores after the row's processors, `[1, vocab]`."""
        ids, raw = cast(LongTensor, prefix), cast(FloatTensor, logits[None].to(torch.float32, copy=True))
        scores: Tensor = self._processors[row](ids, raw)
        if keep:
            self.logits[row].append(raw[0])  # a processor that writes in place changes them too, as in transformers
            self.scores[row].append(scores[0])
        return scores

    def forget_before(self, step: int) -> None:
        """Drop the noise of earlier steps; every running row has emitted at least `step` tokens."""
        while self._noise and self._first_step < step:
            self._noise.popleft()
            self._first_step += 1

    def _noise_of(self, step: int, probs: Tensor) -> Tensor:
        """Noise `[batch, vocab]` of a HuggingFace step, drawn in step order."""
        while self._first_step + len(self._noise) <= step:
            noise = probs.new_empty(self._batch_size, probs.shape[-1])
            self._noise.append(noise.exponential_(generator=self._generator))
        return self._noise[step - self._first_step]


# Processors that read only scores, so they apply to drafts too.
_WARPERS = (
    *(hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper),
    *(hf.TypicalLogitsWarper, hf.EpsilonLogitsWarper, hf.EtaLogitsWarper),
)


def warp_of(processors: LogitsProcessorList) -> Callable[[Tensor], Tensor]:
    """One function for the processors that read only scores, `[n, vocab]`; the others are skipped."""
    warpers = LogitsProcessorList(
        processor for processor in processors if type(processor) in _WARPERS
    )  # a subclass may have a state
    return lambda scores: warpers(cast(Any, scores.new_zeros(len(scores), 0, dtype=torch.long)), cast(Any, scores))


def not_a_number(row: int, step: int) -> LogitsError:
    """The error for scores that are not numbers."""
    return LogitsError(f"the scores of new token {step + 1} of row {row} are not a number; no token can be chosen")


# Processors that treat every row separately and have no state. A subclass may differ.
_ROW_WISE = frozenset(
    {
        *_WARPERS,
        *(hf.TopHLogitsWarper, hf.LogitNormalization, hf.InfNanRemoveLogitsProcessor, hf.ExponentialDecayLengthPenalty),
        *(hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor, hf.NoRepeatNGramLogitsProcessor),
        *(hf.RepetitionPenaltyLogitsProcessor, hf.SequenceBiasLogitsProcessor, hf.NoBadWordsLogitsProcessor),
        *(hf.EncoderRepetitionPenaltyLogitsProcessor, hf.EncoderNoRepeatNGramLogitsProcessor),
        *(hf.ForcedBOSTokenLogitsProcessor, hf.ForcedEOSTokenLogitsProcessor, hf.WatermarkLogitsProcessor),
        *(hf.SuppressTokensLogitsProcessor, hf.SuppressTokensAtBeginLogitsProcessor),
        hf.WhisperTimeStampLogitsProcessor,
    }
)


def foreign_processor(processors: LogitsProcessorList, config: GenerationConfig, *, is_tentative: bool = False) -> str:
    """The name of the first processor that may have a state or read several rows, or an empty string.

    It must be called as by `model.generate`: with the whole batch, once per step. If processors are called for tokens
    that may not be emitted (`is_tentative`), a processor with a state per row is foreign too.
    """
    for place, processor in enumerate(processors):
        kind = type(processor)
        is_last = not any(type(processor) is kind for processor in processors[place + 1 :])
        is_ours = kind is hf.SynthIDTextWatermarkLogitsProcessor and config.watermarking_config is not None and is_last
        if is_ours and not is_tentative:
            continue  # its state is per row and per call, and every row gets its own copy
        if kind is hf.WhisperNoSpeechDetection and is_known(kind.__call__) and processor.start_of_trans_offset > 1:
            continue  # it runs the model on all rows, once, and reads no scores
        if is_per_row(processor) and not is_tentative:
            continue  # every row gets its own object
        if kind is hf.PrefixConstrainedLogitsProcessor:
            return "prefix_allowed_tokens_fn"
        if kind not in _ROW_WISE or not is_known(kind.__call__):
            return str(getattr(processor, "__qualname__", kind.__qualname__))  # it may be a function
    return ""


# Attributes that hold a value for every prompt of a batch.
_OF_PROMPTS = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")


def _for_row(
    processors: LogitsProcessorList, own_objects: Mapping[int, Sequence[Any]], row: int, batch_size: int
) -> LogitsProcessorList:
    """Processors for one row of a batch, called only with that row; none of them is foreign.

    Rows advance at different rates, so they never form a batch of one length. A `PerRow` is replaced by its object for
    the row; `own_objects` holds these objects by the index of their `PerRow`.
    """
    mine = LogitsProcessorList()
    for at, processor in enumerate(processors):
        if at in own_objects:
            mine.append(own_objects[at][row])
            continue
        if batch_size == 1:
            mine.append(processor)
            continue
        if isinstance(processor, hf.WhisperNoSpeechDetection):
            if row == 0:
                mine.append(processor)  # at its first token it runs the model on all rows, and keeps the result
            continue
        own: Any = copy(processor)  # a watermark has a state
        for name in _OF_PROMPTS:
            values = getattr(own, name, None)
            if isinstance(values, Tensor | list):
                place = row * len(values) // batch_size  # several rows may continue one prompt
                setattr(own, name, values[place : place + 1])
        if isinstance(own, hf.EncoderNoRepeatNGramLogitsProcessor):
            own.batch_size = 1
        mine.append(own)
    return mine


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
