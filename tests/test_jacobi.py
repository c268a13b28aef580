"""The lookahead branch: its window against the paper's definition, its pool, its slides, its limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead.drafting.proposal import Feedback
from lookahead.drafting.select import merge
from lookahead.drafting.sizes import BranchSize
from lookahead.drafting.tree import TokenTree
from lookahead.ngram.prune import Limits
from lookahead.ngram.search import Trie
from lookahead.ngram.window import UNKNOWN, JacobiWindow
from lookahead.proposers.jacobi import JacobiProposer
from tests.support.default_run import examples
from tests.support.random_trees import ancestor_mask

NOTHING = np.zeros(0, np.int32)
sizes = st.tuples(st.integers(1, 20), st.integers(2, 8), st.integers(0, 20))


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def published_mask(levels: int, width: int, guesses: int, guess_size: int) -> np.ndarray:
    """Who sees whom, from the definition: rows and columns are the window level by level, then the guesses.

    Fu et al. 2024, §3.1: within the window a token sees level 0 up to its own column, then the levels below it
    in its column, and itself; §3.2: a guess sees the newest token (level 0, column 0) and its own tokens so far.
    The two branches do not see each other.
    """
    names = [("window", level, column) for level in range(levels) for column in range(width)]
    names += [("guess", number, place) for number in range(guesses) for place in range(guess_size)]
    mask = np.zeros((len(names), len(names)), bool)
    for row, (branch, a, b) in enumerate(names):
        for other, (seen, c, d) in enumerate(names):
            if seen == "window":
                on_level_0 = c == 0 and d <= b
                in_column = c <= a and d == b
                mask[row, other] = (on_level_0 or in_column) if branch == "window" else (c, d) == (0, 0)
            else:
                mask[row, other] = branch == "guess" and c == a and d <= b
    return mask


def grown_window(width: int, ngram_size: int, steps: int) -> JacobiWindow:
    """A window after some steps, no two tokens in it the same."""
    window = JacobiWindow(width, ngram_size, ids(0))
    fresh = iter(range(1, 1 << 20))
    window.cells[0] = [next(fresh) for _ in range(width)]
    for _ in range(steps):
        answers = np.array([[next(fresh) for _ in range(width)] for _ in window.cells], np.int32)
        window.slide(answers, ids(next(fresh)), np.array([next(fresh) for _ in range(97)], np.int32))
        for place in np.ndindex(window.cells.shape):
            window.cells[place] = next(fresh)
    return window


@settings(max_examples=examples(150))
@given(sizes, st.integers(0, 9))
def test_the_tree_has_the_published_mask_at_every_stage_of_the_warm_up(size, steps):
    width, ngram_size, guesses = size
    window = grown_window(width, ngram_size, steps)
    levels = window.cells.shape[0]
    assert levels == min(ngram_size - 1, steps + 1)
    guess_size = ngram_size - 1
    chains = np.arange(guesses * guess_size)
    guess_parents = np.where(chains % guess_size == 0, 0, chains).astype(np.int32)
    guess = Trie(
        np.append(window.cells[0, :1], (1 << 20) + chains).astype(np.int32),
        np.append(ids(0), guess_parents),
        np.ones(1 + guesses * guess_size, np.float32),
        features=np.zeros(1 + guesses * guess_size, np.int32),
        sources=np.ones(1 + guesses * guess_size, np.int32),
    )
    grown = window.tree(10_000, guess)
    tree = TokenTree.from_parents(grown.tokens, grown.parents)
    names = np.concatenate((grown.cells.reshape(-1), np.arange(grown.required, len(tree))))
    assert sorted(names) == list(range(len(tree)))
    mask = ancestor_mask(tree)[np.ix_(names, names)]
    assert np.array_equal(mask, published_mask(levels, width, guesses, guess_size))
    assert np.array_equal(tree.depths[grown.cells], np.add.outer(np.arange(levels), np.arange(width)))


@given(sizes, st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3))
def test_a_slide_moves_every_token_with_its_position_in_the_text(size, emissions, unheard):
    width, ngram_size, _ = size
    rng = np.random.default_rng(0)
    window = JacobiWindow(width, ngram_size, rng.integers(0, 9, 30).astype(np.int32))
    root = 0
    for step, emitted in enumerate(emissions):
        cells = window.cells.copy()
        answers = rng.integers(10, 10_000, cells.shape).astype(np.int32)
        answers[-1, width - min(unheard, width - 1) :] = UNKNOWN
        known = {
            (level, root + level + i): int(t) for (level, i), t in np.ndenumerate(np.vstack((cells, answers[-1:])))
        }
        context = rng.integers(0, 9, 30 + emitted).astype(np.int32)
        window.slide(answers, context[-emitted:], context)
        rise = 1 if cells.shape[0] == ngram_size - 1 else 0
        root += emitted
        assert window.cells.shape == (min(ngram_size - 1, step + 2), width)
        for (level, i), token in np.ndenumerate(window.cells):
            expected = known.get((level + rise, root + level + i), UNKNOWN)
            if (level, i) == (0, 0):
                assert token == context[-1]
            elif expected >= 0 and i + emitted - rise < width:
                assert token == expected
            else:
                assert token in context


def test_same_tokens_make_the_same_window_whatever_the_global_random_state():
    made = []
    for seed in (0, 1):
        np.random.seed(seed)
        made.append(decode(JacobiProposer(BranchSize(5, 4, 5)), ids(3, 1, 4, 1, 5), wandering, 40)[1])
    assert made[0] == made[1]


def test_equal_branches_of_window_and_guesses_are_one_node():
    window = JacobiWindow(3, 3, ids(7))  # 7 7 7 along level 0
    window.slide(np.array([[7, 7, 7]], np.int32), ids(7), ids(7, 7))
    guesses = Trie(ids(7, 7, 9), ids(0, 0, 1), np.array([1, 0.75, 0.5], np.float32), ids(0, 0, 0), ids(0, 1, 1))
    grown = window.tree(99, guesses)
    TokenTree.from_parents(grown.tokens, grown.parents)  # raises on two equal children
    assert grown.tokens.tolist() == [7, 7, 7, 7, 9]
    assert grown.required == 4
    assert grown.cells.tolist() == [[0, 1, 2], [1, 2, 3]]
    assert grown.probabilities[1] == 0.75


# --- The proposer, driven by a target that is a function of the tokens so far.


def cycle(tokens: list[int]) -> int:
    """Counts to eleven again and again."""
    return (tokens[-1] + 1) % 11


def wandering(tokens: list[int]) -> int:
    """Depends on three tokens, and repeats rarely."""
    a, b, c = ([0, 0, 0, *tokens])[-3:]
    return (a * 7919 + b * 104_729 + c * 1_299_709 + 11) // 7 % 50


def stubborn(tokens: list[int]) -> int:
    return 0


def unheard_of(tokens: list[int]) -> int:
    """Never says what was there before."""
    return 1000 + len(tokens)


def decode(proposer, prompt, target, count, room=1000, budget=1000):
    """Decode greedily as the engine does; returns the output, the proposals, and the tokens of each step."""
    proposer.start(0, prompt)
    text, proposals, sizes = prompt.tolist(), [], []
    while len(text) < len(prompt) + count:
        proposal = proposer.propose(0, room)
        draft = merge(text[-1], [proposal], Limits(budget, len(prompt) + count - len(text) - 1))
        tree = draft.tree
        paths: list[list[int]] = [[]]
        for node in range(1, len(tree)):
            paths.append([*paths[tree.parents[node]], int(tree.tokens[node])])
        argmax = np.array([target(text + path) for path in paths], np.int32)
        path, emitted = [0], [int(argmax[0])]
        while [*paths[path[-1]], emitted[-1]] in paths:
            path.append(paths.index([*paths[path[-1]], emitted[-1]]))
            emitted.append(int(argmax[path[-1]]))
        proposer.observe(0, Feedback(np.array(emitted, np.int32), np.array(path, np.int32), argmax), draft.placed[0])
        proposals.append((proposal.tokens.tolist(), proposal.parents.tolist(), proposal.required))
        sizes.append(len(emitted))
        text += emitted
    proposer.finish(0)
    return text[len(prompt) :], proposals, sizes


@settings(max_examples=examples(40))
@given(
    st.tuples(st.integers(1, 6), st.integers(2, 6), st.integers(0, 5)),
    st.sampled_from([cycle, wandering, stubborn, unheard_of]),
    st.lists(st.integers(0, 12), min_size=1, max_size=20),
    st.one_of(st.just(1000), st.integers(0, 40)),
)
def test_every_offer_fits_its_room_and_starts_with_the_window(size, target, prompt, room):
    proposer = JacobiProposer(BranchSize(*size))
    output, proposals, _ = decode(proposer, np.array(prompt, np.int32), target, 30, room=room, budget=room)
    text = list(prompt)
    for token in output:
        assert token == target(text)
        text.append(token)
    width, ngram_size, guesses = size
    for step, (tokens, parents, required) in enumerate(proposals):
        TokenTree.from_parents(tokens, parents)
        levels = min(ngram_size - 1, step + 1)
        assert len(tokens) - 1 <= room
        assert 1 <= required <= min(levels * width, room + 1)
        assert len(tokens) - required <= guesses * (ngram_size - 1)


def test_a_text_that_repeats_is_foreseen_from_the_window_alone():
    output, _, emitted = decode(JacobiProposer(BranchSize(7, 5, 7)), ids(0), cycle, 110)
    assert output == [(i + 1) % 11 for i in range(len(output))]
    assert len(output) / len(emitted) > 3


def test_the_first_step_already_verifies_what_the_prompt_knows():
    prompt = ids(1, 2, 3, 4, 5, 9, 1, 2)
    for guesses in (3, 0):
        proposer = JacobiProposer(BranchSize(1, 5, guesses))
        proposer.start(0, prompt)
        proposal = proposer.propose(0, 100)
        assert (3 in proposal.tokens[1:][proposal.parents[1:] == 0]) == (guesses > 0)
        assert proposal.required == 1


def test_a_part_of_a_prompt_shorter_than_an_ngram_is_known_too():
    proposer = JacobiProposer(BranchSize(1, 5, 3))
    proposer.start(0, ids(1, 2, 1))
    assert proposer.propose(0, 100).tokens.tolist()[:2] == [1, 2]


def test_an_ngram_closed_by_the_window_is_guessed_when_its_first_token_comes():
    proposer = JacobiProposer(BranchSize(2, 3, 4))
    proposer.start(0, ids(5, 5))
    first = proposer.propose(0, 50)  # the root 5, and 5 behind it
    assert first.tokens.tolist() == [5, 5]
    proposer.observe(0, Feedback(ids(8), ids(0), ids(8, 6)), ids(0, 1))
    second = proposer.propose(0, 50)
    cells = second.tokens[: second.required].tolist()
    assert cells[0] == 8
    assert 6 in cells  # said after the second 5, now above the newest token
    proposer.observe(
        0, Feedback(ids(5), ids(0), np.full(len(second.tokens), 77, np.int32)), np.arange(len(second.tokens))
    )
    third = proposer.propose(0, 50)
    offered = third.tokens[1:][third.parents[1:] == 0].tolist()
    assert {8, 6} <= set(offered)  # "5 8" was emitted, "5 6" was closed by the window


def test_a_longer_context_is_preferred_to_the_last_token():
    prompt = ids(1, 2, 3, 4, 6, 2, 7, 6, 2, 7, 6, 2, 7, 8, 1, 2)
    proposer = JacobiProposer(BranchSize(1, 5, 1))
    proposer.start(0, prompt)
    proposal = proposer.propose(0, 100)
    chances = {int(t): float(p) for t, p, parent in zip(*proposal_arrays(proposal), strict=True) if parent == 0}
    assert max(chances, key=chances.get) == 3


def proposal_arrays(proposal):
    return proposal.tokens[1:], proposal.probabilities[1:], proposal.parents[1:]


def emit(proposer, *tokens, argmax=None):
    """One step that accepts nothing; the target's favourite everywhere is `argmax`, 99 unless given."""
    proposal = proposer.propose(0, 100)
    answers = np.full(len(proposal.tokens), 99 if argmax is None else argmax, np.int32)
    proposer.observe(0, Feedback(ids(*tokens), ids(0), answers), np.arange(len(proposal.tokens)))


def test_the_output_is_remembered_by_more_than_its_last_token():
    proposer = JacobiProposer(BranchSize(1, 4, 6))
    proposer.start(0, ids(9))
    for token in (1, 2, 3, 5, 4, 2, 6, 4, 2, 6, 7, 1, 2):
        emit(proposer, token)
    proposal = proposer.propose(0, 100)
    chances = {int(t): float(p) for t, p, parent in zip(*proposal_arrays(proposal), strict=True) if parent == 0}
    assert chances[3] > chances[6]  # 3 followed "1 2", 6 followed "4 2", later and more often


def test_what_the_target_favoured_is_remembered_even_where_another_token_was_drawn():
    proposer = JacobiProposer(BranchSize(1, 2, 4))
    proposer.start(0, ids(5))
    emit(proposer, 8, argmax=6)
    emit(proposer, 5)
    assert {8, 6} <= set(proposer.propose(0, 100).tokens.tolist())


def test_a_guess_that_failed_still_teaches_what_would_have_followed_it():
    proposer = JacobiProposer(BranchSize(1, 4, 4))
    proposer.start(0, ids(1, 2, 3, 1))  # 2 is guessed
    emit(proposer, 7, argmax=88)
    emit(proposer, 2)
    proposal = proposer.propose(0, 100)
    assert 88 in proposal.tokens[1:][proposal.parents[1:] == 0]


def test_the_window_slides_by_all_that_was_emitted_bonus_included():
    proposer = JacobiProposer(BranchSize(4, 3, 0))
    proposer.start(0, ids(1, 2, 3, 4))
    first = proposer.propose(0, 50)
    answers = np.arange(100, 100 + len(first.tokens), dtype=np.int32)
    proposer.observe(0, Feedback(ids(31, 32), ids(0), answers), np.arange(len(first.tokens)))
    cells = proposer._rows[0].window.cells
    assert cells[0, 0] == 32
    assert cells[1, :2].tolist() == [102, 103]  # said after columns 2 and 3, which are now 0 and 1


def test_without_guesses_the_pool_stays_empty():
    proposer = JacobiProposer(BranchSize(3, 4, 0))
    _, proposals, _ = decode(proposer, ids(1), cycle, 20)
    assert all(len(tokens) == required for tokens, _, required in proposals)


def test_a_window_of_one_column_and_bigrams_is_the_root_alone():
    proposer = JacobiProposer(BranchSize(1, 2, 0))
    proposer.start(0, ids(4))
    assert proposer.propose(0, 10).tokens.tolist() == [4]


def test_a_node_left_out_of_the_draft_teaches_nothing():
    proposer = JacobiProposer(BranchSize(4, 4, 4))
    output, _, _ = decode(proposer, ids(1, 2, 3), cycle, 40, budget=3)
    assert output == [(3 + i + 1) % 11 for i in range(len(output))]


def test_rows_have_their_own_windows_and_pools():
    proposer = JacobiProposer(BranchSize(2, 3, 4))
    proposer.start(0, ids(1, 2, 3, 1))
    proposer.start(1, ids(6, 7, 8, 6))
    assert set(proposer.propose(0, 50).tokens.tolist()) <= {1, 2, 3}
    assert set(proposer.propose(1, 50).tokens.tolist()) <= {6, 7, 8}
    proposer.finish(0)
    assert proposer.propose(1, 50) is not None


@pytest.mark.parametrize("size", [(0, 5), (7, 1)])
def test_sizes_out_of_range_are_refused(size):
    with pytest.raises(ValueError, match="need width >= 1"):
        JacobiWindow(*size, ids(1))


def test_tokens_emitted_before_the_first_offer_are_known_and_the_window_follows():
    proposer = JacobiProposer(BranchSize(3, 4, 6))
    proposer.start(0, ids(9))
    proposer.observe(0, Feedback(ids(4), ids(0), ids(4)), NOTHING)  # the prefill gives a token with no draft
    proposer.observe(0, Feedback(ids(7, 4), ids(0), NOTHING), NOTHING)
    proposal = proposer.propose(0, 100)
    assert proposal.tokens[0] == 4
    assert 7 in proposal.tokens[1:][proposal.parents[1:] == 0]
