"""Merging proposals: one trie, best first, under a budget, likeliest path first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from lookahead.drafting.proposal import Proposal
from lookahead.drafting.select import merge
from lookahead.drafting.tree import TokenTree
from lookahead.engine.row import Row, StepOutput
from lookahead.ngram.prune import Limits
from lookahead.verification.rules import StoppingRule, TokenChooser

ROOT = 9


def chain(*tokens: int, p: float = 0.5, required: int = 0) -> Proposal:
    n = len(tokens) + 1
    return Proposal(
        np.array([ROOT, *tokens], np.int32),
        np.maximum(np.arange(n) - 1, 0).astype(np.int32),
        np.array([1.0] + [p] * len(tokens), np.float32),
        required=required,
    )


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """A random trie over few tokens, so that several proposals overlap."""
    tokens, parents, edges = [ROOT], [0], set()
    for _ in range(draw(st.integers(0, 25))):
        edge = (draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3)))
        if edge not in edges:
            edges.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    chances = [1.0] + [draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])) for _ in tokens[1:]]
    required = draw(st.integers(0, 4))
    arrays = np.array(tokens, np.int32), np.array(parents, np.int32), np.array(chances, np.float32)
    return Proposal(*arrays, required=required)


def paths(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """For every node, the tokens from below the root to it."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        found.append((*found[parents[node]], int(tokens[node])))
    return found


@given(st.lists(st.one_of(st.none(), proposals()), max_size=4), st.integers(0, 40), st.integers(0, 8))
def test_a_draft_is_the_best_part_of_the_union_of_all_proposals(offers, budget, max_depth) -> None:
    draft = merge(ROOT, offers, Limits(budget, max_depth, min_probability=0.05))
    tree = draft.tree
    TokenTree.from_parents(tree.tokens, tree.parents)  # raises unless it is a tree without duplicates
    assert len(tree) <= budget + 1
    assert tree.depths.max() <= max_depth

    chance: dict[tuple[int, ...], float] = {(): 1.0}
    required = set()
    for offer in filter(None, offers):
        for node, path in enumerate(paths(offer.tokens, offer.parents)):
            chance[path] = max(chance.get(path, 0.0), float(offer.probabilities[node]))
            if 0 < node < offer.required and len(path) <= max_depth:
                required.add(path)
    reach = {path: np.prod([chance[path[:i]] for i in range(len(path) + 1)]) for path in chance}
    drafted = paths(tree.tokens, tree.parents)
    assert set(drafted) <= set(chance)
    if len(required) <= budget:
        assert required <= set(drafted)
    free = sorted((reach[p] for p in chance if p not in required and p and len(p) <= max_depth), reverse=True)
    room = max(0, budget - len(required))
    expected = [p for p in free if p >= 0.05][:room]
    got = sorted((reach[p] for p in drafted if p not in required and p), reverse=True)
    np.testing.assert_allclose(got, expected, rtol=1e-6)

    for offer, placed in zip(offers, draft.placed, strict=True):
        if offer is not None:
            for path, node in zip(paths(offer.tokens, offer.parents), placed, strict=True):
                assert drafted[node] == (path if path in drafted else ())


def test_the_likeliest_path_is_laid_out_first() -> None:
    unlikely, likely = chain(1, 2, 3, p=0.5), chain(4, 5, 6, p=0.9)
    tree = merge(ROOT, [unlikely, likely], Limits(16, 16)).tree
    assert tree.tokens[:4].tolist() == [ROOT, 4, 5, 6]
    assert tree.parents[:4].tolist() == [0, 0, 1, 2]


def test_a_node_offered_twice_is_one_node_that_remembers_both_sources() -> None:
    draft = merge(ROOT, [chain(1, 2), None, chain(1, 3)], Limits(16, 16))
    assert sorted(draft.tree.tokens[1:].tolist()) == [1, 2, 3]
    shared = draft.placed[0][1]
    assert shared == draft.placed[2][1]
    assert draft.tree.sources[shared] == 0b101


@pytest.mark.parametrize("chances", [(0.9, 0.1), (0.1, 0.9)])
def test_a_node_offered_twice_has_the_higher_of_its_probabilities(chances: tuple[float, float]) -> None:
    offers = [chain(1, p=chance) for chance in chances]
    assert merge(ROOT, [*offers, chain(2, p=0.5)], Limits(1, 16)).tree.tokens.tolist() == [ROOT, 1]


def test_required_nodes_stand_before_likelier_ones() -> None:
    window = chain(1, 2, 3, p=0.01, required=4)
    draft = merge(ROOT, [chain(4, 5, 6, p=0.99), window], Limits(4, 16, min_probability=0.05))
    assert (draft.placed[1][1:] > 0).all()
    assert sorted(draft.tree.tokens.tolist()) == [1, 2, 3, 4, ROOT]


@given(st.lists(st.one_of(st.none(), proposals()), max_size=4), st.integers(0, 40), st.sets(st.integers(0, 3)))
def test_a_draft_has_no_node_behind_a_token_that_ends_the_output(offers, budget, ends) -> None:
    offers = [offer and offer._replace(required=0) for offer in offers]
    draft = merge(ROOT, offers, Limits(budget, 8), ends=np.array([*ends, ROOT], np.int64))
    drafted = paths(draft.tree.tokens, draft.tree.parents)
    assert not any(ends.intersection(path[:-1]) for path in drafted)
    whole = merge(ROOT, offers, Limits(999, 8)).tree
    endless = [path for path in paths(whole.tokens, whole.parents)[1:] if not ends.intersection(path[:-1])]
    assert len(draft.tree) - 1 == min(budget, len(endless))


@pytest.mark.parametrize("offers", [[], [None], [chain()]])
def test_nothing_offered_is_the_root_alone(offers: list[Proposal | None]) -> None:
    draft = merge(ROOT, offers, Limits(16, 16))
    assert draft.tree.tokens.tolist() == [ROOT]
    assert len(draft.placed) == len(offers)


@given(st.lists(st.one_of(st.none(), proposals()), max_size=4), st.integers(1, 40), st.integers(1, 8))
def test_a_chain_is_the_likeliest_child_of_the_likeliest_child(offers, budget, max_depth) -> None:
    tree = merge(ROOT, offers, Limits(budget, max_depth, is_chain=True)).tree
    assert tree.parents.tolist() == [max(0, node - 1) for node in range(len(tree))]
    assert len(tree) <= min(budget, max_depth) + 1
    chance: dict[tuple[int, ...], float] = {}
    for offer in filter(None, offers):
        for node, path in enumerate(paths(offer.tokens, offer.parents)):
            chance[path] = max(chance.get(path, 0.0), float(offer.probabilities[node]))
    path: tuple[int, ...] = ()
    for token in tree.tokens[1:].tolist():
        siblings = {other[-1]: chance[other] for other in chance if other[:-1] == path and len(other) == len(path) + 1}
        assert siblings[token] == max(siblings.values()) > 0
        path = (*path, token)


def test_nodes_count_for_every_source_that_offered_them() -> None:
    draft = merge(ROOT, [chain(1, 2), chain(1, 3, p=0.25)], Limits(9, 9), sources=[1, 1])
    assert draft.tree.tokens.tolist() == [ROOT, 1, 2, 3] and draft.tree.sources.tolist() == [0, 3, 1, 2]
    chooser = TokenChooser(LogitsProcessorList(), do_sample=False, batch_size=1)
    row = Row(0, [ROOT], chooser, StoppingRule(9, frozenset()), device=torch.device("cpu"))
    row.count(draft, StepOutput(0, np.array([1, 3, 9]), None, draft, np.array([0, 1, 3])), ["first", "second"])
    assert row.stats.drafted_by_source == {"first": 2, "second": 2}
    assert row.stats.accepted_by_source == {"first": 1, "second": 2}
    assert row.stats.expected_by_source == {"first": 0.5 + 0.25, "second": 0.5 + 0.125}
    assert row.stats.forwards_by_source == {"first": 1, "second": 1}


def test_what_a_judge_passes_over_counts_a_tenth_of_its_probability() -> None:
    judge, others = chain(1, 2, p=0.9), [chain(1, 3, 4, p=0.5), chain(5, p=0.5), chain(1, 2, 6, p=0.5)]
    draft = merge(ROOT, [*others, judge], Limits(16, 16), judge=0b1000)
    probabilities = dict(zip(paths(draft.tree.tokens, draft.tree.parents), draft.path_probs.tolist(), strict=True))
    assert probabilities == pytest.approx(
        {(): 1, (1,): 0.9, (1, 2): 0.81, (1, 2, 6): 0.405, (1, 3): 0.045, (1, 3, 4): 0.0225, (5,): 0.05}
    )
