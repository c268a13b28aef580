"""What is drafted of several matches: the row's own first, copies before short ones, never more than certain."""

from __future__ import annotations

from itertools import product

import numpy as np

from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.features import feature_of_both, feature_of_match
from lookahead.ngram.hit_rates import HitRates, hit_rate
from tests.support.index_queries import grow_trie


def text_of(tokens: list[int]) -> ChainIndex:
    text = ChainIndex()
    text.append(tokens)
    return text


def test_a_long_match_stays_likely_however_often_short_matches_were_right():
    quoted = list(range(100, 120))
    others = [token for follower in range(2, 12) for token in (119, follower)]
    text, rates = text_of([*others, *quoted, 50, 60, *quoted]), HitRates()
    before = grow_trie([text], rates, 200)
    assert before.tokens[1] == 50
    root = np.zeros(2, np.int32)
    children = np.flatnonzero(before.parents == 0)[2:]
    assert len(children) > 5
    for child in children:
        tokens = before.tokens[[0, child]]
        for _ in range(50):
            rates.learn(root, tokens, before.features[[0, child]], tokens[1:])
    after = grow_trie([text], rates, 200)
    assert after.tokens[1] == 50
    assert after.probabilities[1] == before.probabilities[1]


def test_longer_matches_in_other_texts_do_not_crowd_out_the_rows_own():
    own = text_of([5, 99, 41, 42, 7, 8, 9, 5])
    others = text_of([token for follower in range(200, 230) for token in (7, 8, 9, 5, follower)])
    grown = grow_trie([own, others], HitRates(), 32)
    offered = grown.tokens[(grown.parents == 0)][1:].tolist()
    assert 99 in offered
    assert sum(token >= 200 for token in offered) > 4


def test_a_token_of_the_rows_own_is_judged_by_its_own_match():
    # 50 followed one token in the row's text, and nine in another: the length of that match is not the row's.
    other = text_of([*range(1, 10), 50])
    together = grow_trie([text_of([9, 50, 70, *range(1, 10)]), other], HitRates(), 1)
    alone = grow_trie([text_of([9, 50, 70, *range(1, 10)])], HitRates(), 1)
    assert together.tokens[1] == alone.tokens[1] == 50
    assert together.features[1] == alone.features[1]


def test_chances_of_siblings_never_sum_up_to_more_than_one_however_likely_each_is():
    quoted = list(range(100, 120))
    others = [token for follower in range(2, 12) for token in (119, follower)]
    text, rates = text_of([*others, *quoted, 50, 60, *quoted]), HitRates()
    rates.table[: len(rates.prior), 0] = 0.9999
    grown = grow_trie([text], rates, 200)
    assert (grown.probabilities > 0).all()
    for parent in range(len(grown.tokens)):
        children = np.flatnonzero(grown.parents == parent)
        assert grown.probabilities[children[children > 0]].sum() < 0.9995  # something else may always follow


def test_a_token_the_memory_names_late_is_no_less_likely_than_an_unnamed_one():
    rates, late = HitRates(), range(6, 15)
    for rank, support, order in product(range(3), range(20), (1, 4)):
        guesses = [rates.prior[feature_of_both(rank, support, order, 0, standing)] for standing in (0, *late)]
        assert guesses[0] == min(guesses)


def test_short_matches_are_learned_from_tokens_the_memory_does_not_name_too():
    rates, root = HitRates(), np.zeros(2, np.int32)
    short, unnamed = feature_of_match(1, 0, 0), feature_of_both(0, 0, 1, 0, 0)
    before = hit_rate(rates.table, unnamed, 2)
    for _ in range(40):
        rates.learn(root, np.array([1, 2], np.int32), np.array([0, short], np.int32), np.array([2], np.int32))
    assert hit_rate(rates.table, unnamed, 2) > 1.2 * before


def test_guesses_at_the_next_token_are_rated_apart_from_those_behind_them():
    rates, chain = HitRates(), np.array([0, 0, 1], np.int32)
    features = np.array([0, *[feature_of_match(2, 0, 0)] * 2], np.int32)
    for _ in range(200):
        rates.learn(chain, np.array([1, 2, 3], np.int32), features, np.array([2, 9], np.int32))
    first, second = (hit_rate(rates.table, features[1], depth) for depth in (1, 2))
    assert first > 0.8
    assert second < 0.2
