"""Where a document may be cut, and how good a place that is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from lookahead.summarization.sentences import split_sentences


class Break(IntEnum):
    """What ends with a piece of text: the more, the better a place it is to cut at."""

    NOTHING = 0  # a heading belongs to what follows it
    LINE = 1
    SENTENCE = 2
    PARAGRAPH = 3
    SECTION = 4


class Section(NamedTuple):
    """A stretch of a document, with the whitespace that follows it."""

    text: str
    end: Break


_NUMBER = (
    r"(?:\d{1,4}|[ivxlcdm]{1,9}|(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-\w{3,5})?)"
    r"|the[ ]\w{3,16})"
)
_CHAPTER = (
    r"(?:chapter|part|book|volume|section|act|scene|canto|letter|stave|appendix|kapitel|teil|chapitre|partie"
    r"|cap[ií]tulo|parte|capitolo|hoofdstuk|глава|часть)"
)
# Every alternative begins at a line and has a bounded length, so that no text takes quadratic time.
_HEADING = re.compile(
    rf"""
    ^(?:
      [ ]{{0,3}}\#{{1,6}}[ \t]+\S.{{0,200}}                          # "## A title"
    | [ ]{{0,3}}(?:[*_~-][ \t]{{0,8}}){{3,40}}(?=\r?$)               # "* * *", "---"
    | (?P<alone>
        \S.{{0,100}}\n(?:={{3,200}}|-{{3,200}})(?=[ \t\r]*$)         # a line that is underlined
      | [ \t]{{0,80}}(?:
          {_CHAPTER}[ \t]+{_NUMBER}\b.{{0,80}}(?=\r?$)              # "Chapter IX: in which ..."
        | (?:prologue|epilogue|preface|foreword|afterword|introduction|conclusion)[.:]?(?=[ \t\r]*$)
        | (?-i:[IVXLCDM]{{1,8}})\.?(?=[ \t\r]*$)                    # "IX"
        | 第[0-9〇零一二三四五六七八九十百千]{{1,8}}[章節节回部篇].{{0,40}}(?=\r?$)
        )
      )
    )""",
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_LINE = re.compile(r"[^\n]*\n\s*|[^\n]+")
_REACH = 64


def split_pieces(text: str) -> list[Section]:
    """Cut a text between its lines and sentences and before its headings.

    A section begins with a heading: one of markdown, a line that is underlined, a rule, or a line such as "Chapter IX"
    behind an empty one. A paragraph ends at an empty line.

    Args:
        text: Any text.

    Returns:
        The pieces in order: joined they are the text again.
    """
    pieces: list[Section] = []
    start = 0
    for match in _HEADING.finditer(text):
        if match["alone"] is not None and not _follows_an_empty_line(text, match.start()):
            continue
        begin = max(start, match.start())  # the indentation of a heading stands behind the one before it
        pieces += _sentences(text[start:begin])
        start = _end_of_whitespace(text, match.end())
        pieces.append(Section(text[begin:start], Break.NOTHING))
    pieces += _sentences(text[start:])
    return pieces


def _sentences(section: str) -> Iterator[Section]:
    """The lines of the sentences of a section, the last of which ends it."""
    sentences = split_sentences(section)
    for number, sentence in enumerate(sentences, start=1):
        *lines, last = _LINE.findall(sentence)
        for line in lines:
            yield Section(line, Break.LINE)
        end = Break.PARAGRAPH if last.count("\n") > 1 else Break.SENTENCE
        yield Section(last, Break.SECTION if number == len(sentences) else end)


def _follows_an_empty_line(text: str, index: int) -> bool:
    """Whether nothing but whitespace stands on the line before the one that begins at `index`."""
    before = text[max(0, index - _REACH) : index]
    words = before.rstrip()
    return not words or before.count("\n", len(words)) > 1


def _end_of_whitespace(text: str, index: int) -> int:
    """The first index from `index` on where there is no whitespace."""
    while index < len(text) and text[index].isspace():
        index += 1
    return index
