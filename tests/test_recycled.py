"""The target's memory against a dictionary that forgets nothing, and what it adds to a tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.memory_file import MemoryHeader, Records, aged, read_memory, records_of, table_of
from lookahead.ngram.search import Search, Trie
from lookahead.ngram.successors import SuccessorTable, store_tree
from lookahead.proposers.memory_files import EMPTY, merge_into
from lookahead.proposers.ngram import Memory, NgramProposer
from tests.support.index_queries import find_recycled, grow_trie
from tests.support.naive_index import RecycledByDict

HUGE = 2**31 - 1
token = st.sampled_from([0, 1, 2, HUGE])


@st.composite
def lessons(draw):
    """Tokens before, a tree, and eight successors after each node, with falling chances."""
    before = draw(st.lists(token, min_size=1, max_size=6))
    size = draw(st.integers(1, 6))
    parents = [0] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    tokens = [before[-1]] + [draw(token) for _ in range(1, size)]
    top = [draw(st.permutations(range(8))) for _ in range(size)]
    chances = [sorted(draw(st.lists(st.floats(0, 1), min_size=8, max_size=8)), reverse=True) for _ in range(size)]
    return before, parents, tokens, top, chances


def teach(table: SuccessorTable, lesson) -> None:
    before, parents, tokens, top, chances = lesson
    arrays = [np.array(part, np.int32) for part in (before, parents, tokens, top)]
    table.store(*arrays, np.array(chances, np.float32))


@given(st.lists(lessons(), max_size=6), st.lists(token, max_size=6))
def test_the_longest_known_context_gives_what_was_stored_last(taught, context):
    table, everything = SuccessorTable(contexts=1 << 14), RecycledByDict()
    for lesson in taught:
        teach(table, lesson)
        everything.store(*lesson)
    order, tokens, chances = find_recycled(table, context)
    known, expected, expected_chances = everything.find(context)
    assert (order, tokens) == (known, list(expected))
    np.testing.assert_allclose(chances, expected_chances, atol=1e-5)


@given(st.lists(lessons(), min_size=1, max_size=8), st.lists(token, max_size=6))
def test_a_full_table_forgets_but_never_mixes_contexts(taught, context):
    table, everything = SuccessorTable(contexts=8), RecycledByDict()
    size = table.entries.nbytes
    for lesson in taught:
        teach(table, lesson)
        everything.store(*lesson)
    order, tokens, _ = find_recycled(table, context)
    assert table.entries.nbytes == size
    assert order <= everything.find(context)[0]
    if order:
        assert tokens == list(everything.successors[tuple(context[len(context) - order :])][0])


def chain(table: SuccessorTable, context: list[int], top: list[int], chances: list[float]) -> None:
    """Teach what follows one context."""
    teach(table, (context, [0], context[-1:], [top], [chances]))


def test_the_oldest_context_of_a_set_gives_way():
    table = SuccessorTable(contexts=4)
    for context in ([1], [2], [3], [4], [1], [5]):
        chain(table, context, list(range(10, 18)), [0.1] * 8)
    assert [find_recycled(table, [each])[0] for each in (1, 2, 3, 4, 5)] == [1, 0, 1, 1, 1]


def test_nothing_is_kept_after_nodes_that_are_skipped():
    table, tokens = SuccessorTable(contexts=64), np.array([1, 2, 3], np.int32)
    top, chances = np.tile(np.arange(8, dtype=np.int32), (3, 1)), np.full((3, 8), 0.1, np.float32)
    skipped = np.array([False, True, False])
    parents = np.array([0, 0, 1], np.int32)
    store_tree((table.entries, table.now), tokens[:1], (parents, tokens, top, chances), skipped)
    assert [find_recycled(table, tokens[: n + 1])[0] for n in range(3)] == [1, 0, 3]


def test_a_tree_grows_from_what_the_target_thought_likely():
    table = SuccessorTable(contexts=64)
    chain(table, [7], [8, 9, 1, 2, 3, 4, 5, 6], [0.8, 0.1, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01])
    chain(table, [7, 8], [9, 7, 1, 2, 3, 4, 5, 6], [0.9, 0.05, 0.01, 0.01, 0.01, 0.01, 0.0, 0.0])
    grown = grow_trie([], HitRates(), 2, memory=table, context=[7])
    assert grown.tokens.tolist() == [7, 8, 9]
    assert grown.parents.tolist() == [0, 0, 1]
    assert grown.sources.tolist() == [0, 1, 1]


def test_what_text_and_memory_both_offer_is_one_node_likelier_than_either():
    table, text = SuccessorTable(contexts=64), ChainIndex()
    text.append([6, 2, 3, 4, 5, 1, 2])
    chain(table, [1, 2], [3, 9, 10, 11, 12, 13, 14, 15], [0.8, 0.1, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01])
    both = grow_trie([text], HitRates(), 1, memory=table)
    text_alone = grow_trie([text], HitRates(), 1)
    memory_alone = grow_trie([], HitRates(), 1, memory=table, context=[1, 2])
    assert both.tokens.tolist() == text_alone.tokens.tolist() == memory_alone.tokens.tolist() == [2, 3]
    assert both.sources.tolist() == [0, 0b11]
    assert both.probabilities[1] > max(text_alone.probabilities[1], memory_alone.probabilities[1])


@pytest.mark.parametrize("matched", [2, 3, 5, 9, 20])
def test_a_match_is_worth_what_the_target_last_said_after_the_same_words(matched):
    words, rest = list(range(100, 100 + matched)), list(range(20, 27))
    promised = []
    for top in ([3, *rest], [*rest[:3], 3, *rest[3:]][:8], [19, *rest]):
        table, text = SuccessorTable(contexts=64), ChainIndex()
        text.append([6, *words, 3, 4, 5, *words])
        chain(table, words[-4:], top, [0.9, 0.05, 0.01, 0.01, 0.01, 0.01, 0.0, 0.0])
        grown = grow_trie([text], HitRates(), 12, memory=table)
        promised.append(grown.probabilities[(grown.tokens == 3) & (grown.parents == 0)].item())
    text = ChainIndex()
    text.append([6, *words, 3, 4, 5, *words])
    promised.insert(1, grow_trie([text], HitRates(), 1).probabilities[1].item())
    surely, unsaid, late, never = promised
    assert surely >= 0.95 * unsaid
    assert unsaid > max(late, never)


def test_a_vocabulary_of_fewer_tokens_leaves_places_empty():
    table = SuccessorTable(contexts=64)
    chain(table, [0], [1, 0, -1, -1, -1, -1, -1, -1], [0.7, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    grown = grow_trie([], HitRates(), 20, memory=table, context=[0])
    assert set(grown.tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("contexts", [0, 2, 13, -4])
def test_a_number_of_contexts_that_does_not_fill_sets_is_refused(contexts):
    with pytest.raises(ValueError, match="a multiple of 4"):
        SuccessorTable(contexts=contexts)


def test_successors_that_do_not_fit_the_tree_are_refused():
    with pytest.raises(ValueError, match="8 successors each"):
        teach(SuccessorTable(contexts=64), ([1], [0], [1], [[1, 2, 3]], [[0.5, 0.3, 0.2]]))


def records_after(*context: int) -> Records:
    """What a file keeps of a model that met a context."""
    table = table_of(EMPTY, 256)
    teach(table, (context, [0], context[-1:], [range(8)], [[0.5] * 8]))
    return records_of(table, 101)[0]


def test_a_context_never_met_again_stays_as_it_was_through_many_merges():
    records = records_after(5, 9)
    known = find_recycled(table_of(records), [5, 9])
    for _ in range(300):
        records = aged(records)
    assert known[0] == 2 and find_recycled(table_of(records), [5, 9]) == known


def test_a_full_file_forgets_what_was_learned_longest_ago(tmp_path):
    path, header = str(tmp_path / "small.lkm"), MemoryHeader(77, 101, 0, max_contexts=4)
    for token in range(5, 25):
        merge_into(path, header, records_after(token))
    table = table_of(read_memory(path)[1])
    assert [token for token in range(5, 25) if find_recycled(table, [token])[0]] == [21, 22, 23, 24]


def test_what_this_request_taught_goes_before_a_longer_context_that_another_taught():
    memory, root, probs = Memory(), np.zeros(1, np.int32), np.full((1, 8), 0.1, np.float32)

    def teach_after(context: list[int], first: int) -> None:
        before = np.array(context, np.int32)
        memory.recycled.store(before, root, before[-1:], np.arange(first, first + 8, dtype=np.int32)[None], probs)

    teach_after([1, 2, 3], first=50)
    proposer = NgramProposer(["recycled"], memory)
    proposer.start(0, np.array([1, 2, 3], np.int32))
    assert proposer.propose(0, 4).tokens[1] == 50
    teach_after([9, 2, 3], first=60)
    assert proposer.propose(0, 4).tokens[1] == 60
    proposer.start(1, np.array([1, 2, 3], np.int32))  # to a later request both are foreign
    assert proposer.propose(1, 4).tokens[1] == 50


def test_short_matches_in_other_texts_are_left_to_the_recycled_tokens():
    memory = Memory()
    memory.outputs.append([7, 8, 9, 20])
    for sources, offers in ((["prompt", "outputs"], True), (["prompt", "outputs", "recycled"], False)):
        proposer = NgramProposer(sources, memory)
        for row, (prompt, is_long) in enumerate((([1, 8, 9], False), ([7, 8, 9], True))):
            proposer.start(row, np.array(prompt, np.int32))
            proposal = proposer.propose(row, 4)
            assert (proposal is not None and 20 in proposal.tokens) == (offers or is_long)


@pytest.mark.parametrize("vocabulary", [3, 12, 200])
def test_a_tree_has_the_likeliest_nodes_of_a_larger_one(vocabulary):
    rng = np.random.default_rng(vocabulary)
    for _ in range(20):
        texts, memory = [ChainIndex(), ChainIndex()], SuccessorTable(1024)
        for text in texts:
            text.append(rng.integers(0, vocabulary, 200).astype(np.int32))
        tokens = rng.integers(0, vocabulary, 150).astype(np.int32)
        chances = -np.sort(-rng.dirichlet(np.ones(8), 150).astype(np.float32))
        tops = np.array([rng.permutation(vocabulary + 8)[:8] for _ in tokens], np.int32)
        memory.store(tokens[:1], np.arange(-1, 149, dtype=np.int32).clip(0), tokens, tops, chances)
        search = Search(texts, HitRates(), memory, (1, 16, 32))
        whole = path_probs_of(search.grow(400))
        assert len(whole) > 20
        for nodes in (1, 2, 5, 16, 33, 64):
            assert path_probs_of(search.grow(nodes)) == pytest.approx(whole[: nodes + 1], rel=1e-5)


def path_probs_of(trie: Trie) -> list[float]:
    """The probability of each node of a tree to be reached."""
    path_probs = trie.probabilities.astype(np.float64)
    for node in range(1, len(path_probs)):
        path_probs[node] *= path_probs[trie.parents[node]]
    return path_probs.tolist()
