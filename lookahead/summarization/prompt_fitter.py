"""Prompts that fit the model's context from documents of any length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lookahead.errors import ConfigError, DocumentError
from lookahead.summarization.chunking import MeasuredText, Part, Parts, cut, truncate
from lookahead.summarization.prompting import Prompting, SummaryRequest
from lookahead.summarization.segmentation import Break, Piece, split_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MIN_DOCUMENT_TOKENS = 16
_NO_LIMIT = 10**9  # tokenizers without a limit state 10**30


class PromptFitter:
    """Renders documents to prompts that leave room for a summary.

    The arguments are those of `Summarizer`. ConfigError if no document would fit, or the model cannot follow the
    request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        request: SummaryRequest | None = None,
    ) -> None:
        check_max_new_tokens(max_new_tokens)
        self.max_new_tokens, self.request = max_new_tokens, request or SummaryRequest()
        self._tokenizer = tokenizer
        self.prompting = Prompting(tokenizer, self.request, model)
        context, has_encoder = context_length(model, tokenizer), model.config.is_encoder_decoder
        # An encoder's context holds the document only; the summary goes to the decoder's.
        self._prompt_limit = context - (0 if has_encoder else max_new_tokens)
        self._document_limit = self._prompt_limit - self.prompting.count_tokens(self.prompting.render(""))
        self.partial_summary_limit = self._document_limit // 4  # tokens of a part's summary, so that the rounds end
        self._part_limit = self._document_limit  # of a document that does not fit as a whole
        if self.request.refine:
            template_tokens = self.prompting.count_tokens(self.prompting.render("", ""))
            self._part_limit = self._prompt_limit - max_new_tokens - template_tokens
        missing = MIN_DOCUMENT_TOKENS - self._document_limit
        if missing > 0 and has_encoder:
            raise ConfigError(
                f"the model's encoder must read at least {context + missing} tokens, and it reads {context}"
            )
        # Refining takes the room of a summary twice: for the summary so far, and for the new one.
        beside = "the summary so far and a part beside it"
        for limit, what, times in ((self._document_limit, "a document", 1), (self._part_limit, beside, 2)):
            if limit < MIN_DOCUMENT_TOKENS:
                raise ConfigError(
                    f"max_new_tokens must be at most {max_new_tokens + (limit - MIN_DOCUMENT_TOKENS) // times} to "
                    f"leave room for {what} in the model's context of {context} tokens, got {max_new_tokens}"
                )
        if self.request.overlap > (most := self._part_limit // 2):
            raise ConfigError(
                f"overlap must be at most {most} tokens, half of what a prompt holds of a document, got "
                f"{self.request.overlap}"
            )

    def fit(self, document: str) -> Parts:
        """Cut a document, not blank, into parts whose prompts all fit; DocumentError if none would."""
        text = document.strip()
        before = len(document) - len(document.lstrip())
        measured = MeasuredText(split_pieces(text), self._tokenizer, self.prompting.clean, before)
        return self._fit(measured, overlap=self.request.overlap, refine=self.request.refine)

    def prompts(self, parts: Sequence[Part]) -> list[str]:
        """The prompt for each part."""
        return [self.prompting.render(part.text) for part in parts]

    def fit_summaries(self, summaries: list[str]) -> Parts:
        """Put as many summaries of parts, none blank, into each prompt as fit together.

        Each is first truncated to `partial_summary_limit`, since text can have more tokens than it was generated with.
        """
        limit = self.partial_summary_limit
        summaries = [truncate(summary, self._tokenizer, limit).strip() for summary in summaries]
        pieces = [Piece(f"{summary}\n\n", Break.PARAGRAPH) for summary in summaries[:-1]]
        pieces.append(Piece(summaries[-1], Break.PARAGRAPH))
        return self._fit(MeasuredText(pieces, self._tokenizer, self.prompting.clean))

    def refining_prompt(self, part: Part, summary: str) -> str:
        """The prompt for a part and as much of the summary of those before it, which may be empty, as fits."""
        if not summary:
            return self.prompting.render(part.text)
        text, keep = self.prompting.clean(summary), self.max_new_tokens
        while True:
            prompt = self.prompting.render(part.text, truncate(text, self._tokenizer, keep))
            excess = self.prompting.count_tokens(prompt) - self._prompt_limit
            if excess <= 0 or keep == 0:
                return prompt
            keep = max(0, keep - excess)

    def _fit(self, measured: MeasuredText, *, overlap: int = 0, refine: bool = False) -> Parts:
        limit, room, summary = self._document_limit, self._prompt_limit, None
        while True:
            if refine and summary is None and measured.tokens > limit:
                limit, room, summary = self._part_limit, room - self.max_new_tokens, ""
            parts = cut(measured, limit, overlap)
            prompts = (self.prompting.render(text, summary) for text in parts.texts)
            # A part alone can have a few more tokens than within the document.
            excess = max(map(self.prompting.count_tokens, prompts)) - room
            if excess <= 0:
                return parts
            limit -= excess
            if limit <= overlap:
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
