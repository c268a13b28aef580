"""Every form in which a prompt may be given, and what becomes of it where there is no room for it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

import lookahead
from lookahead.backend.support import Support
from lookahead.decoding.prompts import PromptReader
from lookahead.errors import ConfigError, PromptError
from lookahead.model.facts import context_limit

GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abab abab"}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "ab"}]


def plainly(model, ids, **options):
    """What transformers continues ids with."""
    return model.generate(torch.tensor([ids]), **{**GREEDY, **options})[0, len(ids) :].tolist()


# Forms


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], [*ANSWERED, CHAT[1]]], ids=["system", "user", "history"])
def test_chat_messages_are_the_ids_of_apply_chat_template(tiny_llama, chat_tokenizer, chat):
    ids = chat_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    result = lookahead.generate(tiny_llama, chat_tokenizer, chat, **GREEDY)
    assert result.token_ids == [plainly(tiny_llama, ids)]
    assert result.stats.prompt_tokens == len(ids)
    pieces = lookahead.stream(tiny_llama, chat_tokenizer, chat, **GREEDY)
    assert "".join(pieces) == result.texts[0]
    assert (pieces.token_ids, pieces.finish_reason) == (result.token_ids[0], "length")
    assert pieces.stats.emitted_tokens == 9
    (done,) = lookahead.stream_many(tiny_llama, chat_tokenizer, chat, **GREEDY)
    assert done.token_ids == result.token_ids[0]


def test_an_answer_that_was_begun_is_continued(tiny_llama, chat_tokenizer):
    ids = chat_tokenizer.apply_chat_template(ANSWERED, continue_final_message=True, return_dict=True)["input_ids"]
    assert lookahead.generate(tiny_llama, chat_tokenizer, ANSWERED, **GREEDY).token_ids == [plainly(tiny_llama, ids)]


def test_a_string_is_no_message_even_where_there_is_a_template(tiny_llama, tiny_tokenizer, chat_tokenizer):
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, "abab", **GREEDY)
    assert lookahead.generate(tiny_llama, chat_tokenizer, "abab", **GREEDY).token_ids == expected.token_ids


def test_the_template_gets_further_arguments(tiny_llama, chat_tokenizer):
    ids = chat_tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True, mood="!!")["input_ids"]
    result = lookahead.generate(tiny_llama, chat_tokenizer, CHAT, chat_template_kwargs={"mood": "!!"}, **GREEDY)
    assert result.token_ids == [plainly(tiny_llama, ids)]


def forms(tokenizer):
    """One prompt in every form of ids."""
    ids = tokenizer("abab abab")["input_ids"]
    yield "ids", ids
    yield "a tuple", tuple(ids)
    yield "numpy's numbers", [np.int64(token) for token in ids]
    yield "an array", np.array(ids)
    yield "a tensor", torch.tensor(ids)
    yield "a tensor of one row", torch.tensor([ids])
    yield "a tokenizer's tensors", tokenizer("abab abab", return_tensors="pt")
    yield "a tokenizer's lists", tokenizer("abab abab")
    yield "a tokenizer's batch", tokenizer(["abab abab"], return_tensors="np")
    yield "a plain dict", dict(tokenizer("abab abab"))
    yield "a list of a string", ["abab abab"]


@pytest.mark.parametrize("number", range(11))
def test_ids_tensors_and_what_a_tokenizer_returns_are_prompts(tiny_llama, tiny_tokenizer, number):
    name, prompt = list(forms(tiny_tokenizer))[number]
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, "abab abab", **GREEDY)
    assert lookahead.generate(tiny_llama, tiny_tokenizer, prompt, **GREEDY).token_ids == expected.token_ids, name
    assert "".join(lookahead.stream(tiny_llama, tiny_tokenizer, prompt, **GREEDY)) == expected.texts[0], name
    (done,) = lookahead.stream_many(tiny_llama, tiny_tokenizer, prompt, **GREEDY)
    assert done.token_ids == expected.token_ids[0], name


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_mask_hides_is_left_out_on_either_side(tiny_llama, tiny_tokenizer, side):
    texts = ["abab abab", "xyz", "hello there"]
    expected = lookahead.generate(tiny_llama, tiny_tokenizer, texts, **GREEDY)
    batch = tiny_tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
    for prompts in (batch, batch["input_ids"]):
        assert lookahead.generate(tiny_llama, tiny_tokenizer, prompts, **GREEDY).token_ids == expected.token_ids


def test_a_batch_may_mix_text_chats_and_ids(tiny_llama, chat_tokenizer):
    ids = chat_tokenizer("xyz")["input_ids"]
    mixed = ["abab abab", CHAT, ids, torch.tensor(ids)]
    alone = [lookahead.generate(tiny_llama, chat_tokenizer, prompt, **GREEDY).token_ids[0] for prompt in mixed]
    assert lookahead.generate(tiny_llama, chat_tokenizer, mixed, **GREEDY).token_ids == alone
    done = {each.index: each.token_ids for each in lookahead.stream_many(tiny_llama, chat_tokenizer, mixed, **GREEDY)}
    assert [done[i] for i in range(4)] == alone


def test_prompts_may_come_from_a_stream_without_an_end(tiny_llama, tiny_tokenizer):
    def endless():
        while True:
            yield "abab"

    done = next(lookahead.stream_many(tiny_llama, tiny_tokenizer, endless(), rows=2, **GREEDY))
    assert len(done.token_ids) == 9


def test_no_prompts_give_nothing(tiny_llama, tiny_tokenizer):
    for nothing in ([], (), iter([])):
        assert lookahead.generate(tiny_llama, tiny_tokenizer, nothing, **GREEDY).texts == []
        assert list(lookahead.stream_many(tiny_llama, tiny_tokenizer, nothing, **GREEDY)) == []


# The model's context


@pytest.fixture(scope="module")
def small():
    """A model with a context of 40 tokens, by rotary positions."""
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40, initializer_range=0.4, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    return LlamaForCausalLM(config).float().eval()


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(small, tiny_tokenizer):
    message = "prompt 0 has 41 tokens and the model has 40 positions; shorten it, or pass truncate='left'"
    for call in (lookahead.generate, lookahead.stream):
        with pytest.raises(PromptError, match=message):
            call(small, tiny_tokenizer, "x" * 41, **GREEDY)
    done = {each.index: each for each in lookahead.stream_many(small, tiny_tokenizer, ["x" * 41, "abc"], **GREEDY)}
    assert message in str(done[0].error)
    assert len(done[1].token_ids) == 9


def test_an_output_ends_where_the_context_is_full_and_says_so(small, tiny_tokenizer):
    texts = ["ab" * 17, "abc"]
    options = {**GREEDY, "max_new_tokens": 30}
    expected = [plainly(small, tiny_tokenizer(text)["input_ids"], max_new_tokens=30) for text in texts]
    result = lookahead.generate(small, tiny_tokenizer, texts, **options)
    assert result.token_ids == [expected[0][:7], expected[1]]  # the last token is not read any more
    assert result.finish_reasons == ["length", "length"]
    assert lookahead.generate(small, tiny_tokenizer, texts[0], max_length=500).token_ids[0] == expected[0][:7]
    done = {each.index: each.token_ids for each in lookahead.stream_many(small, tiny_tokenizer, texts, **options)}
    assert [done[0], done[1]] == result.token_ids


@pytest.mark.filterwarnings("ignore:LlamaForCausalLM cannot be decoded speculatively")
def test_an_output_that_transformers_decodes_ends_there_as_well(small, tiny_tokenizer, monkeypatch):
    texts, options = ["ab" * 17, "abc"], {**GREEDY, "max_new_tokens": 30}
    expected = lookahead.generate(small, tiny_tokenizer, texts, **options)
    monkeypatch.setattr("lookahead.backend.support.support_of", lambda *_, **__: Support("none", "it is told so"))
    result = lookahead.generate(small, tiny_tokenizer, texts, **options)
    assert result.token_ids == expected.token_ids
    assert result.finish_reasons == ["length", "length"]


def test_the_drop_in_goes_past_the_context_as_generate_does(small, tiny_tokenizer):
    ids = torch.tensor([tiny_tokenizer("ab" * 17)["input_ids"]])
    options = {**GREEDY, "max_new_tokens": 30}
    expected = small.generate(ids, **options)
    assert torch.equal(small.generate(ids, **options, custom_generate=lookahead.decode), expected)


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-31, None)), ("right", slice(31))])
def test_a_truncated_prompt_leaves_room_for_its_output(small, tiny_tokenizer, side, kept):
    text = "the quick brown fox jumps over the lazy dog"
    expected = plainly(small, tiny_tokenizer(text)["input_ids"][kept])
    assert lookahead.generate(small, tiny_tokenizer, text, truncate=side, **GREEDY).token_ids == [expected]
    (done,) = lookahead.stream_many(small, tiny_tokenizer, text, truncate=side, **GREEDY)
    assert done.token_ids == expected
    short = lookahead.generate(small, tiny_tokenizer, "abc", truncate=side, **GREEDY)
    assert short.token_ids == lookahead.generate(small, tiny_tokenizer, "abc", **GREEDY).token_ids


def test_a_truncated_text_keeps_the_special_tokens_around_it(small, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    around = {"single": "<bos> $A <eos>", "special_tokens": [("<bos>", 1), ("<eos>", 2)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**around)
    text = "x" * 30 + "y" * 10
    for side, kept in (("left", "x" * 8 + "y" * 10), ("right", "x" * 18)):
        reader = PromptReader(small, tokenizer, truncate=side, max_new_tokens=20)
        assert reader.read(text, 0) == [1, *tiny_tokenizer(kept)["input_ids"], 2]


def test_a_truncated_chat_loses_its_oldest_turns_first_and_then_text_of_the_last(small, chat_tokenizer):
    reader = PromptReader(small, chat_tokenizer, truncate="left", max_new_tokens=9)
    chat = [
        {"role": "system", "content": "so"},
        {"role": "user", "content": "old question"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "new"},
    ]
    shown = chat_tokenizer.decode(reader.read(chat, 0))
    assert shown == "<bos><a>sso<b><a>unew<b><a>a"
    chat[-1]["content"] = "x" * 30 + "the end"
    ids = reader.read(chat, 0)
    assert len(ids) == 31
    assert chat_tokenizer.decode(ids) == "<bos><a>sso<b><a>u" + "xxxthe end<b><a>a"
    chat[0]["content"] = "x" * 50
    with pytest.raises(PromptError, match="without its older turns and the text of its last message"):
        reader.read(chat, 0)


def test_to_truncate_nothing_may_be_asked_that_leaves_no_prompt(small, tiny_tokenizer):
    with pytest.raises(ConfigError, match="max_new_tokens must be less than the model's context of 40 tokens"):
        lookahead.generate(small, tiny_tokenizer, "abc", truncate="left", max_new_tokens=40)
    with pytest.raises(ConfigError, match="truncate must be 'left', 'right' or None, got 'middle'"):
        lookahead.generate(small, tiny_tokenizer, "abc", truncate="middle")


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 40),
        ({"rope_type": "linear", "factor": 4.0}, 160),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}, 40),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 40}, 320),
    ],
)
def test_scaled_positions_extend_the_context(small, rope, limit):
    config = LlamaConfig(**{**small.config.to_dict(), "rope_parameters": {"rope_theta": 10000.0, **rope}})

    class Model:
        pass

    Model.config = config
    assert context_limit(Model) == limit


# Parts

WORDS = [{"type": "text", "text": "abab "}, {"type": "text", "text": "abab"}]
READS_PARTS = (
    "<bos>{% for m in messages %}{{ m.role[0] }}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<a>a{% endif %}"
)


def test_text_in_parts_is_the_text_of_a_message(tiny_llama, chat_tokenizer):
    parts = [CHAT[0], {**CHAT[1], "content": WORDS}]
    expected = lookahead.generate(tiny_llama, chat_tokenizer, CHAT, **GREEDY)
    assert lookahead.generate(tiny_llama, chat_tokenizer, parts, **GREEDY).token_ids == expected.token_ids
    cut = {"truncate": "left", **GREEDY}
    short = lookahead.generate(tiny_llama, chat_tokenizer, CHAT, **cut)
    assert lookahead.generate(tiny_llama, chat_tokenizer, parts, **cut).token_ids == short.token_ids


def test_a_template_that_reads_parts_gets_them(tiny_llama, chat_tokenizer):
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = READS_PARTS
    parts = [{"role": "user", "content": WORDS}]
    ids = tokenizer.apply_chat_template(parts, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert "abab abab" in tokenizer.decode(ids)
    assert lookahead.generate(tiny_llama, tokenizer, parts, **GREEDY).token_ids == [plainly(tiny_llama, ids)]


@pytest.mark.parametrize(
    ("part", "got"),
    [
        ({"type": "image", "url": "a.png"}, "got type 'image'; images and sound go through the model's processor"),
        ({"type": "text"}, "got {'type': 'text'}"),
        ("abc", "got 'abc'"),
        ({"type": "text", "text": 5}, "got {'type': 'text', 'text': 5}"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_name(part, got, tiny_llama, chat_tokenizer):
    chat = [CHAT[0], {"role": "user", "content": [WORDS[0], part]}]
    with pytest.raises(PromptError, match="message 1 of prompt 0: parts of a content") as refused:
        lookahead.generate(tiny_llama, chat_tokenizer, chat, **GREEDY)
    assert got in str(refused.value)
