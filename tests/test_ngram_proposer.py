"""Drafts from text and memory: what is offered, what is learned, what is kept apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.drafting.proposal import Feedback, Proposal, Top
from lookahead.drafting.select import merge
from lookahead.drafting.tree import TokenTree
from lookahead.ngram.chains import ChainIndex, LiveOutputs
from lookahead.ngram.hit_rates import HitRates
from lookahead.ngram.prune import Limits
from lookahead.proposers.ngram import Memory, NgramProposer
from tests.support.index_queries import find, find_recycled, grow_trie

NOTHING = np.zeros(0, np.int32)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def accepted_path(proposal: Proposal, output: np.ndarray) -> list[int]:
    """The nodes a target that says `output` would accept."""
    path = [0]
    for token in output:
        children = [
            node
            for node in range(1, len(proposal.tokens))
            if proposal.parents[node] == path[-1] and proposal.tokens[node] == token
        ]
        if not children:
            break
        path.append(children[0])
    return path


def replay(proposer: NgramProposer, prompt: np.ndarray, output: np.ndarray, room: int, row: int = 0) -> list[int]:
    """Decode `output` as a target that says just that; returns the tokens each step emitted."""
    proposer.start(row, prompt)
    emitted, at = [], 0
    while at < len(output):
        proposal = proposer.propose(row, room)
        path = [0] if proposal is None else accepted_path(proposal, output[at:-1])
        tokens = output[at : at + len(path)]
        placed = NOTHING if proposal is None else np.arange(len(proposal.tokens), dtype=np.int32)
        proposer.observe(row, Feedback(tokens, np.array(path, np.int32), NOTHING), placed)
        emitted.append(len(tokens))
        at += len(tokens)
    proposer.finish(row)
    return emitted


def test_it_offers_what_followed_the_last_tokens_before():
    proposer = NgramProposer(["prompt"])
    proposer.start(0, ids(3, 4, 5, 6, 9, 3, 4))
    proposal = proposer.propose(0, 3)
    assert proposal.tokens.tolist() == [4, 5, 6, 9]
    assert proposal.parents.tolist() == [0, 0, 1, 2]
    assert proposal.probabilities[0] == 1.0
    assert proposal.required == 0


def test_it_offers_several_continuations_the_one_behind_the_longer_match_first():
    proposer = NgramProposer(["prompt"])
    proposer.start(0, ids(8, 1, 2, 7, 5, 2, 6, 1, 2))
    proposal = proposer.propose(0, 20)
    children = proposal.tokens[1:][proposal.parents[1:] == 0]
    assert children.tolist() == [7, 6]


def test_tokens_just_emitted_are_found_in_the_next_step():
    proposer = NgramProposer(["prompt"])
    proposer.start(0, ids(1))
    assert proposer.propose(0, 4) is None
    proposer.observe(0, Feedback(ids(2, 3, 1), ids(0), NOTHING), NOTHING)
    assert proposer.propose(0, 2).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("step", [1, 7, 1500])
@pytest.mark.parametrize("sources", [["prompt"], ["outputs"]], ids="+".join)
def test_however_long_an_output_gets_all_of_it_is_found(sources: list[str], step: int) -> None:
    proposer, text = NgramProposer(sources), np.arange(3000, dtype=np.int32)
    proposer.start(0, ids(5000))
    for begin in range(0, text.size, step):
        proposer.observe(0, Feedback(text[begin : begin + step], ids(0), NOTHING), NOTHING)
    if sources == ["outputs"]:
        proposer.finish(0)
        proposer.start(0, ids(5000))
    for at in (3, 1020, 1030, 2997):
        proposer.observe(0, Feedback(text[at : at + 1], ids(0), NOTHING), NOTHING)
        assert proposer.propose(0, 1).tokens.tolist() == [at, at + 1]


def test_an_exact_copy_comes_in_long_and_certain_chains():
    rng = np.random.default_rng(0)
    proposer = NgramProposer(["prompt"])
    for _ in range(12):
        text = rng.permutation(2000)[:120].astype(np.int32)
        emitted = replay(proposer, np.append(text, text[0]), text[1:], room=16)
    assert max(emitted) == 17
    proposer.start(0, np.append(text, text[:20]))
    chain = proposer.propose(0, 16)
    assert chain.parents.tolist() == [0, *range(16)]
    assert chain.probabilities[1:].min() > 0.95


def test_a_target_that_never_copies_makes_it_cautious():
    rng = np.random.default_rng(0)
    proposer = NgramProposer(["prompt"])
    prompt = rng.integers(0, 40, 400).astype(np.int32)
    proposer.start(0, prompt)
    first = proposer.propose(0, 1).probabilities[1]
    proposer.finish(0)
    laps = [40 + np.arange(29) * stride % 29 for stride in range(1, 29)]  # no token ever has the same successor
    replay(proposer, prompt, np.concatenate(laps).astype(np.int32), room=4)
    proposer.start(0, prompt)
    assert proposer.propose(0, 1).probabilities[1] < first


def test_what_one_row_learns_about_certainty_serves_the_others_but_its_tokens_do_not():
    proposer = NgramProposer(["prompt"])
    proposer.start(1, ids(1, 2, 3, 1))
    before = proposer.propose(1, 1)
    rng = np.random.default_rng(0)
    text = rng.permutation(500)[:100].astype(np.int32)
    for token in range(0, 99, 3):  # many short copies, all right
        replay(proposer, ids(int(text[token]), 999, int(text[token])), ids(999), room=1, row=token + 2)
    after = proposer.propose(1, 1)
    assert after.tokens.tolist() == before.tokens.tolist() == [1, 2]
    assert after.probabilities[1] > before.probabilities[1]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 12),
)
def test_every_offer_is_a_tree_within_its_room_and_the_output_is_the_targets(prompt, output, room):
    proposer = NgramProposer(["prompt"])
    proposer.start(0, np.array(prompt, np.int32))
    root, rest = prompt[-1], list(output)
    while rest:
        proposal = proposer.propose(0, room)
        path = [0]
        if proposal is not None:
            TokenTree.from_parents(proposal.tokens, proposal.parents)  # raises on a malformed tree
            assert proposal.tokens[0] == root
            assert 1 <= len(proposal.tokens) - 1 <= room
            assert ((proposal.probabilities > 0) & (proposal.probabilities <= 1)).all()
            path = accepted_path(proposal, np.array(rest[:-1], np.int32))
        tokens = np.array(rest[: len(path)], np.int32)
        proposer.observe(0, Feedback(tokens, np.array(path, np.int32), NOTHING), NOTHING)
        root, rest = rest[len(path) - 1], rest[len(path) :]


def test_a_perfect_echo_takes_few_steps_and_a_stranger_one_a_token():
    text = np.random.default_rng(1).permutation(300).astype(np.int32)
    assert len(replay(NgramProposer(["prompt"]), text, text[:200], room=16)) < 20
    assert replay(NgramProposer(["prompt"]), text, np.arange(1000, 1050, dtype=np.int32), room=16) == [1] * 50


def test_a_finished_row_leaves_its_number_free():
    proposer = NgramProposer(["prompt"])
    proposer.start(0, ids(1, 2, 1))
    proposer.finish(0)
    proposer.start(0, ids(5))
    assert proposer.propose(0, 8) is None


def test_what_a_finished_row_wrote_serves_the_next_where_memory_is_shared():
    memory = Memory()
    first = NgramProposer(["outputs"], memory)
    first.start(0, ids(1, 2))
    first.observe(0, Feedback(ids(3, 4, 5), ids(0), NOTHING), NOTHING)
    first.finish(0)
    for later, expected in [(NgramProposer(["outputs"], memory), [3, 4, 5]), (NgramProposer(["outputs"]), None)]:
        later.start(0, ids(9, 3))
        proposal = later.propose(0, 2)
        assert (None if proposal is None else proposal.tokens.tolist()) == expected


def test_rows_of_one_call_draft_from_each_other_while_they_are_written():
    text = list(range(20, 60))
    for sources in (["prompt", "outputs"], ["outputs"]):
        proposer = NgramProposer(sources)
        outputs_bit = 1 << proposer.sources.index("outputs")
        for row in (3, 1):
            proposer.start(row, ids(9, *text[:5]))
        for at in range(5, 35, 3):  # row 3 is ahead of row 1
            proposer.observe(3, Feedback(ids(*text[at : at + 3]), ids(0), NOTHING), NOTHING)
            behind = proposer.propose(1, 3)
            assert behind.tokens.tolist() == text[at - 1 : at + 3]
            assert set(behind.sources[1:].tolist()) == {outputs_bit}
            proposer.observe(1, Feedback(ids(*text[at : at + 3]), ids(0), NOTHING), NOTHING)
        proposer.finish(1)
        proposer.start(1, ids(9, *text[:5]))
        assert proposer.propose(1, 12).tokens.tolist() == text[4:17]


def test_what_a_row_wrote_itself_is_not_found_again_among_the_rows_beside_it():
    proposer = NgramProposer(["prompt", "outputs"])
    for row in (0, 1):
        proposer.start(row, ids(7))
    for row, expected in ((0, 0b01), (1, 0b11)):  # both write the same
        proposer.observe(row, Feedback(ids(*range(20, 60), *range(20, 30)), ids(0), NOTHING), NOTHING)
        assert proposer.propose(row, 10).sources[1:].tolist() == [expected] * 10


def test_rows_of_other_calls_do_not_draft_from_a_row_before_it_ends():
    memory = Memory()
    first, second = NgramProposer(["outputs"], memory), NgramProposer(["outputs"], memory)
    for proposer, row in ((first, 0), (first, 1), (second, 0)):
        proposer.start(row, ids(7))
    first.observe(0, Feedback(ids(8, 9), ids(0), NOTHING), NOTHING)
    assert second.propose(0, 2) is None
    first.finish(0)
    assert second.propose(0, 2).tokens.tolist() == [7, 8, 9]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 150)), max_size=25),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_documents_that_grow_in_any_order_are_found_as_if_each_were_whole(steps, reader, random):
    live, texts = LiveOutputs(), dict[int, list[int]]()
    for row, size in steps:
        if size < 0:
            live.end(row)
            texts.pop(row, None)
            continue
        new = [random.randrange(30) for _ in range(size)]
        live.extend(row, ids(*new))
        texts.setdefault(row, []).extend(new)
    assert {row: live.chains.tokens[slice(*live.span_of(row))].tolist() for row in range(4)} == {
        row: texts.get(row, []) for row in range(4)
    }
    assert len(live.chains) <= 4 * sum(map(len, texts.values())) + 64 * 8, "what was left is used again"
    whole = ChainIndex()
    for text in texts.values():
        whole.end_document()
        whole.append(text)
    context = [*texts.get(reader, []), 5, 6]
    found = [
        sorted((index.tokens[position], length) for position, length in find(index, context, max_links=9999))
        for index in (live.chains, whole)
    ]
    assert found[0] == found[1]


def test_what_the_target_thought_along_the_draft_is_offered():
    proposer = NgramProposer(["recycled"])
    proposer.start(0, ids(7))
    assert proposer.propose(0, 4) is None
    chances = np.tile(np.array([0.9, 0.05, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005], np.float32), (3, 1))
    top = np.array([[8, *range(20, 27)], [7, *range(20, 27)], [8, *range(20, 27)]], np.int32)
    draft = TokenTree.from_parents([7, 8, 7], [0, 0, 1])
    proposer.observe(0, Feedback(ids(8, 7, 8), ids(0, 1, 2), NOTHING, Top(draft, top, chances)), NOTHING)
    assert proposer.propose(0, 3).tokens.tolist() == [8, 7, 8, 7]


def test_each_node_tells_which_sources_offered_it():
    memory = Memory()
    memory.outputs.append(ids(1, 2, 3, 4))
    proposer = NgramProposer(["prompt", "outputs"], memory)
    proposer.start(0, ids(1, 2, 3, 9, 1, 2))
    proposal = proposer.propose(0, 12)
    children = proposal.parents == 1
    assert (proposal.tokens[1], proposal.sources[1]) == (3, 0b11)
    assert dict(zip(proposal.tokens[children], proposal.sources[children], strict=True)) == {9: 0b01, 4: 0b10}


def test_what_is_less_likely_than_the_options_allow_is_not_offered():
    likely = []
    for least in (0.0, 0.3):
        proposer = NgramProposer(["prompt"], min_probability=least)
        proposer.start(0, ids(1, 2, 3, 1, 2, 4, 1, 2))
        likely.append(merge(2, [proposer.propose(0, 20)], Limits(20, 20)).path_probs)
    assert likely[0].min() < 0.3 <= likely[1].min()
    assert 1 < len(likely[1]) < len(likely[0])


def test_what_other_texts_offer_leaves_the_promise_of_the_rows_own_text_alone():
    own, other = ChainIndex(), ChainIndex()
    own.append([7, 1, 2, 3, 7])
    other.append([5, 7, 8, 5, 7, 9, 5, 7])
    alone = grow_trie([own], HitRates(), 8)
    beside = grow_trie([own, other], HitRates(), 8)

    def chance_of(tree, token):
        return float(tree.probabilities[np.flatnonzero((tree.tokens == token) & (tree.parents == 0))[0]])

    assert chance_of(beside, 1) == pytest.approx(chance_of(alone, 1))


def test_another_text_that_the_rows_own_contradicts_is_hardly_believed():
    shared, memory = list(range(10, 40)), Memory()
    memory.outputs.append(ids(*shared, 7, 8, 9))
    own = NgramProposer(["prompt", "outputs"], memory)
    own.start(0, ids(*shared, 5, 6, 3, *shared))
    contradicted = own.propose(0, 40)
    own.start(1, ids(39, 5, 6, 3, *shared))
    longer = own.propose(1, 40)
    first, second = (
        {int(offer.tokens[node]): float(offer.probabilities[node]) for node in np.flatnonzero(offer.parents == 0)[1:]}
        for offer in (contradicted, longer)
    )
    assert first[5] > 0.8
    assert first.get(7, 0.0) < 0.1
    assert second[7] > 0.5, "the row's own match is of a single token here"


def test_what_the_target_copies_from_the_rows_own_text_is_not_kept_for_other_texts():
    text, memory = list(range(10, 40)), Memory()
    proposer = NgramProposer(["prompt", "recycled"], memory)
    proposer.start(0, ids(*text, 3, *text[:10]))
    proposal = proposer.propose(0, 4)
    tree = TokenTree.from_parents(proposal.tokens, proposal.parents)
    assert tree.tokens.tolist() == [19, 20, 21, 22, 23]
    departs = 2  # after this node the target says something else
    top = np.tile(np.arange(50, 58, dtype=np.int32), (5, 1))
    top[:, 0] = [20, 21, 60, 23, 24]
    chances = np.full((5, 8), 0.1, np.float32)
    feedback = Feedback(ids(20, 21, 60), np.arange(3, dtype=np.int32), NOTHING, Top(tree, top, chances))
    proposer.observe(0, feedback, np.arange(5, dtype=np.int32))
    known = [find_recycled(memory.recycled, tree.tokens[: node + 1])[0] for node in range(5)]
    assert [order > 0 for order in known] == [node == departs for node in range(5)]
