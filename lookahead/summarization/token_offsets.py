"""A text with its tokens counted, once for however many ways it is then cut."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lookahead.summarization.sections import Section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What stands in for tokens where a tokenizer does not tell where its own begin: short bits of words, so that
# there are rather too many of them.
_WORD_BIT = re.compile(r"\s*\S{1,3}|\s+$")
_BLOCK = 1 << 18  # characters tokenized at once: what a tokenizer holds for each token is a hundred times what we keep
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], dtype=np.uint32)


class MeasuredText:
    """A text in pieces, and where its tokens begin.

    Args:
        pieces: The text, none of them empty.
        tokenizer: Counts the tokens.
        clean: Applied to each piece before anything is counted; it may change whitespace and nothing else.
        before: Characters that stood before the first piece.

    Attributes:
        text: The cleaned text.
        pieces: The cleaned pieces.
        ends: Where each piece ends, in characters of the cleaned text.
        starts: Where each token begins, likewise.
    """

    def __init__(
        self,
        pieces: Sequence[Section],
        tokenizer: PreTrainedTokenizerBase,
        clean: Callable[[str], str] = str,
        before: int = 0,
    ) -> None:
        self._before = before
        self._given = "".join(piece.text for piece in pieces)
        self.pieces = [Section(clean(piece.text), piece.end) for piece in pieces]
        self.text = "".join(piece.text for piece in self.pieces)
        self.ends = array("q", accumulate(len(piece.text) for piece in self.pieces))
        self.starts = array("q")
        for begin, block in _blocks(self.text, self.ends):
            self.starts.extend(begin + start for start in token_starts(tokenizer, block))

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.starts)

    def token_at(self, place: int) -> int:
        """The number of tokens that begin before a place in the cleaned text."""
        return bisect_left(self.starts, place)

    def given_span(self, begin: int, end: int) -> tuple[int, int]:
        """Where a span of the cleaned text, with no whitespace at its ends, stands in the text as it was given."""
        if self._given != self.text:
            given, cleaned = self._letters
            first, last = np.searchsorted(cleaned, (begin, end - 1))
            begin, end = int(given[first]), int(given[last]) + 1
        return begin + self._before, end + self._before

    @cached_property
    def _letters(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where what is no whitespace stands, as given and cleaned: cleaning leaves all of it, in its order."""
        return _places_of_letters(self._given), _places_of_letters(self.text)


def token_starts(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Where in the text each of its tokens begins, in characters; the whitespace it may begin with left out."""
    if not tokenizer.is_fast:
        return [match.start() for match in _WORD_BIT.finditer(text)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [_first_letter(text, start, end) for start, end in encoded["offset_mapping"]]


def _first_letter(text: str, start: int, end: int) -> int:
    """Where the first character stands that is no whitespace; `start` where there is none."""
    index = start
    while index < end and text[index].isspace():
        index += 1
    return index if index < end else start


def truncate(text: str, tokenizer: PreTrainedTokenizerBase, budget: int) -> str:
    """The first `budget` tokens of a text."""
    starts = token_starts(tokenizer, text)
    return text if len(starts) <= budget else text[: starts[budget]]


def _blocks(text: str, ends: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Stretches of text to be tokenized at once, each with its place; they end with a piece wherever one ends."""
    begin = 0
    while begin < len(text):
        last = bisect_right(ends, begin + _BLOCK) - 1
        end = ends[last] if last >= 0 and ends[last] > begin else begin + _BLOCK
        yield begin, text[begin:end]
        begin = end


def _places_of_letters(text: str) -> NDArray[np.int64]:
    """The indices of all characters that are no whitespace."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.flatnonzero(~np.isin(codes, _SPACES))
