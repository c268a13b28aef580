"""Text that is shown as it is written, broken between words at the width of a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from rich.cells import split_graphemes

_SPACE = re.compile("([ \t\n])")
_TAB = 8  # columns from one stop to the next
_CLOSING = ("Pe", "Pf", "Po")  # categories of punctuation that begins no line


class WordWrap:
    """Breaks a text that comes in pieces into lines of so many columns.

    A line ends between words, or beside a wide character, such as those of Chinese and Japanese, which take two
    columns. A word that is longer than a line is broken where the line is full. The last word is held back until the
    next one begins.
    """

    def __init__(self, width: int) -> None:
        self._width = max(2, width)
        self._column = 0
        self._spaces = ""  # behind what was written, and before what is held back
        self._held = ""

    def put(self, piece: str) -> str:
        """What can be written once a further piece is known."""
        *whole, last = _SPACE.split(self._held + piece)
        written = [self._place_space(each) if _SPACE.fullmatch(each) else self._place_word(each) for each in whole]
        *parts, (self._held, _) = list(_parts_of(last)) or [("", 0)]
        return "".join(written) + "".join(self._place(*part) for part in parts)

    def end(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return self._place_word(held)

    def _place_space(self, space: str) -> str:
        if space == "\n":
            self._column, self._spaces = 0, ""
            return "\n"
        self._spaces += " " if space == " " else " " * (_TAB - (self._column + len(self._spaces)) % _TAB)
        return ""

    def _place_word(self, word: str) -> str:
        return "".join(self._place(*part) for part in _parts_of(word))

    def _place(self, part: str, columns: int) -> str:
        """What cannot be broken: on this line behind its spaces, on the next one, or, too long for any, on several."""
        spaces, self._spaces = self._spaces, ""
        if self._column + len(spaces) + columns <= self._width:
            self._column += len(spaces) + columns
            return spaces + part
        if columns <= self._width:
            ended, self._column = self._break_line(), columns
            return ended + part
        written = [self._break_line()]
        for begin, end, wide in split_graphemes(part)[0]:
            if self._column + wide > self._width:
                written.append(self._break_line())
            written.append(part[begin:end])
            self._column += wide
        return "".join(written)

    def _break_line(self) -> str:
        is_empty, self._column = self._column == 0, 0
        return "" if is_empty else "\n"


def _parts_of(word: str) -> Iterator[tuple[str, int]]:
    """What a line does not break, and its columns: runs of narrow characters; wide ones with what closes them."""
    part, columns, is_wide = "", 0, False
    for begin, end, width in split_graphemes(word)[0]:
        closes = unicodedata.category(word[begin]) in _CLOSING
        if part and not closes and (is_wide or width > 1):
            yield part, columns
            part, columns = "", 0
        part, columns, is_wide = part + word[begin:end], columns + width, width > 1
    if part:
        yield part, columns
