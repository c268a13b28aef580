"""Prompts that fit the model's context from documents of any length."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lookahead.errors import ConfigError, DocumentError
from lookahead.summarization.chunking import MeasuredText, Parts, cut, truncate
from lookahead.summarization.prompting import Prompting, SummaryRequest
from lookahead.summarization.segmentation import Break, Piece, split_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_DOCUMENT_TOKENS = 16
_NO_LIMIT = 10**9  # tokenizers without a limit state 10**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Approach:
    """How a document longer than a prompt is read: all parts, and then their summaries together, or in order."""

    overlap: int = 0  # tokens at the end of a part that the next part repeats
    refine: bool = False  # read parts in order, each with the summary so far; the model must follow instructions

    def __post_init__(self) -> None:
        if self.overlap < 0:
            raise ConfigError(f"overlap must be at least 0 tokens, got {self.overlap}")


@dataclass(frozen=True, slots=True)
class FittedDocument:
    """A document as prompts, one for each part."""

    parts: Parts
    prompts: list[str]

    @property
    def first(self) -> FittedDocument:
        """The first part alone."""
        return FittedDocument(replace(self.parts, parts=self.parts.parts[:1]), self.prompts[:1])


class PromptFitter:
    """Renders documents to prompts that leave room for a summary.

    The arguments are those of `Summarizer`. ConfigError if no document would fit, or the model cannot follow the
    request or the approach.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        request: SummaryRequest | None = None,
        approach: Approach | None = None,
    ) -> None:
        check_max_new_tokens(max_new_tokens)
        self.max_new_tokens, self.approach = max_new_tokens, approach or Approach()
        self._tokenizer = tokenizer
        self.prompting = Prompting(tokenizer, request, model)
        if self.approach.refine:
            self.prompting.check_refining()
        context, has_encoder = context_length(model, tokenizer), model.config.is_encoder_decoder
        # An encoder's context holds the document only; the summary goes to the decoder's.
        self._prompt_limit = context - (0 if has_encoder else max_new_tokens)
        self._document_limit = self._prompt_limit - self.prompting.count_tokens(self.prompting.render(""))
        self.partial_summary_limit = self._document_limit // 4  # tokens of a part's summary, so that the rounds end
        self._part_limit = self._document_limit  # of a document that does not fit as a whole
        if self.approach.refine:
            template_tokens = self.prompting.count_tokens(self.prompting.render("", ""))
            self._part_limit = self._prompt_limit - max_new_tokens - template_tokens
        missing = MIN_DOCUMENT_TOKENS - self._document_limit
        if missing > 0 and has_encoder:
            raise ConfigError(
                f"the model's encoder must read at least {context + missing} tokens, and it reads {context}"
            )
        if missing > 0:
            raise ConfigError(
                f"max_new_tokens must be at most {self.max_new_tokens - missing} to leave room for a document in the "
                f"model's context of {context} tokens, got {self.max_new_tokens}"
            )
        missing = MIN_DOCUMENT_TOKENS - self._part_limit
        if missing > 0:
            most = self.max_new_tokens + (-missing // 2)
            raise ConfigError(
                f"max_new_tokens must be at most {most} to leave room for the summary so far and a part beside it in "
                f"the model's context of {context} tokens, got {self.max_new_tokens}"
            )
        most = self._part_limit // 2
        if self.approach.overlap > most:
            raise ConfigError(
                f"overlap must be at most {most} tokens, half of what a prompt holds of a document, got "
                f"{self.approach.overlap}"
            )

    def fit(self, document: str) -> FittedDocument:
        """Cut a document, not blank, into parts whose prompts all fit; DocumentError if none would."""
        text = document.strip()
        before = len(document) - len(document.lstrip())
        measured = MeasuredText(split_pieces(text), self._tokenizer, self.prompting.clean, before)
        return self._fit(measured, self.approach)

    def fit_summaries(self, summaries: list[str]) -> FittedDocument:
        """Put as many summaries of parts, none blank, into each prompt as fit together.

        Each is first truncated to `partial_summary_limit`, since text can have more tokens than it was generated with.
        """
        limit = self.partial_summary_limit
        summaries = [truncate(summary, self._tokenizer, limit).strip() for summary in summaries]
        pieces = [Piece(f"{summary}\n\n", Break.PARAGRAPH) for summary in summaries[:-1]]
        pieces.append(Piece(summaries[-1], Break.PARAGRAPH))
        return self._fit(MeasuredText(pieces, self._tokenizer, self.prompting.clean), Approach())

    def refining_prompt(self, fitted: FittedDocument, number: int, summary: str) -> str:
        """The prompt for a part and as much of the summary of those before it, which may be empty, as fits."""
        if not summary:
            return fitted.prompts[number]
        text, keep = self.prompting.clean(summary), self.max_new_tokens
        while True:
            prompt = self.prompting.render(fitted.parts.texts[number], truncate(text, self._tokenizer, keep))
            excess = self.prompting.count_tokens(prompt) - self._prompt_limit
            if excess <= 0 or keep == 0:
                return prompt
            keep = max(0, keep - excess)

    def _fit(self, measured: MeasuredText, approach: Approach) -> FittedDocument:
        limit, room = self._document_limit, self._prompt_limit
        is_refined = False
        while True:
            if approach.refine and not is_refined and measured.tokens > limit:
                limit, room, is_refined = self._part_limit, room - self.max_new_tokens, True
            parts = cut(measured, limit, approach.overlap)
            fitted = FittedDocument(parts, [self.prompting.render(part) for part in parts.texts])
            longest = [self.prompting.render(part, "") for part in parts.texts] if is_refined else fitted.prompts
            # A part alone can have a few more tokens than within the document.
            excess = max(map(self.prompting.count_tokens, longest)) - room
            if excess <= 0:
                return fitted
            limit -= excess
            if limit <= approach.overlap:
                raise DocumentError(f"no part of the document fits a prompt of {self._prompt_limit} tokens")


def check_max_new_tokens(max_new_tokens: int) -> None:
    """Raise ConfigError unless `max_new_tokens` is at least 1."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")


def context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens of a prompt and its output together, or of an encoder's input; a billion if nothing states it."""
    text_config = model.config.get_text_config()
    names = ("max_encoder_position_embeddings", "max_position_embeddings")
    stated = (tokenizer.model_max_length, *(getattr(text_config, name, None) for name in names))
    return min((length for length in stated if isinstance(length, int) and 0 < length < _NO_LIMIT), default=_NO_LIMIT)
