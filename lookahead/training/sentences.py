"""Where sentences begin and end in whitespace-cleaned English text."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r"""[.!?…]["'”’)\]]*(?P<gap> )(?=["'“‘(\[_]*[A-Z0-9])""")
"""Closing punctuation, any closing quotes, the space, then a capital or a digit."""

_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'“‘])(?:Mr|Mrs|Ms|Dr|St|Messrs|Mme|Mlle|Rev|Hon|Capt|Col|Gen|Lieut|Lt|Sgt|Prof|Jr|Sr|"
    r"Esq|No|Vol|vs|etc|[A-Z])\.$"
)
"""A title, an initial or a similar abbreviation, whose full stop ends no sentence."""

_LONGEST_ABBREVIATION = 8


def split_sentences(text: str) -> list[str]:
    """Split cleaned text into sentences; joined by single spaces they give the text back.

    Titles and initials end no sentence:

    >>> split_sentences('Mr. J. Hale went out. "Why?" It rained.')
    ['Mr. J. Hale went out.', '"Why?"', 'It rained.']
    """
    sentences: list[str] = []
    begin = 0
    for match in _BOUNDARY.finditer(text):
        stop = match.start("gap")
        if _ABBREVIATION.search(text[max(begin, stop - _LONGEST_ABBREVIATION) : stop]):
            continue
        sentences.append(text[begin:stop])
        begin = stop + 1
    if begin < len(text):
        sentences.append(text[begin:])
    return sentences
