"""Drafts from what a caller says that the output will largely be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lookahead.config import LookaheadConfig
from lookahead.decoding.assembly import ProposerState, make_proposers
from lookahead.drafting.proposal import Call, Feedback, Proposal
from lookahead.ngram.hit_rates import HitRates
from lookahead.proposers.ngram import Memory, NgramProposer

NOTHING = np.zeros(0, np.int32)
SOURCES = ("prompt", "prediction")
PREDICTED = 2  # the bit of the second source
PROMPT = np.array([5000], np.int32)
BOTH = [("prediction",), SOURCES]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def text(tokens: int, seed: int = 0, vocabulary: int = 2000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).astype(np.int32)


def started(predictions: Sequence[np.ndarray], sources: Sequence[str] = SOURCES, **options: Any) -> NgramProposer:
    proposer = NgramProposer(sources, **options)
    proposer.start(0, PROMPT)
    proposer.expect(0, predictions)
    return proposer


def accepted(proposal: Proposal | None, output: np.ndarray) -> int:
    """Tokens that a target that says `output` would accept."""
    node, count = 0, 0
    while proposal is not None and count < len(output):
        children = np.flatnonzero(proposal.parents == node)
        hit = [each for each in children if each > node and proposal.tokens[each] == output[count]]
        if not hit:
            break
        node, count = hit[0], count + 1
    return count


def replay(proposer: NgramProposer, output: np.ndarray, room: int = 16, row: int = 0) -> list[int]:
    """Let a target say `output`; returns the tokens of each step."""
    emitted: list[int] = []
    while sum(emitted) < len(output):
        rest = output[sum(emitted) :]
        tokens = rest[: 1 + accepted(proposer.propose(row, room), rest[:-1])]
        proposer.observe(row, Feedback(tokens, NOTHING, NOTHING), NOTHING)
        emitted.append(len(tokens))
    return emitted


def reach(proposal: Proposal) -> np.ndarray:
    """The probability of each node to be reached."""
    probs = proposal.probabilities.astype(float)
    for node in range(1, len(probs)):
        probs[node] *= probs[proposal.parents[node]]
    return probs


@pytest.mark.parametrize("sources", BOTH)
def test_the_beginning_of_a_prediction_is_offered_before_the_first_token(sources: Sequence[str]) -> None:
    offer = started([ids(7, 8, 9, 10)], sources).propose(0, 8)
    assert offer is not None and accepted(offer, ids(7, 8, 9, 10)) == 4
    assert set(offer.sources[1:5].tolist()) == {1 << sources.index("prediction")}  # type: ignore[index]


@pytest.mark.parametrize("sources", BOTH)
def test_a_right_prediction_is_followed_to_its_end(sources: Sequence[str]) -> None:
    for length in (1, 2, 3, 200):
        output = text(length)
        assert len(replay(started([output], sources), output, 32)) <= 2 + length // 33


def test_the_prediction_as_only_source_offers_nothing_else_without_a_right_token() -> None:
    proposer = started([text(50)], ["prediction"])
    replay(proposer, np.tile(ids(4001, 4002), 20))
    offer = proposer.propose(0, 64)
    assert offer is None or set(offer.tokens[1:].tolist()) <= set(text(50).tolist())


@pytest.mark.parametrize("sources", BOTH)
def test_empty_predictions_are_none(sources: Sequence[str]) -> None:
    assert started([], sources).propose(0, 8) is None
    assert started([NOTHING, NOTHING], sources).propose(0, 8) is None
    assert accepted(started([NOTHING, ids(1, 2)], sources).propose(0, 8), ids(1, 2)) == 2


@pytest.mark.parametrize("begun", [0, 1, 3])
def test_a_prediction_that_nothing_is_known_of_stakes_a_few_tokens_and_then_all(begun: int) -> None:
    output = text(400)
    proposer = started([output])
    if begun:
        proposer.observe(0, Feedback(output[:begun], NOTHING, NOTHING), NOTHING)
    assert accepted(proposer.propose(0, 64), output[begun:]) == 16
    proposer.observe(0, Feedback(output[begun : begun + 17], NOTHING, NOTHING), NOTHING)
    assert accepted(proposer.propose(0, 64), output[begun + 17 :]) == 64


def test_long_chains_reach_the_end_of_the_room_once_a_prediction_has_been_right() -> None:
    output = text(1500)
    proposer = started([output])
    replay(proposer, output[:900], 64)
    offer = proposer.propose(0, 512)
    assert offer is not None and accepted(offer, output[900:]) >= 500
    assert reach(offer)[64] > 0.9


EDITS = {
    "an insertion": lambda old, new: (old[:150], new[:9], old[150:]),
    "a deletion": lambda old, new: (old[:150], old[160:]),
    "a long deletion": lambda old, new: (old[:50], old[250:]),
    "a replacement": lambda old, new: (old[:150], new[:4], old[154:]),
    "a longer replacement": lambda old, new: (old[:150], new[:9], old[154:]),
    "a shorter replacement": lambda old, new: (old[:150], new[:2], old[159:]),
    "a moved block": lambda old, new: (old[:50], old[120:200], old[50:120], old[200:]),
    "a repeated block": lambda old, new: (old[:200], old[100:200], old[200:]),
    "another beginning": lambda old, new: (new[:2], old[1:]),
    "another end": lambda old, new: (old, new[:3]),
}


@pytest.mark.parametrize("sources", BOTH)
@pytest.mark.parametrize("edit", EDITS)
def test_it_goes_on_soon_after(edit: str, sources: Sequence[str]) -> None:
    old = text(300)
    output = np.concatenate(EDITS[edit](old, text(20, 1) + 2000))
    proposer = started([old], sources)
    steps = replay(proposer, output, 32)
    # Two steps for each new token and each seam, and those of a copy.
    unknown = int((output >= 2000).sum())
    assert len(steps) <= len(output) // 33 + unknown + 8


def test_behind_an_inserted_token_and_a_replaced_one_the_next_is_offered_at_once() -> None:
    old = text(400)
    for output in (np.insert(old, 200, 4000), np.concatenate((old[:200], ids(4000), old[201:]))):
        proposer = started([old])
        replay(proposer, output[:201])
        assert accepted(proposer.propose(0, 32), output[201:]) >= 2


def test_of_many_occurrences_those_beside_the_cursor_are_likelier() -> None:
    common = ids(3001, 3002)
    blocks = [np.concatenate((text(8, seed), common)) for seed in range(40)]
    old = np.concatenate(blocks)
    for edited in range(4, 36, 5):
        output = np.concatenate((*blocks[:edited], ids(4000, 4001, 4002), common, *blocks[edited + 1 :]))
        proposer = started([old])
        replay(proposer, output[: 10 * edited + 5])  # up to the common tokens behind what replaced a block
        offer = proposer.propose(0, 16)
        assert offer is not None
        children = [node for node in range(1, len(offer.tokens)) if offer.parents[node] == 0]
        likeliest = sorted(children, key=lambda node: -offer.probabilities[node])[:3]
        # Before the block, which was kept then, at the block behind it, or what followed last.
        beside = [int(blocks[each][0]) for each in (edited - 1, edited, edited + 1)]
        assert sorted(offer.tokens[likeliest].tolist()) == sorted(beside)


def test_each_of_several_predictions_is_followed() -> None:
    texts = [text(100, seed) for seed in range(4)]
    for right in texts:
        assert len(replay(started(texts), right, 32)) <= 7
    mixture = np.concatenate((texts[2][:50], texts[0][30:80], texts[3][50:]))
    assert len(replay(started(texts), mixture, 32)) <= 20


def test_the_same_token_of_prompt_and_prediction_is_one_candidate() -> None:
    old, proposer = text(60), NgramProposer(SOURCES)
    proposer.start(0, np.concatenate((old, PROMPT)))
    proposer.expect(0, [old])
    proposer.observe(0, Feedback(old[:10], NOTHING, NOTHING), NOTHING)
    offer = proposer.propose(0, 8)
    assert offer is not None and offer.sources is not None
    assert [each for each in offer.tokens.tolist() if each == old[10]] == [old[10]]
    assert offer.sources[offer.tokens.tolist().index(old[10])] == 3


def test_a_wrong_prediction_is_soon_promised_nothing() -> None:
    proposer, output = started([text(2000, 1)], min_probability=0.002), text(300, 2) + 2000
    at_first = float(reach(proposer.propose(0, 64))[1:].sum())  # type: ignore[arg-type]
    replay(proposer, output, 64)
    offer = proposer.propose(0, 64)
    promised = 0.0 if offer is None else float(reach(offer)[(offer.sources & PREDICTED) > 0].sum())  # type: ignore[operator]
    assert promised < 0.03 < 0.2 < at_first


def test_a_useless_prediction_costs_no_accepted_tokens() -> None:
    phrase = text(40, 3, 50)
    output = np.concatenate([np.concatenate((phrase, text(10, seed, 50))) for seed in range(30)])
    alone, beside = NgramProposer(["prompt"]), started([text(1000, 99, 50)])
    alone.start(0, PROMPT)
    assert len(replay(beside, output)) <= 1.01 * len(replay(alone, output))


def test_no_more_is_promised_than_comes_true() -> None:
    rates, promised, hits = HitRates(), 0.0, 0
    for seed in range(30):
        rng, old = np.random.default_rng(seed), text(300, seed)
        output = old.copy()
        output[rng.integers(0, 300, 12)] = 4000
        proposer, at = started([old], rates=rates), 0
        while at < len(output):
            offer = proposer.propose(0, 16)
            count = accepted(offer, output[at:-1])
            if seed >= 10 and len(output) - at > 16 and offer is not None:
                promised, hits = promised + reach(offer)[1:].sum(), hits + count
            proposer.observe(0, Feedback(output[at : at + count + 1], NOTHING, NOTHING), NOTHING)
            at += count + 1
    assert 0.6 * hits < promised < 1.05 * hits


def test_a_row_without_a_prediction_drafts_as_it_would_without_that_source() -> None:
    rows = [np.tile(text(30, seed, 20), 3) for seed in range(2)]
    with_source, without = NgramProposer(SOURCES), NgramProposer(["prompt"])
    for proposer in (with_source, without):
        proposer.start(0, rows[0])
        proposer.start(1, rows[1])
    for at in range(20):
        for row in (0, 1):
            offers = [proposer.propose(row, 16) for proposer in (with_source, without)]
            assert all(np.array_equal(*pair) for pair in zip(*(offer[:4] for offer in offers if offer), strict=True))
            for proposer in (with_source, without):
                proposer.observe(row, Feedback(rows[row][at : at + 1], NOTHING, NOTHING), NOTHING)


def test_rows_have_predictions_of_their_own_which_end_with_them() -> None:
    memory = Memory()
    proposer = NgramProposer(("prompt", "outputs", "prediction"), memory)
    for row in range(3):
        proposer.start(row, ids(3000 + row))
    proposer.expect(0, [text(60, 0)])
    proposer.expect(2, [text(60, 2)])
    assert proposer.propose(1, 8) is None
    for row in (0, 2):
        assert len(replay(proposer, text(60, row), 32, row)) <= 4
    for row in range(3):
        proposer.finish(row)
    proposer.start(0, ids(3003))
    offer = proposer.propose(0, 8)
    assert offer is None or not (offer.sources >> 2).any()  # type: ignore[operator]
    proposer.expect(0, [text(40, 9)])
    proposer.finish(0)
    assert not set(text(40, 9).tolist()) - set(text(60, 0).tolist()) & set(memory.outputs.tokens.tolist())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copied_proposer_follows_a_cursor_of_its_own(way: Callable[[Any], Any]) -> None:
    old = text(100)
    original = started([old])
    replay(original, old[:20])
    twin = way(original)
    replay(twin, old[20:60])
    assert accepted(original.propose(0, 32), old[20:]) >= 30
    assert accepted(twin.propose(0, 32), old[60:]) >= 30


@given(
    predictions=st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=3),
    output=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    room=st.integers(1, 20),
    sources=st.sampled_from([*BOTH, ("prompt", "outputs", "recycled", "prediction")]),
)
def test_any_prediction_gives_a_tree(
    predictions: list[list[int]], output: list[int], room: int, sources: Sequence[str]
) -> None:
    proposer = started([np.array(each, np.int32) for each in predictions], sources)
    for token in output:
        offer = proposer.propose(0, room)
        if offer is not None:
            nodes = np.arange(1, len(offer.tokens))
            assert len(nodes) <= room and (offer.parents[1:] < nodes).all()
            assert len(set(zip(offer.parents[1:].tolist(), offer.tokens[1:].tolist(), strict=True))) == len(nodes)
            assert (offer.tokens >= 0).all() and (offer.sources[1:] < 1 << len(sources)).all()  # type: ignore[index]
            assert (np.bincount(offer.parents[1:], offer.probabilities[1:]) <= 1.0).all()
        proposer.observe(0, Feedback(ids(token), NOTHING, NOTHING), NOTHING)


class Silent:
    """A user's proposer that offers nothing."""

    sources = ("silent",)
    needs_argmax = needs_top = False
    hidden_layers = ()

    def start(self, row: int, prompt: np.ndarray) -> None: ...

    def expect(self, row: int, predictions: Sequence[np.ndarray]) -> None: ...

    def propose(self, row: int, max_nodes: int) -> None: ...

    def observe(self, row: int, feedback: Feedback, placed: np.ndarray) -> None: ...

    def finish(self, row: int) -> None: ...


def silent(call: Call) -> Any:
    return Silent()


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize(
    ("proposers", "by_rejection", "named"),
    [((), False, False), (("prompt", "recycled"), False, True), ((silent,), False, True), ((silent,), True, False)],
)
def test_predictions_are_a_source_wherever_drafts_are_not_drawn(
    proposers: Sequence[Any], by_rejection: bool, named: bool, predicts: bool
) -> None:
    warp: Callable[[Tensor], Tensor] | None = None
    call = Call(
        model=None, tokenizer=None, rows=1, vocab_size=10, max_length=99, max_nodes=16, is_chain=False, is_timed=False,
        by_rejection=by_rejection, warp=warp, predicts=predicts,
    )  # fmt: skip
    config = LookaheadConfig(proposers=proposers)
    made = make_proposers(config, ProposerState(), None, call)
    expected = [each if isinstance(each, str) else "silent" for each in proposers]
    sources = [name for each in made for name in each.sources]
    assert sorted(sources) == sorted([*expected, *(["prediction"] if named and predicts else [])])
