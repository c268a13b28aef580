"""Mistakes that callers of the Python API make: each is served, or told of with what was meant."""

from __future__ import annotations

import copy
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig
from typer.testing import CliRunner

import lookahead
from lookahead import LookaheadConfig
from lookahead.cli.app import app
from lookahead.config import REMOVED
from lookahead.errors import ConfigError, LookaheadError, PromptError, UnsupportedModelError

GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
CALLS = [lookahead.generate, lookahead.stream, lookahead.stream_many]


@pytest.fixture(params=CALLS, ids=lambda call: call.__name__)
def call(request):
    """A function of the API that is run to its end."""

    def run(model, tokenizer, prompt="abc", **options):
        result = request.param(model, tokenizer, prompt, **{**GREEDY, **options})
        if request.param is lookahead.stream:
            return "".join(result)  # how many tokens a piece has depends on what steps cost
        return result if request.param is lookahead.generate else list(result)

    return run


# The model and the tokenizer


def test_a_model_named_by_its_path_is_refused_with_how_to_load_it(call, tiny_tokenizer):
    for name in ("./model", Path("model")):
        with pytest.raises(ConfigError, match=r"model must be a PreTrainedModel, got .*; load it: model, tokenizer = "):
            call(name, tiny_tokenizer)


def test_a_tokenizer_named_by_its_path_is_refused_with_how_to_load_it(call, tiny_llama):
    with pytest.raises(ConfigError, match=r"tokenizer must be a tokenizer of transformers, got str './model'; load it"):
        call(tiny_llama, "./model")


def test_swapped_arguments_are_named(call, tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="model and tokenizer are swapped"):
        call(tiny_tokenizer, tiny_llama)


def test_what_is_neither_model_nor_tokenizer_is_named(call, tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigError, match="got a tuple; pass its two parts"):
        call((tiny_llama, tiny_tokenizer), tiny_tokenizer)
    with pytest.raises(ConfigError, match="model must be a PreTrainedModel, got None"):
        call(None, tiny_tokenizer)
    with pytest.raises(ConfigError, match="tokenizer must be a tokenizer of transformers, got None"):
        call(tiny_llama, None)

    class Processor:
        tokenizer = tiny_tokenizer

    with pytest.raises(ConfigError, match=r"got a Processor; pass its \.tokenizer"):
        call(tiny_llama, Processor())


def test_the_switch_refuses_a_path_as_well():
    with pytest.raises(ConfigError, match=r"got str 'model'; load it"):
        lookahead.enable("model")


def test_the_switch_refuses_a_configuration_of_another_kind(tiny_llama):
    with pytest.raises(ConfigError, match="config must be a LookaheadConfig, got a dict"):
        lookahead.enable(tiny_llama, {"window": 7})
    assert "generate" not in tiny_llama.__dict__


def test_a_mode_that_is_not_served_is_named_by_what_asks_for_it(tiny_llama):
    ids = torch.tensor([[5, 9, 31]])
    with pytest.raises(lookahead.UnsupportedModelError, match=r"assisted generation \(prompt_lookup_num_tokens=3\)"):
        tiny_llama.generate(ids, num_beams=1, prompt_lookup_num_tokens=3, custom_generate=lookahead.decode)


def warned(call, model, tokenizer):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(model, tokenizer)
    return [str(warning.message) for warning in caught if "tokenizer" in str(warning.message)]


def test_a_tokenizer_of_another_model_is_warned_of_once_with_what_differs(call, tiny_llama, tiny_tokenizer):
    other = copy.deepcopy(tiny_tokenizer)
    other.bos_token, other.name_or_path = "<a>", "some/other"
    message = "the tokenizer 'some/other' may belong to another model than 'LlamaForCausalLM': bos_token_id 4 against 1"
    assert warned(call, tiny_llama, other) == [message]
    assert warned(call, tiny_llama, other) == []
    assert warned(call, tiny_llama, tiny_tokenizer) == []


def test_a_tokenizer_of_another_size_or_end_token_is_warned_of(call, tiny_llama, tiny_tokenizer):
    larger = copy.deepcopy(tiny_tokenizer)
    larger.add_tokens(["<c>", "<d>"])
    assert "103 tokens against embeddings for 101" in warned(call, tiny_llama, larger)[0]
    model = copy.deepcopy(tiny_llama)
    model.generation_config.eos_token_id = [50, 60]
    assert warned(call, model, copy.deepcopy(tiny_tokenizer))[0].endswith(": eos_token_id 2 against 50, 60")
    model.generation_config.eos_token_id = [2, 60]
    assert warned(call, model, copy.deepcopy(tiny_tokenizer)) == []


# Prompts


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts must be a string, chat messages or token ids, or several of them, got None"),
        (7, "got int"),
        (b"abc", "got bytes; decode it first"),
        (Path("a.txt"), "got PosixPath; read the file"),
        ({"role": "user", "content": "abc"}, "got a dict of role, content; a chat is a list of messages"),
        ({"text": "abc"}, "got a dict of text"),
        (torch.ones(3), r"token ids must be whole numbers \[tokens\] or \[batch, tokens\], got float32 3"),
        (torch.ones(1, 2, 3, dtype=torch.long), "got int64 1x2x3"),
        (torch.ones(3, dtype=torch.bool), "token ids must be whole numbers .*, got bool 3"),
        ({"input_ids": [1.5, 2]}, "token ids must be whole numbers, got 1.5"),
        ({"input_ids": None}, "token ids must be whole numbers, got None"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask must have the shape of input_ids"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_by_what_it_is(call, tiny_llama, tiny_tokenizer, prompts, message):
    with pytest.raises(PromptError, match=message):
        call(tiny_llama, tiny_tokenizer, prompts)


def test_ids_without_a_token_are_no_prompt_for_the_drop_in_either(tiny_llama):
    nothing = torch.zeros(1, 0, dtype=torch.long)
    for mask in ({}, {"attention_mask": nothing}):
        with pytest.raises(PromptError, match="prompt 0 has no tokens"):
            tiny_llama.generate(nothing, **mask, max_new_tokens=4, custom_generate=lookahead.decode)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, 3, dtype=torch.long), "no prompt"),
        (torch.ones(1, 3) * 7.5, "whole numbers, got .* torch.float32"),
    ],
    ids=["no rows", "fractions"],
)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_ids_that_are_no_prompts_are_refused_by_the_drop_in(tiny_llama, ids, message, num_beams):
    with pytest.raises(PromptError, match=message):
        tiny_llama.generate(ids, max_new_tokens=4, num_beams=num_beams, custom_generate=lookahead.decode)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 0 has no tokens: ''"),
        ([], "prompt 0 has no tokens"),
        ("sea \ud83d", r"prompt 0 must be text, got '\\ud83d', half of a surrogate pair, as character 4"),
        (None, "prompt 0 must be a string, chat messages or token ids, got None"),
        ([None], "prompt 0 must be .*, got list"),
        ([["abc"]], "prompt 0 must be .*, got list"),
        ([1, 2.5], "prompt 0 must be .*, got list"),
        ([3, 101], "prompt 0 holds token 101, and the model's vocabulary ends at 100"),
        (torch.ones(2, 3, dtype=torch.long), "prompt 0 must be one prompt, got 2"),
        ([{"role": "user", "content": "abc"}], "the tokenizer has no chat template; pass a string, or set"),
    ],
    ids=str,
)
def test_what_is_no_prompt_among_others_is_named_by_its_number(tiny_llama, tiny_tokenizer, prompt, message):
    for call in (lookahead.generate, lookahead.stream):
        with pytest.raises(PromptError, match=message):
            call(tiny_llama, tiny_tokenizer, [prompt], **GREEDY)
    prompts = [prompt, "abc"]
    done = {each.index: each for each in lookahead.stream_many(tiny_llama, tiny_tokenizer, prompts, **GREEDY)}
    with pytest.raises(PromptError, match=message):
        raise done[0].error
    assert len(done[1].token_ids) == 5


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "message 1 of prompt 0, role 'user', has no 'content'"),
        ({"content": "abc"}, "message 1 of prompt 0 must be a dict with 'role' and 'content', got content"),
        ("abc", "message 1 of prompt 0 must be a dict with 'role' and 'content', got str"),
        ({"role": "tool", "content": "abc"}, "the chat template does not take prompt 0: no tools here"),
        (
            {"role": "user", "content": "a\ud83d"},
            "message 1 of prompt 0 must be text, .*surrogate pair, as character 1",
        ),
    ],
    ids=str,
)
def test_what_is_no_message_of_a_chat_is_named(tiny_llama, chat_tokenizer, message, words):
    with pytest.raises(PromptError, match=words):
        lookahead.generate(tiny_llama, chat_tokenizer, [{"role": "user", "content": "a"}, message], **GREEDY)


def test_a_stream_is_of_one_prompt(tiny_llama, tiny_tokenizer):
    with pytest.raises(PromptError, match=r"stream takes one prompt, got 2; lookahead\.stream_many takes several"):
        lookahead.stream(tiny_llama, tiny_tokenizer, ["abc", "de"], **GREEDY)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": "64"}, "max_new_tokens must be a whole number of at least 1, got '64'"),
        ({"max_new_tokens": 6.0}, "max_new_tokens must be a whole number of at least 1, got 6.0"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number of at least 1, got True"),
        ({"top_k": 1.5}, "top_k must be a whole number of at least 0, got 1.5"),
        ({"top_k": -1}, "top_k must be a whole number of at least 0, got -1"),
        ({"temperature": "warm"}, "temperature must be a number of at least 0, got 'warm'"),
        ({"temperature": -1}, "temperature must be a number of at least 0, got -1"),
        ({"temperature": 0, "do_sample": True}, "temperature must be more than 0 to sample, got 0; do_sample=False"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, got nan"),
        ({"top_p": 95}, "top_p must be a number from 0 to 1, got 95"),
        ({"do_sample": "yes"}, "do_sample must be True or False, got 'yes'"),
        ({"max_tokens": 5}, "'max_tokens' is not an option of generate; did you mean 'max_new_tokens'?"),
        ({"max_new_tokenz": 5}, "did you mean 'max_new_tokens'?"),
        ({"input_ids": torch.ones(1, 2)}, "input_ids is not taken here: pass the prompt as the third argument"),
        ({"attention_mask": None}, "attention_mask is not taken here"),
        ({"custom_generate": "somewhere"}, "custom_generate is not taken here"),
        ({"token_healing": True}, "token_healing is not taken here; use model.generate"),
        ({"config": {"window": 7}}, "config must be a LookaheadConfig, got a dict"),
        ({"config": GenerationConfig()}, "config must be a LookaheadConfig, got a GenerationConfig"),
        (
            {"generation_config": LookaheadConfig()},
            "generation_config must be a GenerationConfig, got a LookaheadConfig",
        ),
        ({"generation_config": {"top_k": 5}}, "got a dict; pass its entries as keyword arguments"),
    ],
    ids=str,
)
def test_an_option_of_the_wrong_type_or_name_is_refused_with_what_is_meant(
    call, tiny_llama, tiny_tokenizer, options, message
):
    with pytest.raises(ConfigError) as error:
        call(tiny_llama, tiny_tokenizer, **options)
    assert message in str(error.value)


DOORS = {
    "LookaheadConfig": LookaheadConfig,
    "replace": partial(replace, LookaheadConfig()),
    "save_costs": lookahead.save_costs,
    **{call.__name__: call for call in CALLS},
}


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("door", [*DOORS, "command", "command with a value", "job file"])
def test_a_removed_option_is_refused_by_name_and_with_why_it_went(tiny_llama, tiny_tokenizer, tmp_path, door, name):
    given, job = {"save_costs": [tiny_llama]}, tmp_path / "job.toml"
    given.update({call.__name__: [tiny_llama, tiny_tokenizer, "abc"] for call in CALLS})
    refused = f"{name} was removed: {REMOVED[name]}; leave it out"
    if door in DOORS:
        for value in (True, False):
            with pytest.raises(ConfigError, match=f"^{re.escape(refused)}$"):
                DOORS[door](*given.get(door, ()), **{name: value})
        return
    job.write_text(f"{name} = false")
    flag = f"--{name.replace('_', '-')}"
    commands = {
        "command": [["generate", "abc", flag], ["summarize", flag, "a.txt"]],
        "command with a value": [["generate", "abc", f"{flag}=yes"]],
        "job file": [["summarize", "-t", str(job), "a.txt"]],
    }
    for command in commands[door]:
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, result.stdout) == (2, "")
        assert " ".join(result.stderr.split()).endswith(refused) and result.stderr.startswith("error: ")


def test_text_that_looks_like_a_removed_option_is_a_prompt_behind_two_dashes():
    result = CliRunner().invoke(app, ["generate", "--model", "no-such/model", "--", *(f"--{each}" for each in REMOVED)])
    assert "was removed" not in result.stderr


@pytest.mark.parametrize("seed", ["x", 0.5, 1 << 64, -(1 << 63) - 1])
def test_a_seed_is_a_whole_number_that_torch_takes(tiny_llama, tiny_tokenizer, seed):
    with pytest.raises(ConfigError, match=r"seed must be a whole number from -2\^63 to 2\^64 - 1, got "):
        lookahead.generate(tiny_llama, tiny_tokenizer, "abc", seed=seed, **GREEDY)
    lookahead.generate(tiny_llama, tiny_tokenizer, "abc", seed=(1 << 64) - 1, **GREEDY)


def test_the_drop_in_refuses_a_configuration_of_another_kind(tiny_llama, tiny_tokenizer):
    ids = tiny_tokenizer("abc", return_tensors="pt")["input_ids"]
    options = {**GREEDY, "custom_generate": lookahead.decode}
    with pytest.raises(ConfigError, match="lookahead_config must be a LookaheadConfig, got a dict"):
        tiny_llama.generate(ids, **options, lookahead_config={"window": 7})


def test_temperature_zero_without_sampling_is_greedy(call, tiny_llama, tiny_tokenizer):
    expected = call(tiny_llama, tiny_tokenizer)
    got = call(tiny_llama, tiny_tokenizer, temperature=0.0)
    texts = [getattr(result, "texts", result) for result in (expected, got)]
    texts = [[getattr(each, "text", each) for each in result] for result in texts]
    assert texts[0] == texts[1]


def test_every_error_is_one_of_ours_and_a_value_error():
    for error in (ConfigError, PromptError, UnsupportedModelError):
        assert issubclass(error, LookaheadError)
        assert issubclass(error, ValueError)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("windw", "did you mean 'window'"),
        ("max_node", "did you mean 'max_nodes'"),
        ("xyzzy", "it must be of proposers,"),
    ],
)
def test_an_option_that_there_is_not_is_told_with_the_nearest_one(option, hint):
    for make in (LookaheadConfig, partial(replace, LookaheadConfig())):
        with pytest.raises(ConfigError, match=f"LookaheadConfig has no option '{option}'; {hint}"):
            make(**{option: 4})
