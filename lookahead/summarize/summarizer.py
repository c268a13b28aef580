"""One document to one summary, however long it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lookahead.errors import DocumentError, LookaheadError
from lookahead.files.text import Document, Reject
from lookahead.summarize.comparison import ComparingDecoder, PlainFigures
from lookahead.summarize.decoding import Decoder, LookaheadDecoder, total_in_sequence
from lookahead.summarize.fitting import PromptFitter
from lookahead.summarize.parts import Split
from lookahead.summarize.prompting import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lookahead.batching import Batching
    from lookahead.config import LookaheadConfig
    from lookahead.stats import DecodingStats

ROWS_TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one document.

    Attributes:
        text: The summary.
        document_tokens: Tokens of the document.
        summary_tokens: Tokens of the summary, an end-of-sequence token included.
        parts: How many parts the document was cut into; 1 where it fitted.
        split: `"none"`, `"sentences"`, or `"hard"` where a stretch had no sentence or line end to cut at.
        stats: What decoding did, the summaries of the parts included.
        plain: What plain decoding did for the same prompts, where it was asked for.
    """

    text: str
    document_tokens: int
    summary_tokens: int
    parts: int
    split: Split
    stats: DecodingStats
    plain: PlainFigures | None = None

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-ready dict."""
        record: dict[str, Any] = {
            "summary": self.text,
            "document_tokens": self.document_tokens,
            "summary_tokens": self.summary_tokens,
            "parts": self.parts,
            "split": self.split,
            "stats": self.stats.to_dict(),
        }
        if self.plain is not None:
            speedup = self.plain.speedup(self.stats)
            record["plain"] = self.plain.to_dict()
            record["speedup"] = None if speedup is None else round(speedup, 3)
            record["identical"] = self.plain.identical
        return record


@dataclass(frozen=True, slots=True)
class Summarized:
    """A document and its summary."""

    document: Document
    summary: Summary


class Summarizer:
    """Summarizes documents with one model.

    Attributes:
        exact: Whether the model computes in fp32, where plain decoding must give the very same tokens.

    Args:
        model: Any causal language model.
        tokenizer: Its tokenizer.
        max_new_tokens: Most tokens of a summary.
        config: How drafts are made; `None` for the defaults.
        compare: Whether every document is decoded plainly too.
        request: What the model is asked for; `None` for a summary in a few sentences.

    Raises:
        ConfigError: `max_new_tokens` is less than 1, or leaves no room for a document, or the model does not
            understand the request.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 128,
        config: LookaheadConfig | None = None,
        compare: bool = False,
        request: Request | None = None,
    ) -> None:
        self.exact = str(model.dtype) == "torch.float32"
        self._max_new_tokens = max_new_tokens
        self._fitter = PromptFitter(model, tokenizer, max_new_tokens, request)
        decoder = LookaheadDecoder(model, tokenizer, config=config, add_special_tokens=self._fitter.add_special_tokens)
        self._lookahead = decoder
        self._comparing = ComparingDecoder(decoder) if compare else None
        self._decoder: Decoder = self._comparing or decoder

    def summarize(self, text: str) -> Summary:
        """Summarize one document: its parts where it is long, then what came of them, until all is one prompt.

        Raises:
            DocumentError: The text is empty.
        """
        if not text.strip():
            raise DocumentError("the document is empty")
        if self._comparing:
            self._comparing.take_figures()  # of a document that failed half way
        calls: list[DecodingStats] = []
        document = fitted = self._fitter.fit(text)
        while len(fitted.prompts) > 1:
            joined = self._fitter.join(self._summarize_parts(fitted.prompts, calls))
            # A model with nothing to say of any part may still have something to say of the first.
            fitted = self._fitter.fit(joined or document.parts.texts[0])
        decoded = self._decoder.decode(fitted.prompts, self._max_new_tokens)
        calls.append(decoded.stats)
        return Summary(
            text=decoded.texts[0].strip(),
            document_tokens=document.parts.tokens,
            summary_tokens=decoded.stats.emitted_tokens,
            parts=len(document.parts.texts),
            split=document.parts.split,
            stats=total_in_sequence(calls),
            plain=self._comparing.take_figures() if self._comparing else None,
        )

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
        from lookahead.summarize.together import Together

        if self._comparing:
            return (self.summarize_or_reject(document) for document in documents if document is not None)
        together = Together(
            partial(self._open_rows, rows), self._fitter, self._max_new_tokens, self.summarize_or_reject
        )
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

    def warm_up(self) -> None:
        """Decode a few tokens, so that compiling is not charged to the first document."""
        prompts = self._fitter.fit("One, two, three. One, two, three.").prompts
        self._lookahead.warm_up(prompts[0])
        self._decoder.decode(prompts, 8)
        if self._comparing:
            self._comparing.take_figures()

    def _open_rows(self, rows: int | None) -> Batching:
        """Rows for prompts that are decoded together."""
        from lookahead.batching import Batching

        decoder = self._lookahead
        return Batching(
            decoder.model,
            decoder.tokenizer,
            rows=rows,
            config=decoder.config,
            add_special_tokens=decoder.add_special_tokens,
            do_sample=False,
        )

    def _summarize_parts(self, prompts: list[str], calls: list[DecodingStats]) -> list[str]:
        """Summarize the parts of a document, several together; the stats of each call are added to `calls`."""
        limit = self._fitter.partial_summary_limit or self._max_new_tokens
        summaries: list[str] = []
        for start in range(0, len(prompts), ROWS_TOGETHER):
            rows = prompts[start : start + ROWS_TOGETHER]
            decoded = self._decoder.decode(rows, min(self._max_new_tokens, limit))
            calls.append(decoded.stats)
            summaries += decoded.texts
        return summaries
