"""Cut a long document into parts that fit a model's context."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from lookahead.summarization.segmentation import Break, Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["none", "sections", "sentences", "hard"]

# Approximates the tokens of a tokenizer without offsets. The pieces are short, to overestimate the count.
_WORD_PIECE = re.compile(r"\s*\S{1,3}|\s+$")
_BLOCK = 1 << 18  # characters per tokenizer call; it uses 100 times the memory per token that is kept here

# Where a part may end: minimum length, in quarters of the target length, and weakest break. The first match wins.
_CHOICES = ((3, Break.SENTENCE), (1, Break.SENTENCE), (3, Break.LINE), (0, Break.LINE), (0, Break.NOTHING))


class MeasuredText:
    """A text in pieces, each of which `clean` is applied to, and the offsets of its tokens."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        tokenizer: PreTrainedTokenizerBase,
        clean: Callable[[str], str] = str,
    ) -> None:
        self.pieces = [Piece(clean(piece.text), piece.end) for piece in pieces]
        self.text = "".join(piece.text for piece in self.pieces)
        # Offsets in the cleaned text: ends of pieces, and starts of tokens without their leading whitespace.
        self.ends = array("q", accumulate(len(piece.text) for piece in self.pieces))
        self.starts = array("q")
        begin = 0
        while begin < len(self.text):  # in blocks that end between pieces where possible
            last = bisect_right(self.ends, begin + _BLOCK) - 1
            end = self.ends[last] if last >= 0 and self.ends[last] > begin else begin + _BLOCK
            self.starts.extend(begin + start for start in _token_starts(tokenizer, self.text[begin:end]))
            begin = end
        self.tokens = len(self.starts)

    def token_at(self, place: int) -> int:
        """The number of tokens that begin before character `place` of the cleaned text."""
        return bisect_left(self.starts, place)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a document."""

    text: str  # without outer whitespace, never empty
    tokens: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a document.

    `split` is `"none"` if the document fits as a whole, `"sections"` if it is cut only between sections or paragraphs,
    `"sentences"` if it is also cut between sentences or lines, and `"hard"` if it is also cut within a line.
    """

    parts: tuple[Part, ...]
    tokens: int  # of the whole document
    split: Split


def cut(measured: MeasuredText, budget: int) -> Parts:
    """Cut a document into parts of at most `budget` tokens and of similar length.

    A part ends at a section break near the target length if there is one, else at the end of a paragraph, a sentence or
    a line. It ends within a line or word only if there is no other break.
    """
    split: Split = "none"
    chosen = [(0, len(measured.text))]
    if measured.tokens > budget:
        ends, is_hard = _fitting_ends(measured, budget)
        chosen = _pack(measured, ends, budget)
        is_sections = all(ends[end] >= Break.PARAGRAPH for _, end in chosen[:-1])
        split = "hard" if is_hard else "sections" if is_sections else "sentences"
    texts = ((measured.text[begin:end].strip(), begin, end) for begin, end in chosen)
    parts = tuple(Part(text, measured.token_at(end) - measured.token_at(begin)) for text, begin, end in texts if text)
    return Parts(parts, measured.tokens, split)


def truncate(text: str, tokenizer: PreTrainedTokenizerBase, budget: int) -> str:
    """The first `budget` tokens of a text."""
    starts = _token_starts(tokenizer, text)
    return text if len(starts) <= budget else text[: starts[budget]]


def _token_starts(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The character offset of each token, after its leading whitespace unless the token is blank."""
    if not tokenizer.is_fast:
        return [match.start() for match in _WORD_PIECE.finditer(text)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [end - len(text[start:end].lstrip() or text[start:end]) for start, end in encoded["offset_mapping"]]


def _fitting_ends(measured: MeasuredText, budget: int) -> tuple[dict[int, Break], bool]:
    """The break at each possible end of a part, by offset, and whether a piece had to be cut.

    A piece over the budget is cut at a token boundary, before a word if one begins in the last quarter of the budget.
    """
    ends: dict[int, Break] = {}
    text, starts = measured.text, measured.starts
    begin, is_hard = 0, False
    for piece, end in zip(measured.pieces, measured.ends, strict=True):
        while begin < end:
            place, last = end, measured.token_at(begin) + budget
            if measured.token_at(end) > last:
                nearest = (starts[i] for i in range(last, last - max(1, budget // 4), -1))
                place = next((at for at in nearest if text[at].isspace() or text[at - 1].isspace()), starts[last])
                place = max(place, begin + 1)  # one character may have more tokens than the budget
            ends[place] = piece.end if place == end else Break.NOTHING
            is_hard, begin = is_hard or place < end, place
    return ends, is_hard


def _pack(measured: MeasuredText, ends: dict[int, Break], budget: int) -> list[tuple[int, int]]:
    """Join adjacent stretches into parts of similar length within the budget."""
    places, breaks = list(ends), list(ends.values())
    marks = [measured.token_at(place) for place in places]
    parts: list[tuple[int, int]] = []
    begin = first = done = 0
    while first < len(places):
        last = len(places) - 1
        left = marks[-1] - done
        if left > budget:
            target = -(-left // -(-left // budget))  # tokens per part if the rest is cut evenly
            last = max(first, bisect_right(marks, done + budget) - 1)
            for quarters, weakest in _CHOICES:
                least = max(first, bisect_left(marks, done + target * quarters // 4))
                fitting = [i for i in range(least, last + 1) if breaks[i] >= weakest]
                if fitting:
                    last = max(fitting, key=lambda i: (breaks[i], -abs(marks[i] - done - target), i))
                    break
        parts.append((begin, places[last]))
        begin, first, done = places[last], last + 1, marks[last]
    return parts
