"""Cutting a long document into parts that fit a model's context."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lookahead.summarize.sentences import split_sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["none", "sentences", "hard"]

# What stands in for tokens where a tokenizer does not tell where its own begin: short bits of words, so that
# there are rather too many of them.
_WORD_BIT = re.compile(r"\s*\S{1,3}|\s+$")


@dataclass(frozen=True, slots=True)
class Parts:
    """A document, cut.

    Attributes:
        texts: The parts in order; none is empty.
        tokens: Tokens of the whole document.
        split: `"none"` where the document fits as it is, `"sentences"` where it was cut between sentences or
            lines, `"hard"` where some stretch had no such place and was cut between words or tokens.
    """

    texts: tuple[str, ...]
    tokens: int
    split: Split


def split_document(
    text: str, tokenizer: PreTrainedTokenizerBase, budget: int | None, clean: Callable[[str], str] = str
) -> Parts:
    """Cut a document into parts of at most `budget` tokens and of similar length.

    Args:
        text: The document, not empty.
        tokenizer: Counts the tokens.
        budget: Most tokens of a part, at least 1; `None` is no limit.
        clean: Applied to each sentence before anything is counted; it sees the line breaks that sentences need.
    """
    pieces = [clean(sentence) for sentence in split_sentences(text.strip())]
    whole = "".join(pieces)
    starts = _token_starts(tokenizer, whole)
    if budget is None or len(starts) <= budget:
        return Parts((whole,), len(starts), "none")
    spans, hard = _fitting_spans(pieces, whole, starts, budget)
    texts = (whole[begin:end].strip() for begin, end in _pack(spans, starts, budget))
    return Parts(tuple(filter(None, texts)), len(starts), "hard" if hard else "sentences")


def truncate(text: str, tokenizer: PreTrainedTokenizerBase, budget: int) -> str:
    """The first `budget` tokens of a text."""
    starts = _token_starts(tokenizer, text)
    return text if len(starts) <= budget else text[: starts[budget]]


def _token_starts(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Where in the text each of its tokens begins, in characters."""
    if not tokenizer.is_fast:
        return [match.start() for match in _WORD_BIT.finditer(text)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def _fitting_spans(pieces: list[str], whole: str, starts: list[int], budget: int) -> tuple[list[tuple[int, int]], bool]:
    """Spans of characters, each within the budget, and whether one had to be cut where nothing ends."""
    spans: list[tuple[int, int]] = []
    hard = False
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        if _tokens_in(starts, begin, end) <= budget:
            spans.append((begin, end))
        else:
            for line in piece.splitlines(keepends=True):
                line_end = begin + len(line)
                cuts = _hard_cuts(whole, starts, begin, line_end, budget)
                hard = hard or len(cuts) > 1
                spans += cuts
                begin = line_end
        begin = end
    return spans, hard


def _hard_cuts(whole: str, starts: list[int], begin: int, end: int, budget: int) -> list[tuple[int, int]]:
    """Cut a stretch at token boundaries, before a word where one begins in the last quarter of a part."""
    cuts = []
    while _tokens_in(starts, begin, end) > budget:
        last = bisect_left(starts, begin) + budget
        boundaries = range(last, last - max(1, budget // 4), -1)
        cut = next((starts[i] for i in boundaries if _begins_a_word(whole, starts[i])), starts[last])
        if cut <= begin:  # one character of more tokens than a part may hold
            cut = begin + 1
        cuts.append((begin, cut))
        begin = cut
    return [*cuts, (begin, end)] if begin < end else cuts


def _begins_a_word(text: str, index: int) -> bool:
    """Whether a word, or the space before it, begins at `index`."""
    return text[index].isspace() or text[index - 1].isspace()


def _pack(spans: list[tuple[int, int]], starts: list[int], budget: int) -> list[tuple[int, int]]:
    """Join neighbouring spans to parts of similar length within the budget."""
    count = -(-len(starts) // budget)
    target = -(-len(starts) // count)
    parts: list[tuple[int, int]] = []
    begin, end = spans[0]
    for next_begin, next_end in spans[1:]:
        if _tokens_in(starts, begin, end) >= target or _tokens_in(starts, begin, next_end) > budget:
            parts.append((begin, end))
            begin = next_begin
        end = next_end
    return [*parts, (begin, end)]


def _tokens_in(starts: list[int], begin: int, end: int) -> int:
    """Tokens that begin within `[begin, end)`."""
    return bisect_left(starts, end) - bisect_left(starts, begin)
