"""Cutting a long document into parts that fit a model's context."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from lookahead.summarization.sections import Break
from lookahead.summarization.token_offsets import MeasuredText

Split = Literal["none", "sections", "sentences", "hard"]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a document.

    Attributes:
        text: What it says, whitespace at its ends left out; never empty.
        chars: Where it stands in the document as it was given: its first character, and the one behind its last.
        tokens: Likewise in tokens of the document.
        pieces: Likewise in the pieces that the document was made of.
    """

    text: str
    chars: tuple[int, int]
    tokens: tuple[int, int]
    pieces: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Parts:
    """A document, cut.

    Attributes:
        parts: The parts in order.
        tokens: Tokens of the whole document.
        split: `"none"` where the document fits as it is, `"sections"` where it was cut between sections or
            paragraphs, `"sentences"` where somewhere between sentences or lines, `"hard"` where some stretch had no
            such place and was cut between words or tokens.
    """

    parts: tuple[Part, ...]
    tokens: int
    split: Split

    @property
    def texts(self) -> tuple[str, ...]:
        """What the parts say."""
        return tuple(part.text for part in self.parts)


# From where on a part may end, in quarters of its usual length, and what must end with it; the first that is found.
_CHOICES = (
    (3, Break.SENTENCE),
    (1, Break.SENTENCE),
    (3, Break.LINE),
    (0, Break.LINE),
    (0, Break.NOTHING),
)


class _Span(NamedTuple):
    """A stretch that is not cut any more, in characters."""

    begin: int
    end: int
    closing: Break


def cut(measured: MeasuredText, budget: int | None, overlap: int = 0) -> Parts:
    """Cut a document into parts of at most `budget` tokens and of similar length.

    A part ends with a section where one ends near enough to a part of the usual length, else with a paragraph, else
    with a sentence, then a line, and within a word only where nothing else ends.

    Args:
        measured: The document.
        budget: Most tokens of a part, at least 1; `None` is no limit.
        overlap: Tokens that a part repeats of the end of the one before, less than `budget`; fewer where that part
            has fewer, or where a character of several tokens would be torn.
    """
    if budget is None or measured.tokens <= budget:
        return Parts(_parts(measured, _trimmed(measured, [(0, len(measured.text))])), measured.tokens, "none")
    spans, is_hard = _fitting_spans(measured, budget - overlap)
    chosen = _pack(measured, spans, budget - overlap)
    closings = {span.end: span.closing for span in spans}
    weakest = min((closings[end] for _, end in chosen[:-1]), default=Break.SECTION)
    split: Split = "hard" if is_hard else "sections" if weakest >= Break.PARAGRAPH else "sentences"
    trimmed = _trimmed(measured, chosen)
    if overlap:
        trimmed = _trimmed(measured, _overlapping(measured, trimmed, overlap, budget))
    return Parts(_parts(measured, trimmed), measured.tokens, split)


def _trimmed(measured: MeasuredText, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans without whitespace at their ends; those of nothing else are left out."""
    trimmed = []
    for begin, end in spans:
        stretch = measured.text[begin:end]
        if not stretch.isspace():
            trimmed.append((end - len(stretch.lstrip()), begin + len(stretch.rstrip())))
    return trimmed


def _parts(measured: MeasuredText, spans: list[tuple[int, int]]) -> tuple[Part, ...]:
    """The parts that stand in some spans."""
    return tuple(
        Part(
            text=measured.text[begin:end],
            chars=measured.given_span(begin, end),
            tokens=(measured.token_at(begin), measured.token_at(end)),
            pieces=(bisect_right(measured.ends, begin), bisect_left(measured.ends, end) + 1),
        )
        for begin, end in spans
    )


def _fitting_spans(measured: MeasuredText, budget: int) -> tuple[list[_Span], bool]:
    """Spans within the budget, and whether one had to be cut where nothing ends."""
    spans: list[_Span] = []
    is_hard = False
    begin = 0
    for piece in measured.pieces:
        end = begin + len(piece.text)
        *cuts, last = _hard_cuts(measured, begin, end, budget)
        spans += [_Span(*each, Break.NOTHING) for each in cuts]
        spans.append(_Span(*last, piece.end))
        is_hard = is_hard or bool(cuts)
        begin = end
    return spans, is_hard


def _hard_cuts(measured: MeasuredText, begin: int, end: int, budget: int) -> list[tuple[int, int]]:
    """Cut a stretch at token boundaries, before a word where one begins in the last quarter of a part."""
    cuts = []
    starts = measured.starts
    while measured.token_at(end) - measured.token_at(begin) > budget:
        last = measured.token_at(begin) + budget
        boundaries = range(last, last - max(1, budget // 4), -1)
        place = next((starts[i] for i in boundaries if _begins_a_word(measured.text, starts[i])), starts[last])
        if place <= begin:  # one character of more tokens than a part may hold
            place = begin + 1
        cuts.append((begin, place))
        begin = place
    return [*cuts, (begin, end)] if begin < end else cuts


def _begins_a_word(text: str, index: int) -> bool:
    """Whether a word, or the space before it, begins at `index`."""
    return text[index].isspace() or text[index - 1].isspace()


def _pack(measured: MeasuredText, spans: list[_Span], budget: int) -> list[tuple[int, int]]:
    """Join neighbouring spans to parts of similar length within the budget."""
    marks = [measured.token_at(span.end) for span in spans]
    parts: list[tuple[int, int]] = []
    first = done = 0
    while first < len(spans):
        last = _last_of_part(spans, marks, first, done, budget)
        parts.append((spans[first].begin, spans[last].end))
        first, done = last + 1, marks[last]
    return parts


def _last_of_part(spans: list[_Span], marks: list[int], first: int, done: int, budget: int) -> int:
    """The span that a part should end with.

    Args:
        spans: All spans.
        marks: Tokens up to the end of each.
        first: The span the part begins with.
        done: Tokens before it.
        budget: Most tokens of the part.
    """
    left = marks[-1] - done
    if left <= budget:
        return len(spans) - 1
    target = -(-left // -(-left // budget))  # of parts of one length

    def is_near(i: int) -> tuple[int, int]:
        return -abs(marks[i] - done - target), i

    most = max(first, bisect_right(marks, done + budget) - 1)
    for quarters, weakest in _CHOICES:
        least = max(first, bisect_left(marks, done + target * quarters // 4))
        places = [i for i in range(least, most + 1) if spans[i].closing >= weakest]
        if places:
            return max(places, key=lambda i: (spans[i].closing, *is_near(i)))
    return most


def _overlapping(
    measured: MeasuredText, spans: list[tuple[int, int]], overlap: int, budget: int
) -> list[tuple[int, int]]:
    """Let every part but the first begin with so many tokens of the part before, as far as whitespace leaves room."""
    starts = measured.starts
    extended = spans[:1]
    for (first, last), (begin, end) in pairwise(spans):
        token = max(measured.token_at(last) - overlap, measured.token_at(first), measured.token_at(end) - budget)
        while 0 < token < len(starts) and starts[token] == starts[token - 1]:
            token += 1  # within a character
        extended.append((min(begin, starts[token]), end))
    return extended
