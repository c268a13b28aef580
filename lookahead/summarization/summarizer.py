"""One document to one summary, however long it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from lookahead.documents.decode_text import Document, Reject, check_words
from lookahead.errors import LookaheadError
from lookahead.summarization.baseline import ComparingDecoder
from lookahead.summarization.greedy import Decoder, LookaheadDecoder, total_in_sequence
from lookahead.summarization.pipeline import Course, start_course
from lookahead.summarization.prompt_fitter import Approach, PromptFitter
from lookahead.summarization.prompting import SummaryRequest
from lookahead.summarization.summary import Summarized, Summary

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.config import LookaheadConfig
    from lookahead.generation.scheduler import Scheduler
    from lookahead.models.target import OnPrefill

__all__ = ["Summarized", "Summarizer", "Summary"]

ROWS_TOGETHER = 8


class Summarizer:
    """Summarizes documents with one model.

    Attributes:
        exact: Whether the model computes in fp32, where plain decoding must give the very same tokens.
        fitter: What cuts documents and renders prompts.

    Args:
        model: Any causal language model.
        tokenizer: Its tokenizer.
        max_new_tokens: Most tokens of a summary.
        config: How drafts are made; `None` for the defaults.
        compare: Whether every document is decoded plainly too.
        request: What the model is asked for; `None` for a summary in two sentences.
        approach: How a document longer than a prompt is read; `None` for its parts side by side, without overlap.
        keep_parts: Whether summaries tell those of the parts they were made of.

    Raises:
        ConfigError: `max_new_tokens` is less than 1, or leaves no room for a document, or the model does not
            understand the request, or the approach is not for it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 200,
        config: LookaheadConfig | None = None,
        compare: bool = False,
        request: SummaryRequest | None = None,
        approach: Approach | None = None,
        keep_parts: bool = False,
    ) -> None:
        self.exact = str(model.dtype) == "torch.float32"
        self.fitter = PromptFitter(model, tokenizer, max_new_tokens, request, approach)
        self._begin = partial(start_course, fitter=self.fitter, keep_parts=keep_parts)
        decoder = LookaheadDecoder(model, tokenizer, config=config, add_special_tokens=self.fitter.add_special_tokens)
        self._lookahead = decoder
        self._comparing = ComparingDecoder(decoder) if compare else None
        self._decoder: Decoder = self._comparing or decoder

    def summarize(self, text: str) -> Summary:
        """Summarize one document: its parts where it is long, and what comes of them.

        Raises:
            DocumentError: The text holds no letter or digit, or the model wrote nothing about it.
        """
        check_words(text)
        if self._comparing:
            self._comparing.take_figures()  # of a document that failed half way
        course = self._begin(text)
        while course.summary is None:
            self._decode_round(course)
        return replace(course.summary.check(), plain=self._comparing.take_figures() if self._comparing else None)

    def summarize_all(
        self, documents: Iterable[Document | None], rows: int | None = None
    ) -> Iterator[Summarized | Reject]:
        """Summarize many documents, the prompts of several at a time decoded together, each done as it comes.

        A document is taken when there is a row for it, so memory does not grow with their number; a document that
        cannot be summarized is rejected alone. The summaries are those of `summarize`, and the parts of a long document
        are decoded beside each other. With `compare` it is one document after the other.

        Args:
            documents: The documents; they may come from a stream, and None where it has no more yet: only while
                some that it gave are not done.
            rows: Prompts that are decoded together, 1 to 1024; None decides.

        Raises:
            ConfigError: `rows` is out of range.
        """
        from lookahead.summarization.batch_summarizer import BatchSummarizer

        if self._comparing:
            return (self.summarize_or_reject(document) for document in documents if document is not None)
        together = BatchSummarizer(partial(self._open_rows, rows), self._begin, self.summarize_or_reject)
        return together.run(documents)

    def rows_together(self, rows: int | None = None) -> int:
        """How many prompts `summarize_all` decodes together where it is given `rows`.

        Raises:
            ConfigError: `rows` is out of range.
        """
        return 1 if self._comparing else self._open_rows(rows).rows

    def summarize_or_reject(self, document: Document) -> Summarized | Reject:
        """Summarize one document, or say why not."""
        try:
            return Summarized(document, self.summarize(document.text))
        except LookaheadError as error:
            return Reject(document.id, f"{document.id}: {error}", document)
        except Exception as error:
            # Whatever one document meets (out of memory, a tokenizer's panic), the others still get their turn.
            message = " ".join(str(error).split())
            return Reject(document.id, f"{document.id}: {type(error).__name__}: {message}", document)

    def report_prefill(self, on_prefill: OnPrefill | None) -> None:
        """Let it be called as prompts are read, with the tokens that are read of one and those it has."""
        self._lookahead.on_prefill = on_prefill

    def warm_up(self) -> None:
        """Decode a few tokens, so that compiling is not charged to the first document."""
        prompts = self.fitter.fit("One, two, three. One, two, three.").prompts
        self._lookahead.warm_up(prompts[0])
        self._decoder.decode(prompts, 8)
        if self._comparing:
            self._comparing.take_figures()

    def _open_rows(self, rows: int | None) -> Scheduler:
        """Rows for prompts that are decoded together."""
        from lookahead.generation.scheduler import Scheduler

        decoder = self._lookahead
        scheduler = Scheduler(
            decoder.model,
            decoder.tokenizer,
            rows=rows,
            config=decoder.config,
            add_special_tokens=decoder.add_special_tokens,
            do_sample=False,
        )
        scheduler.on_prefill = decoder.on_prefill
        return scheduler

    def _decode_round(self, course: Course) -> None:
        """Decode the prompts of a round, as many together as the cache has room for."""
        from lookahead.generation.scheduler import cache_tokens_of

        longest = max(map(self.fitter.count_tokens, course.prompts)) + course.limit
        room = cache_tokens_of(self._lookahead.model, ROWS_TOGETHER) // longest
        together = max(1, min(ROWS_TOGETHER, room))
        done = [
            self._decoder.decode(course.prompts[start : start + together], course.limit)
            for start in range(0, len(course.prompts), together)
        ]
        texts = [text for decoded in done for text in decoded.texts]
        course.take(texts, total_in_sequence(decoded.stats for decoded in done), done[-1].finish_reasons[-1])
