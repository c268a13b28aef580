"""Drafts from the prompt: what is offered, what is learned, what is kept apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.proposers.base import Outcome, Proposal
from lookahead.proposers.prompt import PromptProposer
from lookahead.tree import TokenTree

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


def replay(proposer: PromptProposer, prompt: np.ndarray, output: np.ndarray, room: int, row: int = 0) -> list[int]:
    """Decode `output` as a target that says just that; returns the tokens each step emitted."""
    proposer.start(row, prompt)
    emitted, at = [], 0
    while at < len(output):
        proposal = proposer.propose(row, room)
        path = [0] if proposal is None else accepted_path(proposal, output[at:-1])
        tokens = output[at : at + len(path)]
        placed = NOTHING if proposal is None else np.arange(len(proposal.tokens), dtype=np.int32)
        proposer.observe(row, Outcome(tokens, np.array(path, np.int32), NOTHING), placed)
        emitted.append(len(tokens))
        at += len(tokens)
    proposer.finish(row)
    return emitted


def test_it_offers_what_followed_the_last_tokens_before():
    proposer = PromptProposer()
    proposer.start(0, ids(3, 4, 5, 6, 9, 3, 4))
    proposal = proposer.propose(0, 3)
    assert proposal.tokens.tolist() == [4, 5, 6, 9]
    assert proposal.parents.tolist() == [0, 0, 1, 2]
    assert proposal.probabilities[0] == 1.0
    assert proposal.required == 0


def test_it_offers_several_continuations_the_one_behind_the_longer_match_first():
    proposer = PromptProposer()
    proposer.start(0, ids(8, 1, 2, 7, 5, 2, 6, 1, 2))
    proposal = proposer.propose(0, 20)
    children = proposal.tokens[1:][proposal.parents[1:] == 0]
    assert children.tolist() == [7, 6]


def test_tokens_just_emitted_are_found_in_the_next_step():
    proposer = PromptProposer()
    proposer.start(0, ids(1))
    assert proposer.propose(0, 4) is None
    proposer.observe(0, Outcome(ids(2, 3, 1), ids(0), NOTHING), NOTHING)
    assert proposer.propose(0, 2).tokens.tolist() == [1, 2, 3]


def test_an_exact_copy_comes_in_long_and_certain_chains():
    rng = np.random.default_rng(0)
    proposer = PromptProposer()
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
    proposer = PromptProposer()
    prompt = rng.integers(0, 40, 400).astype(np.int32)
    proposer.start(0, prompt)
    first = proposer.propose(0, 1).probabilities[1]
    proposer.finish(0)
    replay(proposer, prompt, rng.integers(40, 50, 600).astype(np.int32), room=4)
    proposer.start(0, prompt)
    assert proposer.propose(0, 1).probabilities[1] < first


def test_what_one_row_learns_about_certainty_serves_the_others_but_its_tokens_do_not():
    proposer = PromptProposer()
    proposer.start(1, ids(1, 2, 3, 1))
    before = proposer.propose(1, 1)
    rng = np.random.default_rng(0)
    text = rng.permutation(500)[:100].astype(np.int32)
    for token in range(0, 99, 3):  # many short copies, all right
        replay(proposer, ids(int(text[token]), 999, int(text[token])), ids(999), room=1, row=token + 2)
    after = proposer.propose(1, 1)
    assert after.tokens.tolist() == before.tokens.tolist() == [1, 2]
    assert after.probabilities[1] > before.probabilities[1]


def test_matches_shorter_than_the_minimum_are_not_offered():
    prompt = ids(1, 2, 5, 6, 2, 3, 1, 2)
    for min_ngram, expected in [(1, {5, 3}), (2, {5}), (3, None)]:
        proposer = PromptProposer(min_ngram=min_ngram)
        proposer.start(0, prompt)
        proposal = proposer.propose(0, 20)
        offered = None if proposal is None else set(proposal.tokens[1:][proposal.parents[1:] == 0].tolist())
        assert offered == expected


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 12),
    st.tuples(st.integers(1, 4), st.integers(0, 12)),
)
def test_every_offer_is_a_tree_within_its_room_and_the_output_is_the_targets(prompt, output, room, ngrams):
    shortest, more = ngrams
    proposer = PromptProposer(min_ngram=shortest, max_ngram=shortest + more)
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
        proposer.observe(0, Outcome(tokens, np.array(path, np.int32), NOTHING), NOTHING)
        root, rest = rest[len(path) - 1], rest[len(path) :]


def test_a_perfect_echo_takes_few_steps_and_a_stranger_one_a_token():
    text = np.random.default_rng(1).permutation(300).astype(np.int32)
    assert len(replay(PromptProposer(), text, text[:200], room=16)) < 20
    assert replay(PromptProposer(), text, np.arange(1000, 1050, dtype=np.int32), room=16) == [1] * 50


def test_a_finished_row_leaves_its_number_free():
    proposer = PromptProposer()
    proposer.start(0, ids(1, 2, 1))
    proposer.finish(0)
    proposer.start(0, ids(5))
    assert proposer.propose(0, 8) is None


@pytest.mark.parametrize("lengths", [(0, 4), (5, 4), (1, 65), (-1, 3)])
def test_lengths_out_of_range_are_refused(lengths):
    with pytest.raises(ValueError, match="min_ngram <= max_ngram <= 64"):
        PromptProposer(*lengths)
