"""When tokens are sampled: one rule for Python and the command line."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import lookahead
from lookahead.cli.app import app

DRAWS = [{"temperature": 0.7}, {"temperature": 1.0}, {"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}]
NEW = {"max_new_tokens": 24, "pad_token_id": 0}
TEXT = "Once upon"


def of_transformers(model, tokenizer, text=TEXT, **options):
    """The new tokens of `model.generate` under the seed 7."""
    inputs = tokenizer(text, return_tensors="pt")
    torch.manual_seed(7)
    return model.generate(**inputs, **NEW, **options)[0, inputs["input_ids"].shape[1] :].tolist()


def by_generate(*pair, **options):
    return lookahead.generate(*pair, TEXT, seed=7, **NEW, **options).token_ids[0]


def by_stream(*pair, **options):
    pieces = lookahead.stream(*pair, TEXT, seed=7, **NEW, **options)
    "".join(pieces)
    return pieces.token_ids


def by_stream_many(*pair, **options):
    torch.manual_seed(7)
    (done,) = lookahead.stream_many(*pair, [TEXT], **NEW, **options)
    return done.token_ids


CALLS = pytest.mark.parametrize("call", [by_generate, by_stream, by_stream_many])


@CALLS
@pytest.mark.parametrize("options", DRAWS, ids=str)
def test_an_option_of_draws_means_sampling(tiny_llama, tiny_tokenizer, call, options):
    expected = of_transformers(tiny_llama, tiny_tokenizer, do_sample=True, **options)
    assert call(tiny_llama, tiny_tokenizer, **options) == expected
    assert call(tiny_llama, tiny_tokenizer, do_sample=None, **options) == expected
    assert expected != of_transformers(tiny_llama, tiny_tokenizer, do_sample=False)


@CALLS
def test_do_sample_false_has_the_last_word(tiny_llama, tiny_tokenizer, call):
    expected = of_transformers(tiny_llama, tiny_tokenizer, do_sample=False)
    assert call(tiny_llama, tiny_tokenizer, temperature=0.7, do_sample=False) == expected
    config = GenerationConfig(do_sample=False)
    assert call(tiny_llama, tiny_tokenizer, temperature=0.7, generation_config=config) == expected


@CALLS
def test_temperature_zero_takes_the_likeliest_tokens_without_a_warning(
    tiny_llama, tiny_tokenizer, call, caplog, monkeypatch
):
    expected = of_transformers(tiny_llama, tiny_tokenizer, do_sample=False)
    sampling = copy.copy(tiny_llama.generation_config)
    sampling.do_sample = True
    monkeypatch.setattr(tiny_llama, "generation_config", sampling)
    assert call(tiny_llama, tiny_tokenizer) == of_transformers(tiny_llama, tiny_tokenizer, do_sample=True) != expected
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        for options in ({"temperature": 0}, {"temperature": 0.0, "top_p": 0.5, "top_k": 3}):
            assert call(tiny_llama, tiny_tokenizer, **options) == expected
    assert not caplog.messages


def test_a_conversation_with_a_temperature_samples(tiny_llama, chat_tokenizer):
    text = chat_tokenizer.apply_chat_template(
        [{"role": "user", "content": "abab"}], add_generation_prompt=True, tokenize=False
    )
    conversation = lookahead.Conversation(tiny_llama, chat_tokenizer, temperature=0.7, **NEW)
    torch.manual_seed(7)
    "".join(conversation.ask("abab"))
    ids = chat_tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    torch.manual_seed(7)
    expected = tiny_llama.generate(ids, do_sample=True, temperature=0.7, **NEW)[0, ids.shape[1] :].tolist()
    assert conversation.stream.token_ids == expected


def test_the_command_line_has_the_same_rule(cli_folder, model_folder, tiny_llama, tiny_tokenizer):
    for given, options in ((("--temperature", "0.7"), {"temperature": 0.7}), (("--top-p", "0.6"), {"top_p": 0.6})):
        words = ["generate", TEXT, "-m", str(model_folder), "-n", "24", "--seed", "7", *given]
        expected = lookahead.generate(tiny_llama, tiny_tokenizer, TEXT, seed=7, **NEW, **options).texts[0]
        assert CliRunner().invoke(app, words).stdout == expected + "\n"


def test_model_generate_under_enable_keeps_the_rule_of_transformers(tiny_llama, tiny_tokenizer):
    expected = of_transformers(tiny_llama, tiny_tokenizer, temperature=0.7)
    assert expected == of_transformers(tiny_llama, tiny_tokenizer, do_sample=False)
    with lookahead.enable(tiny_llama):
        assert of_transformers(tiny_llama, tiny_tokenizer, temperature=0.7) == expected


def test_a_temperature_of_zero_is_refused_for_sampling_and_hides_no_mistake(tiny_llama, tiny_tokenizer):
    with pytest.raises(lookahead.ConfigError, match="temperature must be more than 0 to sample, got 0"):
        by_generate(tiny_llama, tiny_tokenizer, temperature=0, do_sample=True)
    with pytest.raises(lookahead.ConfigError, match="top_p must be a number from 0 to 1, got 5"):
        by_generate(tiny_llama, tiny_tokenizer, temperature=0, top_p=5)
