"""Where a document may be cut: its sentences, lines, paragraphs and sections."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Break(IntEnum):
    """The kind of break after a piece of text. Cuts at higher values are better."""

    NOTHING = 0  # a heading belongs to the text after it
    LINE = 1
    SENTENCE = 2
    PARAGRAPH = 3
    SECTION = 4


class Piece(NamedTuple):
    """A piece of a document with its trailing whitespace."""

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
# Every alternative begins at a line start and has a bounded length, so that no text takes quadratic time.
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
_LINE_REACH = 64  # characters

# Abbreviations whose full stop does not end a sentence.
_ABBREVIATION = re.compile(
    r"""
      mr|mrs|ms|mx|dr|prof|rev|hon|esq|sr|jr|st|mt|ft|gen|col|capt|lt|lieut|sgt|cmdr|maj|gov|sen|rep|pres|messrs|mme|mlle
    | vs|cf|viz|al|approx|ca|esp|incl|resp|ed|eds|vol|vols|pp|ch|sec|dept|univ|assn|bros
    | jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Abbreviations before a number only: "No. 5", but "No. It is not."
_NUMBERED = re.compile("no|nos|fig|figs|eq|eqs|art|p|para|ref", re.IGNORECASE)
_OPENERS = "\"'“‘«([{*_¿¡—- "

# A run of stops is one match, whether it ends a sentence or not, so that no text takes quadratic time.
_BOUNDARY = re.compile(
    r"""
      (?P<stop>[.!?…]+)["'”’»)\]}*_]*(?P<gap>\s*)
    | [。！？]+[」』”’）]*(?P<wide>\s*)                  # no space follows these
    | \n(?P<lines>\s*)
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"(?:\w\.)*\w+$")
_WORD_REACH = 24  # characters


def split_pieces(text: str) -> list[Piece]:
    """Cut a text between lines, between sentences and before headings.

    A section begins with a heading: a markdown heading, an underlined line, a rule, or a line such as "Chapter IX"
    after an empty line. A paragraph ends at an empty line. The joined pieces equal the text.
    """
    pieces: list[Piece] = []
    start = 0
    for match in _HEADING.finditer(text):
        before = text[max(0, match.start() - _LINE_REACH) : match.start()]
        words = before.rstrip()
        if match["alone"] is not None and words and before.count("\n", len(words)) < 2:
            continue  # the previous line is not empty
        begin = max(start, match.start())  # the previous heading ends with the indentation of this one
        pieces += _section_pieces(text[start:begin])
        start = match.end()
        while start < len(text) and text[start].isspace():
            start += 1
        pieces.append(Piece(text[begin:start], Break.NOTHING))
    pieces += _section_pieces(text[start:])
    return pieces


def split_sentences(text: str) -> list[str]:
    """Cut a text between sentences.

    A sentence ends at an empty line, and at `.`, `!`, `?` or `…` with closing quotes and brackets if a new sentence
    begins after it. Abbreviations ("Dr. Watson"), initials ("J. R. Smith"), "e.g.", decimal numbers and single line
    breaks do not end a sentence. Sentences keep their trailing whitespace: joined, they equal the text.
    """
    sentences: list[str] = []
    start = 0
    for match in _BOUNDARY.finditer(text):
        if match.start() > start and _ends_a_sentence(text, start, match):
            sentences.append(text[start : match.end()])
            start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return sentences


def _ends_a_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether a match of `_BOUNDARY` ends the sentence that begins at `start`."""
    if match["wide"] is not None:
        return True
    if match["lines"] is not None:
        return "\n" in match["lines"]  # an empty line
    gap = match["gap"]
    if not gap or gap.count("\n") > 1:
        return bool(gap)
    index = match.end()
    while index < len(text) and text[index] in _OPENERS:
        index += 1
    following = text[index : index + 1]  # the first character after quotes, brackets and spaces; empty at the end
    if following.islower():
        return False  # "What?" she said. Hm ... perhaps.
    if match["stop"] != ".":
        return True
    last = _LAST_WORD.search(text, max(start, match.start() - _WORD_REACH), match.start())
    word = last[0] if last is not None else ""
    if _NUMBERED.fullmatch(word):
        return not following.isdigit()
    # "J." is an initial, "e.g." and "U.S." contain full stops, and "I." ends a sentence.
    is_initials = word != "I" and all(len(letter) == 1 and letter.isalpha() for letter in word.split("."))
    return not is_initials and _ABBREVIATION.fullmatch(word) is None


def _section_pieces(section: str) -> Iterator[Piece]:
    """The lines of each sentence of a section. The last line ends the section."""
    sentences = split_sentences(section)
    for number, sentence in enumerate(sentences, start=1):
        *lines, last = _LINE.findall(sentence)
        for line in lines:
            yield Piece(line, Break.LINE)
        end = Break.PARAGRAPH if last.count("\n") > 1 else Break.SENTENCE
        yield Piece(last, Break.SECTION if number == len(sentences) else end)
