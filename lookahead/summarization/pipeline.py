"""From the parts of a document to one summary, in rounds of prompts that the caller decodes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lookahead.documents.decode_text import Document
from lookahead.errors import DocumentError
from lookahead.stats import DecodingStats, total_in_sequence
from lookahead.summarization.chunking import Parts, Split
from lookahead.summarization.prompting import PromptFitter
from lookahead.verification.stopping import FinishReason


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
class PartSummary:
    """The summary of a part of a document. Spans are half-open.

    Attributes:
        chars: The span in characters of the document.
        tokens: The span in tokens of the document.
        summary: The summary of the part; with refining, of the document up to the end of the part.
        children: The span of summaries on the level below; `None` if it summarizes the document itself.
    """

    chars: tuple[int, int]
    tokens: tuple[int, int]
    summary: str
    children: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-ready dict."""
        spans = {"chars": self.chars, "tokens": self.tokens, "children": self.children}
        return {**{name: list(span) for name, span in spans.items() if span is not None}, "summary": self.summary}


Levels = tuple[tuple[PartSummary, ...], ...]  # the summaries of the parts, the summaries of these, and so on


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
        tree: The summaries of the parts, level by level, if requested.
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
    tree: Levels | None = None
    finish_reason: FinishReason = "stop"
    loops: bool = False

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-ready dict. The keys are fields of a line of results."""
        names = ("document_tokens", "summary_tokens", "parts", "split", "finish_reason", "loops")
        record = {"summary": self.text, **{name: getattr(self, name) for name in names}, "stats": self.stats.to_dict()}
        if self.tree is not None:
            record["tree"] = [[part.to_dict() for part in level] for level in self.tree]
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


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a document that is being summarized.

    Attributes:
        parts: The number of parts.
        parts_done: Parts that are summarized.
    """

    parts: int
    parts_done: int


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

    def __init__(self, text: str, fitter: PromptFitter, *, keep_parts: bool) -> None:
        self.summary: Summary | None = None
        self._document, self._keep_parts = fitter.fit(text), keep_parts
        self._stats: list[DecodingStats] = []
        self._loops = False
        self._parts_done = 0
        self._levels: list[tuple[PartSummary, ...]] = []
        self._refines = fitter.request.refine
        rounds = _refine if self._refines else _merge
        self._rounds = rounds(self._document, fitter, self._levels)
        self.prompts, self.limit = next(self._rounds)

    def expected(self, prediction: str | None) -> str | None:
        """The prediction for the output of this round; `None` if the round has several prompts."""
        return prediction if len(self.prompts) == 1 else None  # several prompts: summaries of parts

    def progress(self, outputs: int) -> Progress:
        """The progress of the document, with the number of finished outputs of the round."""
        parts = len(self._document.parts)
        return Progress(parts, min(self._parts_done + outputs, parts))

    def take(
        self, texts: Sequence[str], stats: DecodingStats, finish_reason: FinishReason = "stop", *, loops: bool = False
    ) -> None:
        """End the round with the outputs of its prompts.

        Args:
            texts: The new text of each prompt.
            stats: The counters of all prompts.
            finish_reason: Why the output of the last prompt ended.
            loops: Whether any output loops.
        """
        self._stats.append(stats)
        self._loops |= loops
        self._parts_done = min(self._parts_done + len(texts), len(self._document.parts))
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
                tree=tuple(self._levels) if self._keep_parts else None,
                finish_reason=finish_reason,
                loops=self._loops,
            )
            if not text:
                raise DocumentError(f"the model wrote no summary of the document's {document.tokens} tokens") from None


def _merge(document: Parts, fitter: PromptFitter, levels: list[tuple[PartSummary, ...]]) -> _Rounds:
    """Summarize all parts, then their summaries together, until one prompt holds them all."""
    most = fitter.max_new_tokens
    leaves = [PartSummary(part.chars, part.tokens, "") for part in document.parts]
    parts, nodes = document.parts, leaves
    while True:
        # The summaries of parts must be shorter than the parts.
        limit = most if len(nodes) == 1 else min(most, fitter.partial_summary_limit)
        texts, *_ = output = yield fitter.prompts(parts), limit
        level = tuple(replace(node, summary=text) for node, text in zip(nodes, texts, strict=True))
        levels.append(level)
        if len(level) == 1:
            return output
        written = [number for number, text in enumerate(texts) if text]
        if not written:
            parts, nodes = document.parts[:1], leaves[:1]  # a higher token limit may give a summary
            continue
        parts = fitter.fit_summaries([texts[number] for number in written]).parts
        nodes, begin = [], 0
        for end in [*(written[part.pieces[1] - 1] + 1 for part in parts[:-1]), len(level)]:
            begin = min(begin, end - 1)
            first, last = level[begin], level[end - 1]
            spans = (first.chars[0], last.chars[1]), (first.tokens[0], last.tokens[1])
            nodes.append(PartSummary(*spans, "", (begin, end)))
            begin = end
        if len(nodes) >= len(level):  # the level did not shrink: drop the rest, so that the rounds end
            parts, nodes = parts[:1], nodes[:1]


def _refine(document: Parts, fitter: PromptFitter, levels: list[tuple[PartSummary, ...]]) -> _Rounds:
    """Summarize the first part, then each later part together with the summary so far."""
    summary, steps = "", []
    output: _Output = [""], DecodingStats(), "stop"
    for part in document.parts:
        (text,), *_ = new = yield [fitter.refining_prompt(part, summary)], fitter.max_new_tokens
        if text or not summary:  # an empty answer leaves the summary as it is
            summary, output = text, new
        steps.append(PartSummary(part.chars, part.tokens, summary))
    levels.append(tuple(steps))
    return output
