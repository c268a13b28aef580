"""The n-gram index and its tree of continuations against brute force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.ngram import hit_rates as hits
from lookahead.ngram import search
from lookahead.ngram.chains import SEPARATOR, ChainIndex
from lookahead.ngram.features import RANKS, feature_of_match
from lookahead.ngram.hit_rates import HitRates
from tests.support.index_queries import find, grow_trie
from tests.support.naive_index import continuation, find_by_scan

ROOT = Path(__file__).resolve().parent.parent
NO_LIMIT = {"max_links": 1 << 16}
HUGE = 2**31 - 1

# Few different tokens, so that matches are long and many; huge ids among them.
tokens_of = st.lists(st.sampled_from([0, 1, 2, HUGE, HUGE - 1]), max_size=60)
few_documents = st.lists(tokens_of, min_size=1, max_size=4)


def index_of(documents: list[list[int]], max_tokens: int | None = None) -> ChainIndex:
    """An index of documents, the last of them open."""
    index = ChainIndex(max_tokens)
    for number, document in enumerate(documents):
        if number > 0:
            index.end_document()
        index.append(document)
    return index


def paths(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """For every node, the tokens from below the root to it."""
    walked: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        walked.append((*walked[parents[node]], int(tokens[node])))
    return walked


@given(few_documents, st.integers(1, 9), st.integers(0, 20))
def test_the_end_of_the_open_document_is_found_wherever_it_stood_before(documents, shortest, more):
    index = index_of(documents)
    stream = index.tokens.tolist()
    expected = find_by_scan(stream, stream, min_ngram=shortest, max_ngram=shortest + more)
    assert find(index, min_ngram=shortest, max_ngram=shortest + more, **NO_LIMIT) == expected


@given(few_documents, tokens_of)
def test_a_foreign_context_is_found_wherever_its_end_stands(documents, context):
    index = index_of(documents)
    assert find(index, context, **NO_LIMIT) == find_by_scan(index.tokens.tolist(), context)


@given(few_documents, st.integers(1, 12))
def test_a_limit_cuts_the_walk_short_and_changes_nothing_else(documents, max_links):
    index = index_of(documents)
    everything = find(index, **NO_LIMIT)
    some = find(index, max_links=max_links)
    assert len(some) <= max_links
    assert [match for match in everything if match in some] == some


@given(tokens_of, st.lists(st.integers(0, 7), max_size=20))
def test_appending_in_pieces_makes_the_index_of_the_whole(tokens, cuts):
    whole, pieces = ChainIndex(), ChainIndex()
    whole.append(tokens)
    rest = list(tokens)
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(np.array(rest, np.int32))
    assert pieces.tokens.tolist() == whole.tokens.tolist()
    assert find(pieces, **NO_LIMIT) == find(whole, **NO_LIMIT)


@given(few_documents)
def test_documents_added_at_once_are_those_added_one_by_one(documents):
    documents = [document for document in documents if document] or [[1]]
    flat = [token for document in documents for token in (*document, SEPARATOR)][:-1]
    at_once = ChainIndex()
    at_once.append_documents(np.array(flat, np.int32))
    one_by_one = index_of(documents)
    assert at_once.tokens.tolist() == one_by_one.tokens.tolist()
    assert find(at_once, **NO_LIMIT) == find(one_by_one, **NO_LIMIT)


def test_many_tokens_at_once_make_the_chains_that_one_after_the_other_make():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 12, 5000).astype(np.int32)
    tokens[rng.integers(0, 5000, 300)] = SEPARATOR  # documents end anywhere, at the edges of blocks too
    tokens[[0, 1, 1022, 1023, 1024, 4999]] = [3, 4, 5, SEPARATOR, 6, 7]
    tokens = tokens[(tokens >= 0) | (np.roll(tokens, 1) >= 0)]  # no empty ones
    at_once, one_by_one = ChainIndex(), ChainIndex()
    at_once.append_documents(tokens)
    for token in tokens:
        if token == SEPARATOR:
            one_by_one.end_document()
        else:
            one_by_one.append([token])
    (arena, heads, links, length), expected = at_once.state, one_by_one.state
    assert length == expected[3]
    assert np.array_equal(arena[:length], expected[0][:length])
    assert np.array_equal(heads, expected[1])
    assert np.array_equal(links[:length], expected[2][:length])


@pytest.mark.parametrize("period", [1, 2, 50, 3000])
def test_a_context_that_outgrows_every_table_is_still_found(period):
    rng = np.random.default_rng(period)
    tokens = np.tile(rng.integers(0, 30_000, period), 9000 // period).astype(np.int32)
    index = ChainIndex()
    for piece in np.array_split(tokens, 11):
        index.append(piece)
    matches = find(index, max_ngram=64, max_links=1 << 16)
    stream = index.tokens.tolist()
    expected = dict(find_by_scan(stream, stream, max_ngram=64))
    assert matches[0] == (len(index) - period, min(64, tokens.size - period))
    assert all(expected[position] == length for position, length in matches)


def test_no_match_crosses_from_one_document_into_the_next():
    index = index_of([[1, 2], [3, 4], [1, 2]])
    assert find(index) == []  # 3 stands behind "1 2", but in another document
    assert find(index, [2, 3]) == [(5, 1)]


def test_a_capped_index_forgets_the_oldest_and_answers_for_the_rest():
    rng = np.random.default_rng(0)
    index = ChainIndex(max_tokens=1024)
    for size in [1000, 30, 500, 3000, 1, 512, 700]:
        index.append(rng.integers(0, 20, size))
        index.end_document()
        assert len(index) <= 1024
    index.append([5])
    stream = index.tokens.tolist()
    assert find(index, **NO_LIMIT) == find_by_scan(stream, stream)


def test_a_tree_grown_after_the_arena_moved_or_forgot_is_that_of_a_new_index():
    rng, capped, text = np.random.default_rng(0), ChainIndex(max_tokens=4096), []
    for _ in range(60):
        piece = rng.integers(0, 500, 200).tolist()
        capped.append(piece)
        text += piece
        fresh = ChainIndex()
        fresh.append(text[-(len(capped) - 1) :])
        ours, theirs = (grow_trie([index], HitRates(), 12) for index in (capped, fresh))
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.parents.tolist() == theirs.parents.tolist()


def test_memory_follows_the_content_and_not_the_vocabulary():
    small, large = ChainIndex(), ChainIndex()
    small.append([HUGE] * 100)
    large.append(np.arange(100_000) * 21_000)
    sizes = [sum(each.nbytes for each in index.state[:3]) for index in (small, large)]
    assert sizes[0] < 64 * 1024
    assert sizes[1] < 100 * 100_000


@pytest.mark.parametrize("tokens", [[], [7], [0], [HUGE]])
def test_nothing_is_found_where_nothing_repeats(tokens):
    index = ChainIndex()
    index.append(tokens)
    assert find(index) == []
    assert find(index, []) == []
    assert grow_trie([index], HitRates(), 8) is None


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([-1], ValueError),
        ([3, -7], ValueError),
        ([2**31], ValueError),
        ([[1, 2]], ValueError),
        ([0.5], TypeError),
        (["a"], TypeError),
        ([True], TypeError),
        (np.array([1, -1], np.int32), ValueError),
    ],
)
def test_what_is_no_token_is_refused_and_leaves_the_index_as_it_was(tokens, error):
    index = ChainIndex()
    with pytest.raises(error):
        index.append(tokens)
    assert len(index) == 1


def test_options_out_of_range_are_refused_by_name():
    index = index_of([[1, 1]])
    with pytest.raises(ValueError, match="max_tokens"):
        ChainIndex(max_tokens=10)
    with pytest.raises(TypeError, match="int32"):
        index.append_documents(np.array([1, 2]))


@given(few_documents, st.one_of(st.none(), tokens_of), st.integers(1, 40))
def test_a_tree_holds_what_followed_and_nothing_else_likeliest_path_first(documents, context, room):
    index = index_of(documents)
    grown = grow_trie([index], HitRates(), room, context=context, bounds=(1, 16, 1 << 12))
    stream = index.tokens.tolist()
    tail = stream if context is None else context
    matches = [position for position, length in find_by_scan(stream, tail, max_ngram=16)]
    if not matches or not tail or tail[-1] < 0:
        assert grown is None
        return
    assert grown.tokens[0] == tail[-1]
    assert 1 < len(grown.tokens) <= room + 1
    followed = [tuple(continuation(stream, each, room, is_open=context is None)) for each in matches]
    walked = paths(grown.tokens, grown.parents)
    assert len(set(walked)) == len(walked)
    for path in walked:
        assert any(path == each[: len(path)] for each in followed)
    check_order(grown)


def check_order(grown: search.Trie) -> None:
    """Likeliest to be reached first, a parent before its children, and no more chance than there is."""
    siblings: dict[int, list[float]] = {}
    reach = [1.0]
    for node in range(1, len(grown.tokens)):
        parent = int(grown.parents[node])
        assert parent < node
        reach.append(reach[parent] * float(grown.probabilities[node]))
        assert reach[-1] <= reach[-2] * 1.00001
        siblings.setdefault(parent, []).append(float(grown.probabilities[node]))
    for chances in siblings.values():
        assert chances == sorted(chances, reverse=True)
        assert 0.0 < sum(chances) <= 1.0
        assert len(chances) <= RANKS


@given(few_documents, st.integers(1, 12))
def test_a_smaller_tree_holds_the_likeliest_nodes_of_a_larger_one(documents, room):
    index = index_of(documents)
    small, large = grow_trie([index], HitRates(), room), grow_trie([index], HitRates(), 200)
    if large is None:
        assert small is None
        return
    reach = np.ones(len(large.tokens))
    for node in range(1, len(reach)):
        reach[node] = reach[large.parents[node]] * large.probabilities[node]
    kept = np.ones(len(small.tokens))
    for node in range(1, len(kept)):
        kept[node] = kept[small.parents[node]] * small.probabilities[node]
    assert set(paths(small.tokens, small.parents)) <= set(paths(large.tokens, large.parents))
    np.testing.assert_allclose(np.sort(kept)[::-1], np.sort(reach)[::-1][: len(kept)], rtol=1e-5)


def test_occurrences_that_agree_make_a_continuation_likelier():
    once, thrice = ChainIndex(), ChainIndex()
    once.append([1, 2, 9, 1])
    thrice.append([1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2, 9, 1])
    one, three = grow_trie([once], HitRates(), 1), grow_trie([thrice], HitRates(), 1)
    assert one.tokens[1] == three.tokens[1] == 2
    assert three.probabilities[1] > one.probabilities[1]


def test_a_loop_is_continued_as_a_loop():
    index = ChainIndex()
    index.append([4, 5, 6] * 5)
    grown = grow_trie([index], HitRates(), 7)
    assert grown.tokens.tolist() == [6, 4, 5, 6, 4, 5, 6, 4]


def chain_tree(tokens: list[int], feature: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = len(tokens)
    parents = np.maximum(np.arange(n) - 1, 0).astype(np.int32)
    return parents, np.array(tokens, np.int32), np.full(n, feature, np.int32)


def test_a_hit_rate_starts_at_its_guess_and_ends_at_what_was_seen():
    rates = HitRates()
    feature, kin = 0, feature_of_match(2, 1, 0)
    tree = chain_tree([0, 5], feature)
    assert hits.hit_rate(rates.table, feature, 1) == rates.prior[feature]
    rng = np.random.default_rng(0)
    for hit in rng.random(3000) < 0.97:
        rates.learn(*tree, np.array([5 if hit else 6], np.int32))
    assert hits.hit_rate(rates.table, feature, 1) == pytest.approx(0.97, abs=0.04)
    assert rates.table[feature, 2] < 400
    assert rates.table[kin, 0] == rates.prior[kin]  # its own counts are untouched


def test_what_is_learned_of_a_candidate_moves_others_of_its_kind_alone():
    rates = HitRates()
    short, kin, copy = (feature_of_match(length, rank, 0) for length, rank in ((1, 0), (3, 2), (16, 0)))
    for _ in range(40):
        rates.learn(*chain_tree([0, 5], short), np.array([5], np.int32))
    assert hits.hit_rate(rates.table, kin, 2) > 1.1 * rates.prior[kin]
    assert hits.hit_rate(rates.table, copy, 1) == rates.prior[copy]


def test_promises_come_true_whatever_the_rates_of_candidates_are():
    rng, rates = np.random.default_rng(1), HitRates()
    features = [feature_of_match(length, rank, 0) for length in (1, 3, 8, 20) for rank in (0, 1)]
    truth = rng.uniform(0.05, 0.95, len(features))
    promised = kept = 0.0
    for step in range(4000):
        at = int(rng.integers(len(features)))
        hit = rng.random() < truth[at]
        if step >= 1000:
            promised, kept = promised + hits.hit_rate(rates.table, features[at], 1), kept + hit
        rates.learn(*chain_tree([0, 5], features[at]), np.array([5 if hit else 6], np.int32))
    assert promised == pytest.approx(kept, rel=0.03)


def test_a_candidate_counts_only_once_its_parent_was_emitted():
    rates = HitRates()
    rates.learn(*chain_tree([0, 5, 6, 7], 3), np.array([5, 9], np.int32))
    assert rates.table[3, 1:].tolist() == [1.0, 2.0]  # 5 hit, 6 missed, 7 was never tried


def test_the_first_guess_falls_with_the_rank_and_grows_with_the_match():
    lengths, ranks = (1, 2, 3, 4, 5, 7, 10, 16, 24), range(RANKS)
    rates = HitRates()
    for support in range(15):
        prior = np.array([[rates.prior[feature_of_match(n, r, support)] for r in ranks] for n in lengths])
        assert (np.diff(prior[:, 0]) > 0).all()
        assert (np.diff(prior, axis=1) < 0).all()
    assert ((rates.prior > 0) & (rates.prior < 1)).all()


def test_without_compilation_the_cores_give_the_same():
    script = (
        "import numpy as np\n"
        "from lookahead.ngram.chains import ChainIndex\n"
        "from lookahead.ngram.hit_rates import HitRates\n"
        "from lookahead.ngram.search import Search\n"
        "index, rates = ChainIndex(), HitRates()\n"
        "index.append([1, 2, 3, 2147483647, 1, 2, 4, 1, 2, 3, 5, 1, 2])\n"
        "for _ in range(3):\n"
        "    grown = Search([index], rates, None, (1, 16, 32)).grow(9)\n"
        "    rates.learn(grown.parents, grown.tokens, grown.features, np.array([3, 5], np.int32))\n"
        "    index.append([3, 5])\n"
        "    print(grown.tokens.tolist(), grown.parents.tolist(), np.round(grown.probabilities, 5).tolist())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", script],
            cwd=ROOT,
            env={**os.environ, "NUMBA_DISABLE_JIT": switch},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for switch in ("0", "1")
    ]
    assert outputs[0] == outputs[1] != ""
