"""The proposer for vLLM against a stub of its calls: requests that come, go, move and come back."""

from __future__ import annotations

import gc
import logging
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from lookahead.errors import ConfigError, LookaheadError, PoolError
from lookahead.ngram.chain_proposer import ChainProposer, ChainRequest
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.pool_file import write_pool
from lookahead.plugins.vllm import KnownRequests, LookaheadProposer
from tests.support.row_engine import RowEngine, StubRequest, stub_config


def ticking(seconds: float = 0.01):
    """A clock on which all steps take as long, and drafting no time: it is read twice a call."""
    ticks = count()
    return lambda: seconds * (next(ticks) // 2)


def periodic(tokens: list[int]) -> int:
    """A target that repeats its text with a period of 7."""
    return tokens[-7] if len(tokens) >= 7 else 1 + len(tokens)


def engine_of(target=periodic, **options) -> tuple[LookaheadProposer, RowEngine]:
    config = stub_config(**options)
    proposer = LookaheadProposer(config, clock=ticking())
    return proposer, RowEngine(proposer, target, config)


def run(engine: RowEngine, waiting: list[StubRequest], seats: int = 8) -> None:
    """Decode requests to their limits, a few at a time."""
    for _ in range(10_000):
        for request in [each for each in engine.rows if len(each.tokens) >= each.limit]:
            engine.remove(request)
        while waiting and len(engine.rows) < seats:
            engine.add(waiting.pop(0))
        if not engine.rows:
            return
        engine.step()
    pytest.fail("the requests do not end")


def test_a_text_that_repeats_is_decoded_many_tokens_a_step():
    _, engine = engine_of()
    run(engine, [StubRequest([1, 2, 3, 4, 5, 6, 7], 200)])
    assert engine.emitted / engine.steps > 5


def test_a_row_that_begins_with_several_texts_belongs_to_the_longest():
    proposer, text = ChainProposer(4), np.arange(1, 60, dtype=np.int32)
    short, long = (proposer.start(text[:length]) for length in (20, 40))
    for aside in ([short, long], [long, short]):
        requests = KnownRequests(max_aside=8, aside_tokens=1000)
        requests.aside = aside
        requests.match(text[None], np.array([text.size]), [True])
        assert requests.rows[0] is long and requests.aside == [short]


def test_what_an_earlier_request_wrote_is_drafted_for_the_next_one():
    rng = np.random.default_rng(0)
    story = rng.integers(0, 1000, 120).tolist()
    proposer, engine = engine_of(lambda tokens: story[len(tokens)])
    run(engine, [StubRequest(story[:4], 110)])
    first, engine.steps = engine.steps, 0
    run(engine, [StubRequest(story[:4], 110)])
    assert first > 90 > 40 > engine.steps
    assert len(proposer._proposer.outputs) > 100


def test_rows_that_change_places_keep_their_texts(monkeypatch):
    started = []
    proposer, engine = engine_of()
    start = proposer._proposer.start
    monkeypatch.setattr(proposer._proposer, "start", lambda prompt: started.append(len(prompt)) or start(prompt))
    requests = [StubRequest([each] * 5 + [1, 2], 150) for each in range(10, 18)]
    for request in requests:
        engine.add(request)
    rng = np.random.default_rng(0)
    for _ in range(10):
        engine.step()
        engine.swap(*rng.integers(0, 8, 2).tolist())
    engine.remove(requests[0])
    engine.step()
    assert len(started) == 8
    for row, request in enumerate(engine.rows):
        assert proposer._known.rows[row].text.tokens[1:].tolist() == request.tokens


def test_a_preempted_request_is_known_when_it_comes_back(monkeypatch):
    proposer, engine = engine_of()
    preempted, other = StubRequest(list(range(100)), 250), StubRequest([1, 2, 3], 250)
    for request in (preempted, other):
        engine.add(request)
    for _ in range(5):
        engine.step()
    engine.remove(preempted)
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(proposer._proposer, "start", lambda prompt: pytest.fail("its text is indexed again"))
    engine.add(preempted)
    for _ in range(5):
        engine.step()
    assert proposer._known.rows[1].text.tokens[1:].tolist() == preempted.tokens


def test_requests_with_one_text_in_two_rows_are_two():
    proposer, engine = engine_of(lambda tokens: len(tokens) % 5)
    for _ in range(2):
        engine.add(StubRequest([1, 2, 3], 40))
    for _ in range(4):
        engine.step()
    first, second = proposer._known.rows
    assert first is not second


def test_a_request_with_the_same_beginning_and_end_is_not_taken_for_another():
    proposer, engine = engine_of(lambda tokens: 1 + len(tokens) % 9)
    run(engine, [StubRequest([1], 40)])  # steps with and without drafts are timed
    shared = list(range(100, 140))
    one, other = [*shared, 1, *shared], [*shared, 2, *shared]
    for prompt in (one, other):
        engine.add(StubRequest(prompt, 200))
        engine.step()
        engine.step()
        engine.remove(engine.rows[0])
        assert proposer._known.rows[0].text.tokens[41] == prompt[40]


def test_a_row_that_lost_tokens_is_not_taken_for_the_request_that_has_them():
    text = np.full((1, 40), 7, np.int32)
    requests, proposer = KnownRequests(max_aside=8, aside_tokens=1000), ChainProposer(2)
    requests.match(text, np.array([40]), [True])
    requests.rows[0] = proposer.start(text[0])
    assert requests.match(text, np.array([40]), [True]) == [] and requests.rows[0] is not None
    assert len(requests.match(text, np.array([39]), [True])) == 1 and requests.rows == [None]


def test_the_second_turn_of_a_chat_adds_to_the_text_of_the_first(monkeypatch):
    proposer, engine = engine_of()
    first = StubRequest([1, 2, 3, 4, 5, 6, 7, 8], 60)
    run(engine, [first])
    monkeypatch.setattr(proposer._proposer, "start", lambda prompt: pytest.fail("its text is indexed again"))
    run(engine, [StubRequest([*first.tokens, 20, 21, 22], 120)])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_thousand_requests_ended_or_preempted_at_random_leave_nothing_behind(seed, caplog):
    rng = np.random.default_rng(seed)
    proposer, engine = engine_of(lambda tokens: tokens[-int(1 + tokens[0] % 9)], memory_tokens=4096)
    waiting = [
        StubRequest(rng.integers(0, 50, rng.integers(9, 120)).tolist(), int(rng.integers(121, 256)))
        for _ in range(1000)
    ]
    while waiting or engine.rows:
        while waiting and len(engine.rows) < 8:
            engine.add(waiting.pop(0))
        engine.step()
        for request in list(engine.rows):
            drawn = rng.random()
            if len(request.tokens) >= request.limit or drawn < 0.08:
                engine.remove(request)
            elif drawn < 0.12:
                engine.remove(request)
                waiting.insert(int(rng.integers(0, 9)), request)
        if len(engine.rows) > 1 and rng.random() < 0.3:
            engine.swap(0, len(engine.rows) - 1)
    assert not caplog.records
    assert engine.emitted / engine.steps > 1.5
    del engine
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is ChainRequest]
    assert len(proposer._known.aside) <= 8
    assert len(alive) <= 16
    assert sum(len(request) for request in proposer._known.aside) <= 4096
    assert len(proposer._proposer.outputs) <= 4096


def test_near_the_maximum_length_no_draft_is_too_long():
    _, engine = engine_of(max_model_len=40, most=16)
    run(engine, [StubRequest([1, 2, 3, 4, 5, 6, 7], limit) for limit in (30, 39, 40)])


def test_where_drafts_cost_more_than_they_give_none_is_made():
    config, now = stub_config(most=3), [0.0]
    proposer = LookaheadProposer(config, clock=lambda: now[0])
    engine = RowEngine(proposer, periodic, config)
    engine.add(StubRequest([1, 2, 3, 4, 5, 6, 7], 250))
    drafted = []
    for _ in range(60):
        now[0] += 1.0 if engine.rows[0].draft else 0.01
        before = engine.drafted
        engine.step()
        drafted.append(engine.drafted - before)
    assert sum(drafted[:30]) > 0
    assert sum(drafted[30:]) == 0


@pytest.mark.parametrize(
    ("device", "options", "most"),
    [("cpu", {}, 8), ("cuda", {}, 12), ("cpu", {"max_requests": 10}, 10), ("cuda", {"max_requests": 3}, 3)],
)
def test_a_batch_of_more_requests_than_the_limit_drafts_nothing(device, options, most):
    config = stub_config(max_num_seqs=12, **options)
    config.device_config = SimpleNamespace(device_type=device)
    engine = RowEngine(LookaheadProposer(config, clock=ticking()), periodic, config)
    for rows in range(1, 13):
        engine.add(StubRequest([rows, 2, 3, 4, 5, 6, 7], 10_000))
        before = engine.drafted
        for _ in range(8):
            engine.step()
            for request in engine.rows:
                del request.tokens[:-100]
        assert (engine.drafted > before) == (rows <= most), rows


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("chunk", [1 << 30, 7])
def test_a_plain_step_is_timed_without_those_that_read_prompts(rows, chunk):
    config, now = stub_config(max_num_seqs=rows), [0.0]
    proposer = LookaheadProposer(config, clock=lambda: now[0])
    engine = RowEngine(proposer, lambda tokens: int(rng.integers(1000)), config, chunk=chunk)
    waiting, rng = [], np.random.default_rng(0)
    for _ in range(6 * rows):
        prompt = rng.integers(0, 1000, rng.integers(20, 60)).tolist()
        waiting.append(StubRequest(prompt, len(prompt) + int(rng.integers(5, 20))))
    while waiting or engine.rows:
        for ended in [each for each in engine.rows if len(each.tokens) >= each.limit]:
            engine.remove(ended)
        while waiting and len(engine.rows) < rows:
            engine.add(waiting.pop(0))
        unread = sum(len(each.tokens) - each.read > 1 + len(each.draft) for each in engine.rows)
        now[0] += 0.01 * (1 + 5 * unread)
        engine.step()
    timed = [cost.plain for cost in proposer._lengths._costs.values() if cost.plain]
    assert timed and timed == pytest.approx([0.01] * len(timed), rel=0.05)


HOSTILE = {
    "nothing": ([], np.zeros(0, np.int32), np.zeros((0, 8), np.int32)),
    "negative tokens": ([[1]], np.array([3]), np.full((1, 8), -1, np.int32)),
    "a count beyond the row": ([[1]], np.array([9]), np.zeros((1, 8), np.int32)),
    "a negative count": ([[1]], np.array([-5]), np.zeros((1, 8), np.int32)),
    "more rows than counts": ([[1], [2]], np.array([3]), np.zeros((2, 8), np.int32)),
    "more rows than tokens": ([[1], [2]], np.array([3, 3]), np.zeros((1, 8), np.int32)),
    "tokens of another type": ([[1]], np.array([3]), np.zeros((1, 8), np.float32)),
    "flat tokens": ([[1]], np.array([3]), np.zeros(8, np.int32)),
    "no arrays": ([[1]], None, "tokens"),
    "no rows": (None, None, None),
    "no token in the row": ([[1]], np.array([0]), np.zeros((1, 8), np.int32)),
    "counts that are no numbers": ([[1]], np.array([np.nan]), np.zeros((1, 8), np.int32)),
}


@pytest.mark.parametrize("call", HOSTILE)
def test_no_call_raises_and_the_next_good_one_is_served(call, caplog):
    proposer, engine = engine_of()
    engine.add(StubRequest([1, 2, 3, 4, 5, 6, 7], 200))
    for _ in range(3):
        engine.step()
    sampled, counts, tokens = HOSTILE[call]
    for _ in range(3):
        drafts = proposer.propose(sampled, counts, tokens)
        assert drafts == [[] for _ in sampled or []]
    assert len(caplog.records) <= 1
    before = engine.drafted
    for _ in range(20):
        engine.step()
    assert engine.drafted > before


def test_a_fault_of_one_request_leaves_the_others_their_drafts(caplog):
    proposer, engine = engine_of()
    for first in (1, 101):
        engine.add(StubRequest(list(range(first, first + 7)) * 3, 250))
    for _ in range(6):
        engine.step()
    engine.tokens[0, engine.counts[0] - 1] = -1
    drafts = proposer.propose([[1], [101]], engine.counts, engine.tokens)
    assert drafts[0] == [] and drafts[1]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_pool_is_drafted_from_and_one_that_changes_is_told_and_left(tmp_path, caplog):
    path, rng = tmp_path / "pool.lkp", np.random.default_rng(0)
    story = rng.integers(0, 1000, 120).tolist()
    index = ChainIndex()
    index.append(story)
    write_pool(path, index.tokens, fingerprint=0)
    _, engine = engine_of(lambda tokens: story[len(tokens)], pool=str(path))
    run(engine, [StubRequest(story[:4], 60)])
    assert engine.emitted / engine.steps > 3
    with path.open("ab") as file:
        file.write(b"more")
    run(engine, [StubRequest(story[:4], 60)])
    assert sum("changed while it was in use" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"memory_tokens": 5}, ConfigError, "lookahead.memory_tokens must be a whole number of at least 1024, got 5"),
        (
            {"memory_tokens": True},
            ConfigError,
            "lookahead.memory_tokens must be a whole number of at least 1024, got True",
        ),
        ({"min_probability": 2}, ConfigError, "lookahead.min_probability must be from 0 to below 1, got 2"),
        (
            {"max_requests": 0},
            ConfigError,
            "lookahead.max_requests must be null or a whole number of at least 1, got 0",
        ),
        ({"pool": 5}, ConfigError, "lookahead.pool must be the name of a file, got 5"),
        ({"pol": "x"}, ConfigError, "knows pool, memory_tokens, min_probability, max_requests, got pol"),
        ({"pool": "/no/such/file"}, PoolError, "/no/such/file: No such file"),
        ({"most": 0}, ConfigError, "num_speculative_tokens: max_draft must be from 1 to 1024, got 0"),
        ({"most": None}, ConfigError, "num_speculative_tokens: "),
    ],
)
def test_what_is_wrong_with_the_options_is_said_at_the_start(options, error, complaint):
    with pytest.raises(LookaheadError, match=complaint) as caught:
        LookaheadProposer(stub_config(**options))
    assert isinstance(caught.value, error)


def test_options_that_are_no_object_are_refused():
    config = stub_config()
    config.additional_config = {"lookahead": "pool.lkp"}
    with pytest.raises(ConfigError, match=r"additional_config.lookahead must be an object, got 'pool.lkp'"):
        LookaheadProposer(config)
