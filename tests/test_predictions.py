"""Texts that an output will largely be: they are followed, lost where they are wrong, and found again."""

from __future__ import annotations

import numpy as np
import pytest

from lookahead.drafting.proposal import Feedback
from lookahead.hf.model_state import state_of
from lookahead.ngram.acceptance import HitRates
from lookahead.ngram.predictions import Predictions
from lookahead.proposers import ProposerState
from lookahead.proposers.ngram import NgramProposer, OutputStore

NONE = np.zeros(0, np.int32)
FILE = np.arange(100, 400, dtype=np.int32)  # no token twice


def ids(*tokens):
    return np.array(tokens, np.int32)


def proposer_of(*predictions, prompt=ids(1, 2, 3), sources=("prompt",), rates=None):
    """A proposer with one row, 0."""
    made = NgramProposer(sources, OutputStore(), rates or HitRates(), predicts=True)
    made.start(0, prompt)
    if predictions:
        made.expect(0, predictions)
    return made


def write(proposer, output, most=64):
    """Let a row write an output: how many tokens every step emits."""
    steps, at = [], 0
    while at < len(output):
        offer, emitted = proposer.propose(0, most), 1
        node = 0
        for child in range(1, 0 if offer is None else len(offer.tokens)):
            if offer.parents[child] == node and offer.tokens[child] == output[at + emitted - 1]:
                node, emitted = child, emitted + 1
            if at + emitted > len(output) - 1:
                break
        proposer.observe(0, Feedback(output[at : at + emitted], NONE, NONE), NONE)
        steps.append(emitted)
        at += emitted
    return steps


def chain_of(offer):
    """The tokens of the likeliest path."""
    tokens, node = [], 0
    while len(children := np.flatnonzero(offer.parents[1:] == node) + 1):
        node = children[offer.probabilities[children].argmax()]
        tokens.append(int(offer.tokens[node]))
    return tokens


def test_a_prediction_is_offered_before_the_first_token():
    offer = proposer_of(FILE).propose(0, 64)
    assert chain_of(offer)[:60] == FILE[:60].tolist()
    assert set(offer.sources[1:].tolist()) >= {2}  # the bit of "prediction", which comes behind "prompt"


def test_a_right_prediction_gives_whole_trees():
    assert write(proposer_of(FILE), FILE)[:-1] == [65] * 4


@pytest.mark.parametrize("most", [1, 7, 200])
def test_a_chain_is_as_long_as_the_tree_may_be(most):
    assert write(proposer_of(FILE), FILE, most)[0] == most + 1


@pytest.mark.parametrize(
    "edited",
    {
        "replaced": np.concatenate((FILE[:90], ids(7, 8), FILE[92:])),
        "inserted": np.concatenate((FILE[:90], ids(7, 8, 9), FILE[90:])),
        "deleted": np.concatenate((FILE[:90], FILE[120:])),
        "moved": np.concatenate((FILE[:50], FILE[200:250], FILE[50:200], FILE[250:])),
        "deleted at the beginning": FILE[30:],
        "written twice": np.concatenate((FILE[:60], FILE[:60], FILE[60:])),
    }.items(),
    ids=lambda case: case[0],
)
def test_after_a_change_the_prediction_is_followed_again(edited):
    output = edited[1]
    steps = write(proposer_of(FILE), output)
    assert sum(steps) == len(output)
    # Whole trees, and few steps for each change: a new token each, and what finds the place again.
    assert len(steps) <= len(output) // 65 + 3 + 4 * 3


def test_the_occurrence_behind_the_cursor_is_preferred():
    # Every block begins alike, and only the place of the cursor tells how the next one goes on.
    blocks = [np.concatenate((ids(5, 6, 5, 6), FILE[10 * i : 10 * i + 10])) for i in range(20)]
    text = np.concatenate(blocks)
    proposer = proposer_of(text)
    output = np.concatenate([np.concatenate((ids(900 + i), block)) for i, block in enumerate(blocks)])
    at = 0
    for i, block in enumerate(blocks[:12]):
        given = np.concatenate((ids(900 + i), block[:4]))
        proposer.observe(0, Feedback(given, NONE, NONE), NONE)
        assert chain_of(proposer.propose(0, 64))[:10] == block[4:].tolist(), i
        proposer.observe(0, Feedback(block[4:], NONE, NONE), NONE)
        at += 1 + len(block)
    assert at < len(output)


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_predictions_the_right_one_is_followed(order):
    other = FILE + 1000
    assert len(write(proposer_of(*(FILE, other)[::order]), FILE)) <= 6


def test_more_predictions_than_are_followed_and_empty_ones_do_no_harm():
    many = [NONE, *(FILE + 1000 * i for i in range(12)), NONE]
    assert len(Predictions(many)) == Predictions.MAX_TEXTS
    assert len(write(proposer_of(*many), FILE)) <= 8
    assert len(Predictions([NONE])) == 0
    assert write(proposer_of(NONE), FILE[:5]) == [1] * 5


@pytest.mark.parametrize("text", [ids(100), ids(100, 101), ids(7)])
def test_a_tiny_prediction_is_served(text):
    assert sum(write(proposer_of(text), FILE[:40])) == 40


def test_a_wrong_prediction_is_soon_offered_no_more():
    rates = HitRates()
    generator = np.random.default_rng(0)
    for _ in range(30):
        proposer = proposer_of(FILE, rates=rates)
        write(proposer, generator.integers(1000, 9000, 60).astype(np.int32))
    offer = proposer_of(FILE, rates=rates).propose(0, 64)
    assert offer.probabilities[1:][offer.parents[1:] == 0].sum() < 0.1


def test_hit_rates_beside_predictions_are_kept_apart_from_others(tiny_llama, tiny_tokenizer):
    given = {"max_new_tokens": 20, "do_sample": False}
    learned = state_of(tiny_llama).learned.of(ProposerState, ProposerState)
    before = learned.ngram.table.copy()
    trials = learned.predicted.table[:, 2].sum()
    engine = engine_for(tiny_llama, tiny_tokenizer, [ids(1, 2, 3)], predictions=[(FILE % 90,)], **given)
    assert engine.sources == ["prompt", "outputs", "recycled", "prediction"]
    list(engine.run())
    assert (learned.ngram.table == before).all()
    assert learned.predicted.table[:, 2].sum() > trials
