"""Any number of prompts in a few rows, token for token what `model.generate` gives for each alone."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lookahead
from lookahead import ConfigError, LookaheadConfig, PromptError, UnsupportedModelError
from lookahead.decoding.cache_room import cache_tokens_of
from lookahead.decoding.prompts import PromptReader
from lookahead.decoding.scheduler import Scheduler
from lookahead.engine.engine import Engine
from lookahead.errors import LogitsError
from tests.support.adversarial_proposers import drafting_by, random_trees
from tests.support.families import FAMILIES, build

LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


def texts(count, shortest=3, longest=60, seed=0):
    chance = random.Random(seed)
    return ["".join(chance.choices(LETTERS, k=chance.randint(shortest, longest))) for _ in range(count)]


def plainly(model, encode, prompt, **options):
    ids = torch.tensor([encode(prompt)["input_ids"]])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, pad_token_id=0, **{"do_sample": False, **options})
    return out[0, ids.shape[1] :].tolist()


def many(model, tokenizer, prompts, **options):
    done = list(lookahead.stream_many(model, tokenizer, prompts, **options))
    assert sorted(each.index for each in done) == list(range(len(done)))
    return sorted(done, key=lambda each: each.index)


@pytest.fixture
def gpt2():
    """A tiny model with a table of 64 positions."""
    config = GPT2Config(vocab_size=101, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
    config.initializer_range = 0.4
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return GPT2LMHeadModel(config).float().eval()


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("kind", ["tiny_llama", "looping_llama"])
def test_every_prompt_gets_its_own_tokens_whatever_stands_beside_it(kind, tiny_tokenizer, rows, request):
    model, prompts = request.getfixturevalue(kind), texts(11)
    options = {"max_new_tokens": 30, "eos_token_id": [11, 40, 77, 90]}
    expected = [plainly(model, tiny_tokenizer, prompt, **options) for prompt in prompts]
    assert len(set(map(len, expected))) > 3  # they end at different times
    done = many(model, tiny_tokenizer, prompts, rows=rows, **options)
    assert [each.token_ids for each in done] == expected
    assert [each.text for each in done] == [tiny_tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [each.stats.emitted_tokens for each in done] == list(map(len, expected))
    assert [each.stats.prompt_tokens for each in done] == list(map(len, prompts))


@pytest.mark.parametrize(
    "config",
    [LookaheadConfig(proposers=()), LookaheadConfig(draft="fixed"), LookaheadConfig(window="auto", draft="fixed")],
    ids=["plain", "fixed", "jacobi"],
)
def test_drafts_of_any_kind_change_no_token(looping_llama, tiny_tokenizer, config):
    prompts = texts(7, seed=3)
    done = many(looping_llama, tiny_tokenizer, prompts, rows=3, config=config, max_new_tokens=40)
    assert [each.token_ids for each in done] == [
        plainly(looping_llama, tiny_tokenizer, prompt, max_new_tokens=40) for prompt in prompts
    ]
    assert bool(sum(each.stats.accepted_tokens for each in done)) == bool(config.proposers)


def test_processors_and_stop_strings_are_those_of_every_prompt(tiny_llama, tiny_tokenizer):
    prompts = texts(5, seed=1)
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "min_new_tokens": 4, "eos_token_id": 50}
    expected = [plainly(tiny_llama, tiny_tokenizer, prompt, **options) for prompt in prompts]
    assert [each.token_ids for each in many(tiny_llama, tiny_tokenizer, prompts, rows=2, **options)] == expected
    stop = tiny_tokenizer.decode(expected[0][2:4])
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "stop_strings": [stop]}
    expected = [plainly(tiny_llama, tiny_tokenizer, p, tokenizer=tiny_tokenizer, **options) for p in prompts]
    assert [each.token_ids for each in many(tiny_llama, tiny_tokenizer, prompts, rows=2, **options)] == expected


@pytest.mark.parametrize("seed", [0, -3, (1 << 64) - 2])
def test_with_a_seed_prompts_are_sampled_together_as_each_alone(seed, tiny_llama, tiny_tokenizer):
    prompts, options = texts(4), {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9}
    state = torch.get_rng_state()
    done = list(lookahead.stream_many(tiny_llama, tiny_tokenizer, prompts, rows=3, seed=seed, **options))
    assert torch.equal(torch.get_rng_state(), state)  # rows have random numbers of their own
    for each in done:
        own = seed + each.index if seed + each.index < 1 << 64 else seed + each.index - (1 << 64)
        alone = lookahead.generate(tiny_llama, tiny_tokenizer, prompts[each.index], seed=own, **options)
        assert alone.token_ids == [each.token_ids]


@pytest.mark.filterwarnings("ignore:RecurrentGemma")
def test_with_a_seed_what_is_decoded_apart_is_sampled_as_alone_too(tiny_tokenizer):
    model, options = build(FAMILIES["RecurrentGemma"]), {"max_new_tokens": 9, "do_sample": True}
    done = list(lookahead.stream_many(model, tiny_tokenizer, texts(3), seed=5, **options))
    for each in done:
        alone = lookahead.generate(model, tiny_tokenizer, texts(3)[each.index], seed=5 + each.index, **options)
        assert alone.token_ids == [each.token_ids]


def test_a_seed_that_is_none_is_refused_by_name(tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        next(lookahead.stream_many(tiny_llama, tiny_tokenizer, "abc", seed=0.5))


def test_sampled_tokens_are_those_of_one_call_after_the_other(tiny_llama, tiny_tokenizer):
    prompts, options = texts(4), {"max_new_tokens": 12, "do_sample": True, "temperature": 0.9}
    torch.manual_seed(3)
    expected = [plainly(tiny_llama, tiny_tokenizer, prompt, **options) for prompt in prompts]
    torch.manual_seed(3)
    assert [each.token_ids for each in many(tiny_llama, tiny_tokenizer, prompts, rows=3, **options)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [8, 80], ids=["short", "read apart"])
def test_prompts_join_free_rows_at_once_where_beginnings_are_kept(dtype, tokens, tiny_llama, tiny_tokenizer):
    model, steps = copy.deepcopy(tiny_llama).to(dtype), list[int]()
    prompts = [[*range(5 + i, 5 + i + tokens)] for i in range(6)]

    def step(engine, own=Engine.step, **options):
        steps.append(1)
        return own(engine, **options)

    def count(prefix_bytes):
        steps.clear()
        options = {"rows": 6, "max_new_tokens": 30, "min_new_tokens": 30, "config": LookaheadConfig(proposers=())}
        done = list(lookahead.stream_many(model, tiny_tokenizer, prompts, prefix_bytes=prefix_bytes, **options))
        assert [len(one.token_ids) for one in done] == [30] * 6
        return len(steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", step)
        assert count(1 << 24) == count(0)


def test_further_sequences_of_a_prompt_are_drawn_to_their_end(tiny_llama, tiny_tokenizer):
    options = {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3, "eos_token_id": [*range(3, 40)]}
    torch.manual_seed(0)
    expected = [lookahead.generate(tiny_llama, tiny_tokenizer, prompt, **options).token_ids[0] for prompt in "abcd"]
    torch.manual_seed(0)
    done = {one.index: one.token_ids for one in lookahead.stream_many(tiny_llama, tiny_tokenizer, [*"abcd"], **options)}
    assert [done[i] for i in range(4)] == expected


def test_prompts_are_taken_as_rows_come_free(tiny_llama, tiny_tokenizer):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield texts(1, seed=len(taken))[0]

    own = tiny_llama.config._attn_implementation
    stream = lookahead.stream_many(tiny_llama, tiny_tokenizer, endless(), rows=3, max_new_tokens=10)
    for number, _ in zip(range(1, 8), stream, strict=False):
        assert len(taken) <= number + 2
        assert tiny_llama.config._attn_implementation == own
    stream.close()
    assert len(taken) <= 10


def test_a_row_that_ends_is_filled_at_once(tiny_llama, tiny_tokenizer):
    config = LookaheadConfig(proposers=(), trust_user_code=True)
    reader = PromptReader(tiny_llama, tiny_tokenizer, config, max_new_tokens=8)
    scheduler = Scheduler(reader, rows=2)
    prompts, done, passes = texts(6), [], []
    waiting = list(enumerate(prompts))
    counter = tiny_llama.register_forward_pre_hook(lambda *_: passes.append(1))
    many(tiny_llama, tiny_tokenizer, prompts[:1], config=config)  # with the passes that the first use of a model takes
    passes.clear()
    while waiting or not scheduler.is_idle:
        while waiting and scheduler.is_free:
            scheduler.put(*waiting.pop(0))
        done += scheduler.step()
    counter.remove()
    assert len(done) == 6
    assert len(passes) == 3 * 8  # three times two rows, each with a prefill and seven steps


@pytest.mark.parametrize("sources", [("prompt", "outputs"), ("prompt",)], ids="+".join)
def test_a_row_drafts_from_one_ahead_with_its_prompt_if_outputs_are_a_source(tiny_llama, tiny_tokenizer, sources):
    other, shared = texts(2, seed=5)
    config = LookaheadConfig(proposers=sources, draft="fixed", max_nodes=30, memory="request")
    scheduler, done = Scheduler(PromptReader(tiny_llama, tiny_tokenizer, config), rows=2), []
    scheduler.put(0, other, 24)
    scheduler.put(1, shared, 90)
    while not done:  # the second prompt is begun
        done += scheduler.step()
    scheduler.put(2, shared, 40)
    while len(done) < 2:  # the third ends before the second
        done += scheduler.step()
    behind = done[1]
    assert behind.token_ids == plainly(tiny_llama, tiny_tokenizer, shared, max_new_tokens=40)
    assert (behind.stats.accepted_by_source.get("outputs", 0) >= 15) == ("outputs" in sources)


def test_a_prompt_beyond_the_models_positions_fails_alone_and_outputs_end_there(gpt2, tiny_tokenizer):
    prompts = texts(6, longest=30)
    prompts[2], prompts[4] = texts(1, 70, 70)[0], texts(1, 60, 60)[0]
    done = many(gpt2, tiny_tokenizer, prompts, rows=3, max_new_tokens=20)
    assert isinstance(done[2].error, PromptError)
    assert "prompt 2 has 70 tokens and the model has 64 positions" in str(done[2].error)
    assert (done[4].finish_reason, done[4].error) == ("length", None)
    assert done[4].token_ids == plainly(gpt2, tiny_tokenizer, prompts[4], max_new_tokens=5)
    for i in (0, 1, 3, 5):
        assert done[i].error is None
        assert done[i].token_ids == plainly(gpt2, tiny_tokenizer, prompts[i], max_new_tokens=20)


def test_a_row_without_numbers_fails_alone_and_leaves_nothing_behind(tiny_llama, tiny_tokenizer):
    poison = tiny_tokenizer("#")["input_ids"][0]
    sound = copy.deepcopy(tiny_llama)
    with torch.no_grad():
        sound.lm_head.weight[poison] = 0.0  # or it would be said by itself
        model = copy.deepcopy(sound)
        model.get_input_embeddings().weight[poison] = torch.nan
    prompts = [text if i % 3 else f"{text}#{text}" for i, text in enumerate(texts(9, longest=20))]
    done = many(model, tiny_tokenizer, prompts, rows=2, max_new_tokens=10)
    for i, each in enumerate(done):
        assert isinstance(each.error, LogitsError) == (i % 3 == 0)
        if i % 3:
            assert each.token_ids == plainly(sound, tiny_tokenizer, prompts[i], max_new_tokens=10)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 1 has no tokens"),
        (7, "prompt 1 must be a string, chat messages or token ids, got int"),
        ("x" * 50, "max_length must be more"),
    ],
)
def test_a_prompt_that_cannot_be_continued_fails_alone(tiny_llama, tiny_tokenizer, prompt, message):
    done = many(tiny_llama, tiny_tokenizer, ["abc", prompt, "de"], rows=2, max_length=40)
    assert message in str(done[1].error)
    assert [len(each.token_ids) for each in done] == [37, 0, 38]


def test_prompts_that_break_off_are_told_of_once_those_before_are_done(tiny_llama, tiny_tokenizer):
    def broken():
        yield from texts(4)
        raise OSError("the disk is gone")

    done = []
    with pytest.raises(OSError, match="the disk is gone"):
        for each in lookahead.stream_many(tiny_llama, tiny_tokenizer, broken(), rows=3, max_new_tokens=6):
            done.append(each.index)
    assert sorted(done) == [0, 1, 2, 3]


def test_a_long_prompt_waits_until_the_cache_has_room_for_it(tiny_llama, tiny_tokenizer):
    options, cache = {"max_new_tokens": 12}, 480
    prompts = texts(9, longest=40)
    prompts[3] = texts(1, 300, 300)[0]
    prompts[6] = texts(1, 480, 480)[0]  # more than all of it
    scheduler = Scheduler(PromptReader(tiny_llama, tiny_tokenizer, **options), rows=4, cache_tokens=cache)
    waiting, done, sizes = list(enumerate(prompts)), [], set()
    while waiting or not scheduler.is_idle:
        while waiting and scheduler.is_free:
            scheduler.put(*waiting.pop(0))
        done += scheduler.step()
        slots = scheduler._shared.engine.cache.slots
        sizes.add((slots.rows, slots.capacity))
    assert max(rows for rows, _ in sizes) > 1
    assert all(rows * capacity <= cache or rows == 1 for rows, capacity in sizes)
    for each in done:
        assert each.token_ids == plainly(tiny_llama, tiny_tokenizer, prompts[each.index], **options)


@pytest.mark.parametrize("missing", [0, 1])
def test_drafts_count_among_the_tokens_that_rows_may_need(missing, tiny_llama, tiny_tokenizer):
    prompts, new, nodes = texts(4, 40, 40), 12, 30
    config = LookaheadConfig(draft="fixed", max_nodes=nodes)
    reader = PromptReader(tiny_llama, tiny_tokenizer, config, max_new_tokens=new)
    room = 3 * (40 + new + nodes + 1) - missing
    scheduler, most = Scheduler(reader, rows=4, cache_tokens=room), 0
    for index, prompt in enumerate(prompts):
        scheduler.put(index, prompt)
    with drafting_by(random_trees(101)):  # as many nodes as allowed, in the last steps too
        while not scheduler.is_idle:
            for requests in scheduler.steps():
                most = max(most, len(requests))
                slots = scheduler._shared.engine.cache.slots
                assert slots.rows * slots.capacity <= room
    assert most == 3 - missing


@pytest.mark.parametrize("waits", [False, True])
def test_a_cancelled_request_frees_its_row_and_the_others_keep_their_tokens(waits, tiny_llama, tiny_tokenizer):
    prompts, new = texts(3, 20, 20), 40
    model = copy.deepcopy(tiny_llama)  # drafts of outputs that other tests have seen end rows too soon
    scheduler = Scheduler(PromptReader(model, tiny_tokenizer, max_new_tokens=new), rows=2 - waits)
    requests = [scheduler.put(index, prompt) for index, prompt in enumerate(prompts)]
    steps, gone, over = scheduler.steps(), requests[1], []
    for _ in range(2):
        next(steps)
    scheduler.cancel(gone)
    while not scheduler.is_idle:
        for told in steps:
            over += [request.index for request in told if request.is_over]
            assert len(scheduler.running) <= scheduler.rows
        steps = scheduler.steps()
    assert gone.is_over and not gone.is_finished and gone.stats.emitted_tokens < new
    assert sorted(over) == [0, 1, 2]
    for request in (requests[0], requests[2]):
        expected = plainly(tiny_llama, tiny_tokenizer, prompts[request.index], max_new_tokens=new)
        assert request.is_finished and request.token_ids == expected


def test_a_request_that_is_decoded_apart_ends_at_the_step_after_it_is_cancelled(tiny_llama, tiny_tokenizer):
    options = {"max_new_tokens": 40, "do_sample": True}  # without a seed
    scheduler = Scheduler(PromptReader(tiny_llama, tiny_tokenizer, **options), rows=2)
    first, second = (scheduler.put(index, prompt) for index, prompt in enumerate(texts(2)))
    next(scheduler.steps())
    scheduler.cancel(first)
    while not scheduler.is_idle:
        scheduler.step()
    assert first.is_over and not first.is_finished and first.stats.emitted_tokens == 1
    assert second.is_finished and len(second.token_ids) == 40


def test_a_long_first_prompt_takes_no_more_of_the_cache_than_it_needs(tiny_llama, tiny_tokenizer):
    scheduler = Scheduler(PromptReader(tiny_llama, tiny_tokenizer, max_new_tokens=12), rows=4, cache_tokens=600)
    scheduler.put(0, texts(1, 300, 300)[0])
    scheduler.step()
    slots = scheduler._shared.engine.cache.slots
    assert slots.rows * slots.capacity <= 600
    assert scheduler._shared.engine.cache.layers[0].keys.shape[:2] == (slots.rows, slots.capacity)


def test_the_cache_takes_no_more_bytes_than_the_weights(tiny_llama, monkeypatch):
    assert cache_tokens_of(tiny_llama, 16) == 16 * 2048  # little as they are
    monkeypatch.setattr("lookahead.decoding.cache_room._LEAST_CACHE", 0)
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dimensions, bytes
    assert cache_tokens_of(tiny_llama, 16) == tiny_llama.get_memory_footprint() // per_token


def test_reading_is_told_chunk_by_chunk(tiny_llama, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("lookahead.backend.torch_backend.PREFILL_CHUNK", 16)
    prompt, told = texts(1, 100, 100)[0], []
    lookahead.generate(
        tiny_llama, tiny_tokenizer, prompt, max_new_tokens=4, on_prefill=lambda *told_now: told.append(told_now)
    )
    assert told[0] == (0, 100) and told[-1] == (100, 100)
    assert told == sorted(told) and len(told) > 5
    batched = []
    reader = PromptReader(tiny_llama, tiny_tokenizer, max_new_tokens=4)
    scheduler = Scheduler(reader, rows=2, on_prefill=lambda *told_now: batched.append(told_now))
    scheduler.put(0, prompt)
    scheduler.step()
    assert batched == told


def test_a_model_that_scores_no_trees_is_served_one_prompt_after_the_other(tiny_llama, tiny_tokenizer, monkeypatch):
    from lookahead.backend.support import Support

    monkeypatch.setattr("lookahead.decoding.scheduler.support_of", lambda *_, **__: Support("chains", "of a test"))
    prompts = texts(3)
    done = many(tiny_llama, tiny_tokenizer, prompts, rows=2, max_new_tokens=9)
    assert [each.token_ids for each in done] == [
        plainly(tiny_llama, tiny_tokenizer, prompt, max_new_tokens=9) for prompt in prompts
    ]


@pytest.mark.parametrize("options", [{"rows": 0}, {"rows": 1.5}, {"cache_tokens": 0}, {"max_new_tokens": 0}])
def test_an_option_out_of_range_is_refused_at_once(tiny_llama, tiny_tokenizer, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be a whole number"):
        lookahead.stream_many(tiny_llama, tiny_tokenizer, [], **options)


def test_a_mode_without_exact_form_is_refused(tiny_llama, tiny_tokenizer):
    with pytest.raises(UnsupportedModelError, match="beam search"):
        list(lookahead.stream_many(tiny_llama, tiny_tokenizer, ["abc"], num_beams=2, max_new_tokens=4))


@pytest.mark.filterwarnings("ignore:LlamaForCausalLM cannot be decoded speculatively")
def test_a_model_that_scores_no_drafts_is_decoded_plainly_unless_asked_for(tiny_llama, tiny_tokenizer, monkeypatch):
    from lookahead.backend.support import Support

    for place in ("lookahead.backend.support", "lookahead.decoding.scheduler"):
        monkeypatch.setattr(f"{place}.support_of", lambda *_, **__: Support("none", "it is told so"))
    prompts = texts(3)
    done = many(tiny_llama, tiny_tokenizer, prompts, rows=2, max_new_tokens=9)
    assert [each.token_ids for each in done] == [
        plainly(tiny_llama, tiny_tokenizer, prompt, max_new_tokens=9) for prompt in prompts
    ]
    with pytest.raises(UnsupportedModelError, match="leave out window=7 to decode it plainly"):
        many(tiny_llama, tiny_tokenizer, prompts, rows=2, max_new_tokens=9, config=LookaheadConfig(window=7))
