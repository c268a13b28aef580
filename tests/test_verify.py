"""Walking a tree: lossless whatever the draft, and one place where an output ends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookahead.config import ACCEPTANCES
from lookahead.drafting.proposal import Draws, Proposal
from lookahead.drafting.select import Draft
from lookahead.drafting.tree import TokenTree
from lookahead.verification.acceptance import EXACT, KINDS, Acceptance, Target, acceptance_of


def target_choice(prefix: tuple[int, ...]) -> int:
    """A made-up target: the next token depends on the whole prefix."""
    return (7 * sum(prefix) + 3 * len(prefix) + 1) % 4


def choices(tree: TokenTree) -> list[int]:
    """What the target chooses after every node of the tree."""
    prefixes: list[tuple[int, ...]] = [(int(tree.tokens[0]),)]
    for node in range(1, len(tree)):
        prefixes.append((*prefixes[tree.parents[node]], int(tree.tokens[node])))
    return [target_choice(prefix) for prefix in prefixes]


@st.composite
def drafts(draw: st.DrawFn) -> TokenTree:
    tokens, parents, edges = [0], [0], set()
    for _ in range(draw(st.integers(0, 30))):
        edge = (draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 3)))
        if edge not in edges:
            edges.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return TokenTree.from_parents(tokens, parents)


def target_of(choose: Callable[[int], int], emit: Callable[[int], bool]) -> Target:
    """A target that is asked for its choices alone."""
    return Target(choose, NotImplemented, NotImplemented, emit)


def walk(tree: TokenTree, chosen: list[int], eos: int | None, limit: int) -> tuple[list[int], list[int], bool]:
    """The path and the tokens of a walk, and whether the output ended there."""
    ends: list[bool] = []

    def is_finished(token: int) -> bool:
        ends.append(token == eos or len(ends) + 1 >= limit)
        return ends[-1]

    path, tokens, _ = EXACT.accept(Draft(tree, ()), target_of(chosen.__getitem__, is_finished))
    return path.tolist(), tokens.tolist(), ends[-1]


@given(drafts(), st.sampled_from([None, 0, 1, 2, 3]), st.integers(1, 8))
def test_any_draft_emits_what_token_by_token_decoding_emits(tree: TokenTree, eos: int | None, limit: int) -> None:
    path, tokens, finished = walk(tree, choices(tree), eos, limit)
    prefix = (int(tree.tokens[0]),)
    for i, token in enumerate(tokens):
        assert token == target_choice(prefix)
        prefix += (token,)
        assert (token == eos or i + 1 == limit) == (finished and i + 1 == len(tokens))
    assert len(tokens) == len(path)
    assert tree.tokens[path[1:]].tolist() == tokens[:-1]
    following = tree.tokens[1:][tree.parents[1:] == path[-1]]
    assert finished or tokens[-1] not in following, "a walk goes on as far as the draft is right"


def chain(*tokens: int) -> TokenTree:
    return TokenTree.from_parents(tokens, np.maximum(np.arange(len(tokens)) - 1, 0))


def test_an_empty_draft_emits_the_bonus_token_alone() -> None:
    assert walk(chain(5), [8], None, 100) == ([0], [8], False)


def test_a_perfect_draft_emits_itself_and_the_bonus_token() -> None:
    assert walk(chain(5, 6, 7), [6, 7, 8], None, 100)[:2] == ([0, 1, 2], [6, 7, 8])
    whole = list(range(5, 70))
    assert walk(chain(*whole), [*whole[1:], 99], None, 100)[:2] == (list(range(65)), [*whole[1:], 99])


def test_an_always_wrong_draft_costs_nothing_but_its_nodes() -> None:
    assert walk(chain(5, 1, 1), [6, 7, 8], None, 100)[:2] == ([0], [6])


@pytest.mark.parametrize("stop", [6, 7])
def test_an_end_of_sequence_inside_an_accepted_draft_ends_the_output_there(stop: int) -> None:
    assert walk(chain(5, 6, 7), [6, 7, 8], stop, 100)[1:] == ([6] if stop == 6 else [6, 7], True)


def test_a_length_limit_inside_an_accepted_draft_ends_the_output_there() -> None:
    assert walk(chain(5, 6, 7), [6, 7, 8], None, 2)[1:] == ([6, 7], True)


def test_the_target_chooses_once_per_emitted_token_and_never_past_the_end() -> None:
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return node + 6

    EXACT.accept(Draft(chain(5, 6, 7, 8), ()), target_of(choose, lambda token: token == 7))
    assert asked == [0, 1]


def test_every_acceptance_of_the_options_is_one_and_without_sampling_all_are_exact() -> None:
    assert list(KINDS) == list(ACCEPTANCES)
    for name, kind in KINDS.items():
        assert kind.name == name and isinstance(kind, Acceptance)
        assert acceptance_of(name, is_sampled=True) is kind and acceptance_of(name, is_sampled=False) is EXACT


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_acceptance_takes_a_whole_draft_that_is_certain(kind: Acceptance) -> None:
    tokens = list(range(5, 70))
    tree = chain(*tokens)
    certain = torch.eye(100)[[*tokens[1:], 99]]
    draws = Draws(certain, np.maximum(np.arange(len(tokens)) - 1, 0))
    proposal = Proposal(tree.tokens, tree.parents, np.ones(len(tokens)), draws=draws)
    draft = Draft(tree, (np.arange(len(tokens), dtype=np.int32),), proposals=[proposal])
    target = Target(
        choose=lambda node: int(certain[node].argmax()),
        chances=lambda node: certain[node],
        chances_after=lambda path: certain[path[-1]],
        emit=lambda token: False,
    )
    path, emitted, away = kind.accept(draft, target)
    assert (path.tolist(), emitted.tolist(), away) == (list(range(65)), [*tokens[1:], 99], 0.0)
