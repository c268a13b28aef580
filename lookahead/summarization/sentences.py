"""Where sentences end."""

from __future__ import annotations

import re

# Words whose full stop does not end a sentence.
_ABBREVIATION = re.compile(
    r"""
      mr|mrs|ms|mx|dr|prof|rev|hon|esq|sr|jr|st|mt|ft|gen|col|capt|lt|lieut|sgt|cmdr|maj|gov|sen|rep|pres|messrs|mme|mlle
    | vs|cf|viz|al|approx|ca|esp|incl|resp|ed|eds|vol|vols|pp|ch|sec|dept|univ|assn|bros
    | jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Those that only mean it before a number: "No. 5", but "No. It is not."
_NUMBERED = re.compile("no|nos|fig|figs|eq|eqs|art|p|para|ref", re.IGNORECASE)
_OPENERS = "\"'“‘«([{*_¿¡—- "

# Every run is matched whole, whether it ends a sentence or not, so that no text takes quadratic time.
_BOUNDARY = re.compile(
    r"""
      (?P<stop>[.!?…]+)["'”’»)\]}*_]*(?P<gap>\s*)
    | [。！？]+[」』”’）]*(?P<wide>\s*)                  # no space is written after these
    | \n(?P<lines>\s*)
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"(?:\w\.)*\w+$")
_WORD_REACH = 24


def split_sentences(text: str) -> list[str]:
    """Cut a text between its sentences.

    A sentence ends at `.`, `!`, `?` or `…`, closing quotes and brackets included, where a new one begins after
    it, and at an empty line. Abbreviations ("Dr. Watson"), initials ("J. R. Smith"), "e.g." and decimal numbers
    do not end one; a single line break does not either, since text is often wrapped.

    Args:
        text: Any text.

    Returns:
        The sentences in order, each with the whitespace that follows it: joined they are the text again.
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


def bare_sentences(text: str) -> list[str]:
    """The sentences of a text in order, without the whitespace between them.

    >>> bare_sentences('Mr. J. Hale went out. "Why?" It rained.')
    ['Mr. J. Hale went out.', '"Why?"', 'It rained.']
    """
    return [sentence.strip() for sentence in split_sentences(text)]


def _ends_a_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether the run that the pattern found, in a sentence from `start` on, ends it."""
    if match["wide"] is not None:
        return True
    if match["lines"] is not None:
        return "\n" in match["lines"]  # an empty line
    gap = match["gap"]
    if not gap or gap.count("\n") > 1:
        return bool(gap)
    following = _first_letter(text, match.end())
    if following.islower():
        # "What?" she said, and "Hm ... perhaps": whatever the stop, a small letter goes on.
        return False
    if match["stop"] != ".":
        return True
    word = _LAST_WORD.search(text, max(start, match.start() - _WORD_REACH), match.start())
    return word is None or not _is_abbreviation(word[0], following)


def _first_letter(text: str, index: int) -> str:
    """The character a sentence from `index` on begins with, quotes and brackets left out; empty at the end."""
    while index < len(text) and text[index] in _OPENERS:
        index += 1
    return text[index : index + 1]


def _is_abbreviation(word: str, following: str) -> bool:
    """Whether `word`, written before a full stop, is short for another; `following` starts what comes next."""
    if _NUMBERED.fullmatch(word):
        return following.isdigit()
    # "J." is an initial and "e.g." or "U.S." is written with its own full stops; "I." ends a sentence.
    initials = all(len(letter) == 1 and letter.isalpha() for letter in word.split("."))
    return _ABBREVIATION.fullmatch(word) is not None or (initials and word != "I")
