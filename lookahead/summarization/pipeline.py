"""From the parts of a document to one summary, in rounds of prompts that the caller decodes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookahead.documents.decode_text import Document
from lookahead.errors import DocumentError
from lookahead.stats import DecodingStats, total_in_sequence
from lookahead.summarization.chunking import Parts, Split
from lookahead.summarization.prompting import PromptFitter
from lookahead.verification.rules import FinishReason


@dataclass(frozen=True, slots=True)
class PlainFigures:
    """Counters of plain decoding, whether lookahead decoding gave the same tokens, and whether an output loops."""

    stats: DecodingStats = field(default_factory=DecodingStats)  # without drafts
    identical: bool = True
    loops: bool = False  # loops are easy to draft

    def speedup(self, stats: DecodingStats) -> float | None:
        """Tokens per second relative to plain decoding; `None` if plain decoding was not measured."""
        return stats.tokens_per_s / self.stats.tokens_per_s if self.stats.tokens_per_s else None

    def __add__(self, other: PlainFigures) -> PlainFigures:
        """The figures of prompts decoded one after the other."""
        stats = total_in_sequence([self.stats, other.stats])
        return PlainFigures(stats, self.identical and other.identical, self.loops or other.loops)

    def to_dict(self) -> dict[str, Any]:
        """Tokens, seconds and the rate as a JSON-ready dict."""
        figures = self.stats.to_dict()
        return {name: figures[name] for name in ("emitted_tokens", "prefill_s", "decode_s", "tokens_per_s")}


@dataclass(frozen=True, slots=True)
class Summary:
    """The summary of one document.

    Attributes:
        text: The summary.
        document_tokens: Tokens of the document.
        summary_tokens: Tokens of the summary, including an end-of-sequence token.
        parts: The number of parts of the document, 1 if it fitted.
        split: Where it was cut, see `Parts`.
        stats: Counters of all decoding, including the summaries of the parts.
        plain: Figures of plain decoding for the same prompts, if requested.
        finish_reason: `"length"` if the token limit cut the summary off, else `"stop"`.
        loops: Whether the summary, or the summary of a part, repeats one phrase to its end, by
            `lookahead.decoding.loops.loops`.
    """

    text: str
    document_tokens: int
    summary_tokens: int
    parts: int
    split: Split
    stats: DecodingStats
    plain: PlainFigures | None = None
    finish_reason: FinishReason = "stop"
    loops: bool = False

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-ready dict. The keys are fields of a line of results."""
        names = ("document_tokens", "summary_tokens", "parts", "split", "finish_reason", "loops")
        record = {"summary": self.text, **{name: getattr(self, name) for name in names}, "stats": self.stats.to_dict()}
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


# The text of each prompt of a round, the counters of all, and why the last one ended.
_Output = tuple[list[str], DecodingStats, FinishReason]
# Yields the prompts of a round and the token limit of each, receives their output, and returns the final output.
_Rounds = Generator[tuple[list[str], int], _Output, _Output]


class SummaryPipeline:
    """Summarizes one document in rounds of prompts. The prompts of a round may be decoded together.

    While `summary` is `None`, `prompts` holds the prompts of the current round, each with at most `limit` new tokens.

    Raises:
        DocumentError: No part of the document fits a prompt, or the summary is empty.
    """

    def __init__(self, text: str, fitter: PromptFitter) -> None:
        self.summary: Summary | None = None
        self._document = fitter.fit(text)
        self._stats: list[DecodingStats] = []
        self._loops = False
        self._parts_done = 0
        self._rounds = (_refine if fitter.request.refine else _merge)(self._document, fitter)
        self.prompts, self.limit = next(self._rounds)

    def expected(self, prediction: str | None) -> str | None:
        """The prediction for the output of this round; `None` if the round has several prompts."""
        return prediction if len(self.prompts) == 1 else None  # several prompts: summaries of parts

    def progress(self, outputs: int) -> tuple[int, int]:
        """The parts that are summarized, with the number of finished outputs of the round, and all parts."""
        return min(self._parts_done + outputs, len(self._document.parts)), len(self._document.parts)

    def take(
        self, texts: Sequence[str], stats: DecodingStats, finish_reason: FinishReason = "stop", *, loops: bool = False
    ) -> None:
        """End the round with the text of each prompt, the counters of all, and why the last one ended."""
        self._stats.append(stats)
        self._loops |= loops
        self._parts_done += len(texts)
        try:
            self.prompts, self.limit = self._rounds.send(([text.strip() for text in texts], stats, finish_reason))
        except StopIteration as end:
            self.prompts, document = [], self._document
            (text,), last, finish_reason = end.value
            self.summary = Summary(
                text=text,
                document_tokens=document.tokens,
                summary_tokens=last.emitted_tokens,
                parts=len(document.parts),
                split=document.split,
                stats=total_in_sequence(self._stats),
                finish_reason=finish_reason,
                loops=self._loops,
            )
            if not text:
                raise DocumentError(f"the model wrote no summary of the document's {document.tokens} tokens") from None


def _merge(document: Parts, fitter: PromptFitter) -> _Rounds:
    """Summarize all parts, then their summaries together, until one prompt holds them all."""
    most, parts = fitter.max_new_tokens, document.parts
    while True:
        # The summaries of parts must be shorter than the parts.
        limit = most if len(parts) == 1 else min(most, fitter.partial_summary_limit)
        texts, *_ = output = yield fitter.prompts(parts), limit
        if len(texts) == 1:
            return output
        written = [text for text in texts if text]
        # If no part had a summary, a higher token limit may give one.
        parts = fitter.fit_summaries(written).parts if written else document.parts[:1]
        if len(parts) >= len(texts):  # no fewer than before: drop the rest, so that the rounds end
            parts = parts[:1]


def _refine(document: Parts, fitter: PromptFitter) -> _Rounds:
    """Summarize the first part, then each later part together with the summary so far."""
    summary = ""
    output: _Output = [""], DecodingStats(), "stop"
    for part in document.parts:
        (text,), *_ = new = yield [fitter.refining_prompt(part, summary)], fitter.max_new_tokens
        if text or not summary:  # an empty answer leaves the summary as it is
            summary, output = text, new
    return output
