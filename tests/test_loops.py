"""Outputs that loop are told from those that repeat something and go on, or are short."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.decoding.loops import MAX_PHRASE, MIN_TIMES, MIN_TOKENS, loops

WORDS = st.integers(0, 40)
END = 2


def repeated(phrase, tokens):
    """So many tokens of a phrase that is said again and again."""
    return (phrase * tokens)[:tokens]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8, 9, 16, 31, 32, 33, 63, MAX_PHRASE])
@pytest.mark.parametrize("ending", [[], [END]])
def test_a_phrase_that_is_repeated_to_the_end_is_a_loop_from_a_length_on(size, ending):
    phrase, before = list(range(100, 100 + size)), list(range(50))
    enough = max(MIN_TIMES * size, MIN_TOKENS)
    for tokens in (enough, enough + 1, 3 * enough):
        assert loops([*before, *repeated(phrase, tokens), *ending])
    assert not loops([*before, *repeated(phrase, enough - 1), *ending])


def test_a_phrase_that_is_longer_than_the_longest_is_none():
    phrase = list(range(MAX_PHRASE + 1))
    assert not loops(phrase * 10)


@given(st.lists(WORDS), st.lists(WORDS, min_size=1, max_size=MAX_PHRASE), st.integers(MIN_TIMES, 9))
def test_what_stands_before_a_loop_does_not_hide_it(before, phrase, times):
    looping = [*before, *repeated(phrase, max(MIN_TOKENS, times * len(phrase)))]
    assert loops(looping)
    assert loops(np.array(looping)) and loops([*looping, END])
    assert not loops([*looping, *range(1000, 1000 + MIN_TOKENS)])  # it went on with something else


@given(st.lists(st.integers(0, 3), max_size=MIN_TOKENS - 1))
def test_no_short_output_loops(tokens):
    assert not loops(tokens)


TABLE = (
    "| name | year | sum |\n|---|---|---|\n| Ann | 2021 | 0 |\n| Ann | 2022 | 0 |\n| Ann | 2023 | 0 |\n"
    "| Bob | 2021 | 0 |\n| Bob | 2022 | 0 |\n| Bob | 2023 | 7 |\n"
)
LIST = "".join(f"- The {name} sat on the mat, and the dog saw it.\n" for name in ("cat", "hen", "cow", "fox", "rat"))
NUMBERED = "".join(f"{i}. Check the box and press the button.\n" for i in range(1, 12))
CODE = (
    "def walk(tree):\n    for node in tree:\n        if node.left:\n            walk(node.left)\n"
    "        if node.right:\n            walk(node.right)\n        if node.up:\n            walk(node.up)\n"
    "\n\nif __name__ == '__main__':\n        walk(tree)\n        walk(tree)\n        walk(tree)\n"
)
REFRAIN = "Row, row, row your boat, gently down the stream. Merrily, merrily, merrily, merrily, life is but a dream."
RULE = "Results\n" + "=" * 30 + "\n"


@pytest.mark.parametrize("text", [TABLE, LIST, NUMBERED, CODE, REFRAIN, RULE])
def test_lists_tables_code_and_refrains_are_no_loops(text, summarizer_path):
    from transformers import AutoTokenizer

    assert not loops(AutoTokenizer.from_pretrained(summarizer_path)(text)["input_ids"])


def test_what_a_model_says_without_end_is_a_loop(summarizer_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(summarizer_path)
    said = "The king is dead. " + "The king is a man who is a man who is the king. " * 12
    assert loops(tokenizer(said)["input_ids"])
    assert loops(tokenizer(said[:-9])["input_ids"])  # cut off in the middle of a phrase
