"""Answers that are shown as they are written, broken into lines at the width of a terminal."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from lookahead.cli.word_wrap import WordWrap

STORY = "The cat sat on the mat, and the dog sat by the door; neither of them had anything to say about it at all."
TEXTS = st.text(st.sampled_from("ab,. \n\t\u4e2d\u3002\u00e9e\u0301\U0001f600"), max_size=60)


def wrapped(text: str, width: int, size: int = 1) -> str:
    """A text that comes in pieces of a size."""
    lines = WordWrap(width)
    return "".join(lines.put(text[i : i + size]) for i in range(0, len(text), size)) + lines.end()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("width", [20, 40, 60])
def test_words_stay_whole_and_lines_are_those_of_the_standard_library(width, size):
    assert wrapped(STORY, width, size).splitlines() == textwrap.wrap(STORY, width)


def test_what_is_written_is_all_but_the_last_word():
    lines = WordWrap(40)
    assert [lines.put(piece) for piece in ("The", " cat", " s", "at", ".\n")] == ["", "The", " cat", "", " sat.\n"]
    assert lines.end() == ""


def test_wide_characters_take_two_columns_and_a_line_ends_beside_them_but_not_before_what_closes():
    assert wrapped("\u4e2d\u6587" * 5, 8) == "\u4e2d\u6587\u4e2d\u6587\n" * 2 + "\u4e2d\u6587"
    assert wrapped("abc \u4e2d\u6587\u4e2d\u3002\u6587", 8) == "abc \u4e2d\u6587\n\u4e2d\u3002\u6587"


def test_a_word_longer_than_a_line_is_broken_where_the_line_is_full():
    assert wrapped("see https://example.org/a/b", 10) == "see\nhttps://ex\nample.org/\na/b"


def test_indented_lines_and_empty_ones_stay():
    code = "def f(x):\n    return x\n\n\nf(1)"
    assert wrapped(code, 40) == code


@given(text=TEXTS, width=st.integers(2, 12), size=st.integers(1, 8))
def test_no_line_is_too_wide_and_only_spaces_are_lost(text, width, size):
    shown = wrapped(text, width, size)
    assert all(cell_len(line) <= width for line in shown.split("\n"))
    assert "".join(shown.split()) == "".join(text.split())
    assert shown == wrapped(text, width, 1000)
