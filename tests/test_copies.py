"""What is drafted where a copy breaks off: behind a changed word, and a little further down its source."""

from __future__ import annotations

from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.hits import HitRates
from lookahead.ngram.search import grow_trie


def text_of(tokens: list[int]) -> ChainIndex:
    text = ChainIndex()
    text.append(tokens)
    return text


def test_a_copy_goes_on_behind_a_changed_word():
    text = text_of([11, 12, 13, 14, 15, 16, 17, 11, 12, 13, 99])
    grown = grow_trie([text], HitRates(), 4)
    assert grown.tokens[:3].tolist() == [99, 15, 16]
    assert grow_trie([text], HitRates(), 4, min_ngram=2) is None


def test_the_match_that_stands_close_ahead_of_the_last_copy_comes_first():
    # 7 stood before 1, soon after the source of the copy "11 12 13", and later before 2.
    text = text_of([11, 12, 13, 14, 7, 1, *range(30, 50), 7, 2, *range(60, 80), 11, 12, 13, 7])
    assert grow_trie([text], HitRates(), 4).tokens[1] == 1
