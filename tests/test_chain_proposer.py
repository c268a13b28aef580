"""Chains for engines that verify chains: what is drafted, what is learned, and how much of it is verified."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lookahead.drafting.chain_lengths import BatchCost, ChainLengths
from lookahead.ngram.chain_proposer import ChainProposer
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.hit_rates import HitRates
from tests.support.index_queries import grow_trie


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def decode(proposer: ChainProposer, prompt: np.ndarray, output: np.ndarray) -> int:
    """Decode `output` as a target that says just that; returns the number of steps."""
    request, at, steps = proposer.start(prompt), 0, 0
    while at < len(output):
        chain, path_probs = proposer.draft(request, len(output) - at - 1)
        assert len(chain) == len(path_probs) <= proposer.max_draft
        kept = 0
        while kept < len(chain) and chain[kept] == output[at + kept]:
            kept += 1
        proposer.observe(request, output[at : at + kept + 1])
        at, steps = at + kept + 1, steps + 1
    proposer.finish(request)
    return steps


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 20))
def test_a_chain_begins_with_the_likeliest_candidate_of_a_tree_and_gets_no_likelier(text, most):
    proposer = ChainProposer(max_draft=20)
    chain, path_probs = proposer.draft(proposer.start(ids(*text)), most)
    index = ChainIndex()
    index.append(text)
    tree = grow_trie([index], HitRates(), 20, min_probability=proposer.min_probability)
    assert (len(chain) > 0) == (tree is not None)
    if tree is not None:
        assert chain[0] == tree.tokens[1]
        assert len(chain) <= most
        assert (np.diff(path_probs) <= 0).all()
        assert path_probs.min() >= proposer.min_probability


def test_outputs_of_earlier_requests_are_drafted_from_their_first_token_on():
    rng = np.random.default_rng(0)
    proposer = ChainProposer(max_draft=8)
    prompt, output = rng.integers(0, 1000, 50).astype(np.int32), rng.integers(0, 1000, 80).astype(np.int32)
    assert decode(proposer, prompt, output) > 70
    assert decode(proposer, prompt, output) < 20
    assert decode(ChainProposer(max_draft=8), prompt, output) > 70


def test_a_request_that_goes_on_after_its_end_is_kept_once():
    proposer = ChainProposer(max_draft=4)
    request = proposer.start(ids(1, 2, 3))
    proposer.finish(request)
    assert len(proposer.outputs) == 1  # nothing but the separator: a prompt is no output
    for _ in range(2):
        proposer.observe(request, ids(4, 5))
        proposer.finish(request)
        proposer.finish(request)
    assert proposer.outputs.tokens.tolist() == [-1, 1, 2, 3, 4, 5, -1, 1, 2, 3, 4, 5, 4, 5]


def test_outputs_are_kept_in_bounded_memory():
    proposer, rng = ChainProposer(max_draft=4, memory_tokens=1024), np.random.default_rng(0)
    for _ in range(40):
        decode(proposer, ids(1), rng.integers(0, 9, 100).astype(np.int32))
        assert len(proposer.outputs) <= 1024
    longest = proposer.start(ids(1))
    proposer.observe(longest, rng.integers(0, 9, 5000).astype(np.int32))
    proposer.finish(longest)
    assert len(proposer.outputs) <= 1024


def test_a_chain_that_is_always_wrong_is_soon_no_longer_promised():
    proposer = ChainProposer(max_draft=8)
    request = proposer.start(ids(1, 2, 3, 4, 1, 2))
    before = float(proposer.draft(request, 8)[1].sum())
    for token in range(100):
        proposer.observe(request, ids(5 + token, 1, 2))
        after = float(proposer.draft(request, 8)[1].sum())
    assert after < before / 2


def test_a_pool_is_drafted_from():
    pool = ChainIndex()
    pool.append([7, 8, 9, 10])
    proposer = ChainProposer(max_draft=2, pool=pool)
    assert proposer.draft(proposer.start(ids(1, 7, 8)), 2)[0].tolist() == [9, 10]


def test_a_step_of_many_rows_does_what_its_rows_do_one_after_the_other():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 4, rng.integers(2, 9)).astype(np.int32) for _ in range(6)]
    (ours, requests), (theirs, others) = (
        (proposer, [proposer.start(text) for text in texts]) for proposer in (ChainProposer(5), ChainProposer(5))
    )
    tokens = np.zeros((6, 3000), np.int32)
    for _ in range(150):
        new = [rng.integers(0, 4, rng.integers(1, 20)).astype(np.int32) for _ in texts]
        texts = [np.concatenate(each) for each in zip(texts, new, strict=True)]
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        asked = [request if rng.random() < 0.8 else None for request in requests]
        chains, path_probs, sizes = ours.step(asked, tokens, np.array(list(map(len, texts))), 3000, 1)
        for row in (row for row, request in enumerate(asked) if request is not None):
            theirs.observe(others[row], texts[row][len(others[row]) :])
            theirs.finish(others[row])
            chain, probs = theirs.draft(others[row], 5)
            assert chains[row, : sizes[row]].tolist() == chain.tolist()
            assert path_probs[row, : sizes[row]].tolist() == probs.tolist()
    assert ours.outputs.tokens.tolist() == theirs.outputs.tokens.tolist()


def test_a_step_leaves_all_rows_as_they_were_where_one_is_of_another_text():
    proposer = ChainProposer(max_draft=4)
    requests = [proposer.start(ids(1, 2, 1)), proposer.start(ids(3, 4, 3))]
    tokens = np.array([[1, 2, 1, 2], [3, 5, 3, 4]], np.int32)
    assert proposer.step(requests, tokens, np.array([4, 4]), 9)[2] == []
    assert [len(request) for request in requests] == [3, 3]
    tokens[1, 1] = 4
    assert min(proposer.step(requests, tokens, np.array([4, 4]), 9)[2]) > 0


def test_no_room_gives_no_chain():
    proposer = ChainProposer(max_draft=4)
    request = proposer.start(ids(1, 2, 1))
    for most in (0, -3):
        chain, path_probs = proposer.draft(request, most)
        assert len(chain) == len(path_probs) == 0
    assert len(proposer.draft(proposer.start(ids()), 4)[0]) == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_draft": 0}, "max_draft must be from 1 to 1024, got 0"),
        ({"max_draft": 4, "memory_tokens": 10}, "max_tokens must be at least 1024, got 10"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        ChainProposer(**options)


def test_what_is_no_token_is_refused_and_leaves_the_text_as_it_was():
    proposer = ChainProposer(max_draft=4)
    request = proposer.start(ids(1, 2))
    with pytest.raises(ValueError, match="must not be negative"):
        proposer.observe(request, ids(3, -1))
    assert len(request) == 2


def padded(*chains: np.ndarray) -> np.ndarray:
    """Probabilities as `choose` takes them."""
    longest = max(map(len, chains), default=0)
    return np.array([np.pad(chain, (0, longest - len(chain))) for chain in chains]).reshape(len(chains), longest)


def learned(costs: dict[tuple[int, int], float]) -> ChainLengths:
    """Lengths after many steps that paid: seconds by rows and drafted tokens."""
    lengths = ChainLengths()
    for _ in range(60):
        for (rows, drafted), seconds in costs.items():
            lengths.observe(rows=rows, drafted=drafted, emitted=rows + 20 * drafted, seconds=seconds)
    return lengths


def test_drafts_that_cost_nothing_are_verified_whole():
    for rows in (1, 4):
        lengths = learned({(rows, 0): 0.01, (rows, 3): 0.01, (rows, 15): 0.01})
        assert lengths.choose(padded(*[np.linspace(0.9, 0.2, 15)] * rows)) == [15] * rows


def test_a_draft_is_cut_where_the_next_token_costs_more_than_it_is_expected_to_give():
    lengths = learned({(1, 0): 0.01, (1, 1): 0.012, (1, 3): 0.016, (1, 7): 0.024})
    assert lengths.choose(padded(np.array([0.9, 0.7, 0.05, 0.04]))) == [2]


def test_a_short_draft_is_left_out_where_any_draft_costs_much_and_more_of_it_nothing():
    lengths = learned({(1, 0): 0.01, (1, 1): 0.018, (1, 8): 0.018})
    assert lengths.choose(padded(np.array([0.6, 0.1]))) == [0]
    assert lengths.choose(padded(np.full(8, 0.6))) == [8]


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("slow", "host_s"), [(4.0, 0.0), (1.2, 0.0), (1.05, 0.0), (1.0, 0.0005), (1.0, 0.01)])
def test_drafts_that_promise_much_and_give_nothing_lose_little_and_are_tried_again(rows, slow, host_s):
    lengths, seconds, tried = ChainLengths(), 0.0, []
    for step in range(3000):
        asked = lengths.drafts(rows)
        drafted = sum(lengths.choose(padded(*[np.array([0.9, 0.8, 0.7])] * rows))) if asked else 0
        took = 0.01 * slow if drafted else 0.01
        host = host_s if asked else None
        lengths.observe(rows=rows, drafted=drafted, emitted=rows, seconds=took, host_s=host)
        seconds += took + (host or 0.0)
        tried += [step] * asked
    assert seconds < 1.015 * 3000 * 0.01 + 0.2 + 0.01 * slow
    assert tried[-1] > 2000


def test_drafting_is_charged_for_its_time_after_a_clock_went_back():
    lengths, asked = ChainLengths(), 0
    for step in range(500):
        drafts = lengths.drafts(1)
        host_s = (-3600.0 if step == 4 else 0.005) if drafts else None
        lengths.observe(rows=1, drafted=0, emitted=1, seconds=0.01, host_s=host_s)
        asked += drafts
    assert asked < 50


def test_what_drafted_tokens_took_twice_is_believed_before_the_guess():
    # As vLLM takes on a CPU that is at its limit with a token of each of 16 requests.
    lengths = ChainLengths()
    for drafted, seconds in ((0, 0.209), (27, 0.340), (85, 0.643), (67, 0.572)):
        lengths.observe(rows=16, drafted=drafted, emitted=45, seconds=seconds)
    assert lengths.choose(padded(*[np.array([0.9, 0.4, 0.3, 0.2, 0.1])] * 16)) == [1] * 16


def test_unlikely_drafts_do_not_keep_likely_ones_from_the_next_steps():
    lengths = learned({(1, 0): 0.01, (1, 2): 0.012, (1, 8): 0.018})
    for _ in range(200):
        if lengths.drafts(1):
            assert lengths.choose(padded(np.array([0.05]))) == [0]
    assert lengths.choose(padded(np.array([0.9, 0.8]))) == [2]


def test_a_plain_step_that_took_long_once_is_not_believed_where_all_steps_draft():
    lengths = ChainLengths()
    for _ in range(5):
        lengths.observe(rows=1, drafted=0, emitted=1, seconds=0.1)
    for drafted in [2, 8, 16] * 20:
        lengths.observe(rows=1, drafted=drafted, emitted=3, seconds=0.030 + 0.0016 * drafted)
    assert lengths.choose(padded(np.array([0.9, 0.8, 0.7, 0.1]))) == [3]


def test_the_likeliest_tokens_of_a_batch_are_verified_whoever_they_belong_to():
    lengths = learned({(4, 0): 0.01, (4, 4): 0.012, (4, 16): 0.018, (4, 32): 0.026})
    sure, unsure, nothing = np.full(4, 0.95), np.full(4, 0.1), np.zeros(0)
    assert lengths.choose(padded(unsure, sure, nothing, unsure)) == [0, 4, 0, 0]


def test_the_first_three_steps_verify_nothing_whether_they_are_timed_or_not():
    for timed in range(4):
        lengths = ChainLengths()
        for step in range(3):
            assert not lengths.drafts(1)
            if step < timed:
                lengths.observe(rows=1, drafted=0, emitted=1, seconds=0.01, host_s=None)
        assert lengths.drafts(1) and lengths.drafts(1)
        assert lengths.choose(padded(np.full(4, 0.9))) == [4]


@pytest.mark.parametrize("is_plain_known", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 256])
def test_where_steps_with_drafts_are_never_timed_one_of_four_drafts_few_tokens(rows, is_plain_known):
    lengths, verified = ChainLengths(), []
    if is_plain_known:
        lengths.observe(rows=rows, drafted=0, emitted=rows, seconds=0.01, host_s=None)
    for _ in range(40):  # requests come in every step
        asked = lengths.drafts(rows)
        verified.append(sum(lengths.choose(padded(*[np.full(16, 0.9)] * rows))) if asked else 0)
    assert verified == [0, 0, 0, max(8, rows // 8)] * 10
    for _ in range(40):
        asked = lengths.drafts(rows)
        drafted = sum(lengths.choose(padded(*[np.full(16, 0.9)] * rows))) if asked else 0
        lengths.observe(rows=rows, drafted=drafted, emitted=rows + drafted, seconds=0.01, host_s=0.0 if asked else None)
        verified.append(drafted)
    assert max(verified[60:]) == 16 * rows, "what is timed at last is believed"


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 256])
def test_first_steps_verify_few_tokens_and_later_ones_at_most_four_times_those_timed(rows):
    lengths, verified = ChainLengths(), []
    for _ in range(3):
        lengths.observe(rows=rows, drafted=0, emitted=rows, seconds=0.01, host_s=None)
    for _ in range(4):
        verified.append(sum(lengths.choose(padded(*[np.full(80, 0.9)] * rows))))
        lengths.observe(rows=rows, drafted=verified[-1], emitted=rows + verified[-1], seconds=0.01)
    least = max(8, rows // 8)
    # The first one is not timed: engines compile then.
    assert verified == [min(each, 80 * rows) for each in (least, least, 4 * least, 16 * least)]


@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("held_up", [0.0, 0.25])
@pytest.mark.parametrize("token_cost", [0.0, 0.002, 0.03, 0.37])  # of a drafted token, in steps
def test_drafts_that_are_never_right_cost_at_most_two_percent_at_any_price(rows, held_up, token_cost):
    rng, lengths, steps = np.random.default_rng(rows), ChainLengths(), 512
    path_probs, seconds, plain = np.tile(0.4 ** np.arange(1, 5), (rows, 1)), 0.0, 0.0
    for _ in range(steps):
        alone = 0.213 * (1.0 + abs(rng.normal(0.0, 0.03)) + rng.random() * (rng.random() < held_up))
        asked = lengths.drafts(rows)
        drafted = sum(lengths.choose(path_probs)) if asked else 0
        took = alone + 0.213 * token_cost * drafted
        lengths.observe(rows=rows, drafted=drafted, emitted=rows, seconds=took, host_s=0.0 if asked else None)
        seconds, plain = seconds + took, plain + alone
    assert seconds <= 1.02 * plain


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4])
def test_a_plain_step_is_read_as_it_is_where_others_are_held_up(rows, share):
    rng, cost = np.random.default_rng(0), BatchCost()
    for _ in range(99):
        cost.observe(rows, 0, 0.213 * (1.0 + abs(rng.normal(0.0, 0.02)) + (rng.random() < share)))
    read = []
    for _ in range(99):
        cost.observe(rows, 0, 0.213 * (1.0 + abs(rng.normal(0.0, 0.02)) + (rng.random() < share)))
        read.append(cost.plain)
    assert 0.213 <= np.median(read) < 1.04 * 0.213


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=6), max_size=8),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 40), st.floats(0.0, 10.0)), max_size=20),
)
@example(chains=[], measured=[(1, 0, 0.0), (1, 1, 0.0), (1, 1, 1.0), (1, 1, 0.0)])  # plain steps that took no time
def test_lengths_fit_the_chains_whatever_was_measured(chains, measured):
    lengths = ChainLengths()
    for rows, drafted, seconds in measured:
        lengths.observe(rows=rows, drafted=drafted, emitted=rows, seconds=seconds)
    path_probs = [np.sort(np.array(each))[::-1] for each in chains]
    for _ in range(5):
        chosen = lengths.choose(padded(*path_probs))
        assert len(chosen) == len(chains)
        assert all(0 <= length <= len(each) for length, each in zip(chosen, chains, strict=True))


def test_neither_part_needs_torch():
    script = (
        "import sys, lookahead.ngram.chain_proposer, lookahead.drafting.chain_lengths, lookahead.plugins.vllm\n"
        "print(*[name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == []
