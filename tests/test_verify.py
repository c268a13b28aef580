"""Walking a tree: lossless whatever the draft, and one place where an output ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.verification.exact import VerifyResult, verify, walk_greedy

NO_EOS = np.zeros(0, np.int32)


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


def verify_greedy(tree: TokenTree, argmax: list[int], eos_tokens: IntArray, limit: int) -> VerifyResult:
    return VerifyResult(*walk_greedy(tree.tokens, tree.parents, np.array(argmax, np.int32), eos_tokens, limit))


def walk(tree: TokenTree, eos: int | None, limit: int) -> VerifyResult:
    chosen, count = choices(tree), 0

    def is_finished(token: int) -> bool:
        nonlocal count
        count += 1
        return token == eos or count >= limit

    return verify(tree, lambda node: chosen[node], is_finished)


@given(drafts(), st.sampled_from([None, 0, 1, 2, 3]), st.integers(1, 8))
def test_any_draft_emits_what_token_by_token_decoding_emits(tree: TokenTree, eos: int | None, limit: int) -> None:
    result = walk(tree, eos, limit)
    prefix = (int(tree.tokens[0]),)
    for i, token in enumerate(result.tokens):
        assert token == target_choice(prefix)
        prefix += (int(token),)
        assert (token == eos or i + 1 == limit) == (result.finished and i + 1 == len(result.tokens))
    assert len(result.tokens) == len(result.path)
    assert tree.tokens[result.path[1:]].tolist() == result.tokens[:-1].tolist()


@given(drafts(), st.sampled_from([None, 0, 1, 2, 3]), st.integers(1, 8))
def test_the_greedy_walk_in_one_call_is_the_same_walk(tree: TokenTree, eos: int | None, limit: int) -> None:
    eos_tokens = NO_EOS if eos is None else np.array([eos], np.int32)
    fast = verify_greedy(tree, choices(tree), eos_tokens, limit)
    slow = walk(tree, eos, limit)
    assert fast.path.tolist() == slow.path.tolist()
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert fast.finished == slow.finished


def chain(*tokens: int) -> TokenTree:
    return TokenTree.from_parents(tokens, np.maximum(np.arange(len(tokens)) - 1, 0))


def test_an_empty_draft_emits_the_bonus_token_alone() -> None:
    result = verify_greedy(chain(5), [8], NO_EOS, 100)
    assert (result.path.tolist(), result.tokens.tolist(), result.finished) == ([0], [8], False)


def test_a_perfect_draft_emits_itself_and_the_bonus_token() -> None:
    result = verify_greedy(chain(5, 6, 7), [6, 7, 8], NO_EOS, 100)
    assert (result.path.tolist(), result.tokens.tolist()) == ([0, 1, 2], [6, 7, 8])


def test_an_always_wrong_draft_costs_nothing_but_its_nodes() -> None:
    result = verify_greedy(chain(5, 1, 1), [6, 7, 8], NO_EOS, 100)
    assert (result.path.tolist(), result.tokens.tolist()) == ([0], [6])


@pytest.mark.parametrize("stop", [6, 7])
def test_an_end_of_sequence_inside_an_accepted_draft_ends_the_output_there(stop: int) -> None:
    result = verify_greedy(chain(5, 6, 7), [6, 7, 8], np.array([1, stop], np.int32), 100)
    assert result.tokens.tolist() == ([6] if stop == 6 else [6, 7])
    assert result.finished


def test_a_length_limit_inside_an_accepted_draft_ends_the_output_there() -> None:
    result = verify_greedy(chain(5, 6, 7), [6, 7, 8], NO_EOS, 2)
    assert (result.tokens.tolist(), result.finished) == ([6, 7], True)


def test_the_target_chooses_once_per_emitted_token_and_never_past_the_end() -> None:
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return node + 6

    verify(chain(5, 6, 7, 8), choose, lambda token: token == 7)
    assert asked == [0, 1]
