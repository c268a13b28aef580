"""What a model reads beside tokens is served or left to transformers by name, and no encoder reads it twice."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    StaticCache,
)

import lookahead
from lookahead import PromptError, UnsupportedModelError
from lookahead.model.facts import CACHE
from tests.support.adversarial_proposers import drafting_by, perfect, random_trees
from tests.support.token_prompts import DRAFTING, IDS, RAGGED
from tests.support.vision_models import gemma3, llava

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4)
    return GPT2LMHeadModel(config)


def bert() -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    return BertLMHeadModel(BertConfig(vocab_size=101, is_decoder=True, initializer_range=0.4, **sizes))


def bart() -> PreTrainedModel:
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
    ends = {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    return BartForConditionalGeneration(
        BartConfig(vocab_size=101, init_std=0.4, forced_eos_token_id=None, **layers, **sizes, **ends)
    )


def built(make: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = make().float().eval()
    if make is not bart:
        model.generation_config.eos_token_id = None
    return model


TOLD = re.compile("transformers alone|decoded plainly")


@contextmanager
def heard() -> Iterator[list[str]]:
    """What our package warns of in the block."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if TOLD.search(str(each.message))]


@pytest.mark.parametrize("kind", [0, 1], ids=["zeros", "ones"])
@pytest.mark.parametrize("make", [gpt2, bert, gemma3])
def test_token_types_are_heeded_and_zeros_that_mean_nothing_are_drafted_beside(
    accepted: list[int], make: Any, kind: int
) -> None:
    model, types = built(make), torch.full_like(IDS, kind)
    if make is gemma3 and kind:
        types[0, 6:] = 0  # an image in the beginning
    options = {"input_ids": IDS, "token_type_ids": types, **GREEDY}
    expected = model.generate(**options)
    with lookahead.enable(model, DRAFTING), heard() as said:
        assert torch.equal(model.generate(**options), expected)
    is_served = make is gemma3 or (make is bert and kind == 0)  # of an image they are read with the prompt alone
    assert len(accepted) == is_served
    assert len(said) == (not is_served)
    assert is_served or "'token_type_ids'" in said[0]
    if make is gpt2:
        assert not torch.equal(expected, model.generate(IDS, **GREEDY)), "the types do nothing here"


def test_a_users_hook_is_run_to_try_token_types_only_by_calls_that_trust_it(accepted: list[int]) -> None:
    model, seen = built(bert), list[int]()
    options = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS), **GREEDY}
    model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(1))
    expected, passes = model.generate(**options), len(seen)
    with lookahead.enable(model, replace(DRAFTING, trust_user_code=True)), heard() as said:
        assert torch.equal(model.generate(**options), expected)
        assert (len(accepted), said) == (1, []), "the first call that trusts it drafts"
    model.config.note = "another stamp, of which nothing is known"
    seen.clear()
    with lookahead.enable(model, DRAFTING), heard() as said:
        assert torch.equal(model.generate(**options), expected)
    assert (len(seen), len(accepted), len(said)) == (passes, 1, 1)


def test_types_that_a_model_does_not_take_are_refused_by_transformers_itself(looping_llama: PreTrainedModel) -> None:
    options = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS), **GREEDY}
    for extra in ({}, {"custom_generate": lookahead.decode}):
        with pytest.raises(ValueError, match="token_type_ids"):
            looping_llama.generate(**options, **extra)


@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("make", [llava, gemma3])
def test_a_model_that_could_see_is_drafted_for_where_there_is_nothing_to_see(
    accepted: list[int], make: Any, inputs: dict[str, Any]
) -> None:
    model = built(make)
    expected = model.generate(**inputs, **GREEDY)
    got = model.generate(**inputs, **GREEDY, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(got, expected)
    assert len(accepted) == 1


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (bart, {"num_beams": 2, "output_attentions": True, "return_dict_in_generate": True}),
        (bart, {"output_hidden_states": True, "return_dict_in_generate": True}),
        (bart, {"prompt_lookup_num_tokens": 3}),
        (bart, {"cache_implementation": "static", "return_dict_in_generate": True}),
    ],
    ids=lambda each: next(reversed(each)) if isinstance(each, dict) else each.__name__,
)
def test_what_is_left_to_transformers_is_read_by_the_encoder_once(make: Any, options: dict[str, Any]) -> None:
    model = built(make)
    encoder, reads = model.get_encoder(), []
    encoder.register_forward_hook(lambda *_: reads.append(1))
    options = {**GREEDY, "input_ids": IDS, **options}
    expected = model.generate(**copy.copy(options))
    reads.clear()
    with lookahead.enable(model), heard() as said:
        got = model.generate(**options)
    assert type(got) is type(expected)
    assert torch.equal(getattr(got, "sequences", got), getattr(expected, "sequences", expected))
    assert len(reads) == len(said) == 1
    if "cache_implementation" in options:
        assert int(got[CACHE].get_seq_length()) == int(expected[CACHE].get_seq_length()) > 0


@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, RAGGED], ids=["one", "ragged"])
def test_a_static_cache_that_is_asked_for_comes_back_filled(
    looping_llama: PreTrainedModel, accepted: list[int], inputs: dict[str, Any]
) -> None:
    options = {**inputs, **GREEDY, "cache_implementation": "static", "return_dict_in_generate": True}
    expected = looping_llama.generate(**options)
    theirs = [(layer.keys.clone(), layer.values.clone()) for layer in expected[CACHE].layers]
    got = looping_llama.generate(**options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(accepted) == 1
    assert isinstance(got[CACHE], StaticCache)
    assert int(got[CACHE].get_seq_length()) == got.sequences.shape[1] - 1
    real = slice(5, None)  # behind the padding
    for ours, (keys, values) in zip(got[CACHE].layers, theirs, strict=True):
        torch.testing.assert_close(ours.keys[:, :, real], keys[:, :, real], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values[:, :, real], values[:, :, real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16], ids=str)
def test_a_mask_of_any_type_is_served(looping_llama: PreTrainedModel, tiny_tokenizer: Any, dtype: torch.dtype) -> None:
    inputs = {**RAGGED, "attention_mask": RAGGED["attention_mask"].to(dtype)}
    expected = looping_llama.generate(**inputs, **GREEDY)
    out = looping_llama.generate(**inputs, **GREEDY, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(out, expected)
    result = lookahead.generate(looping_llama, tiny_tokenizer, inputs, **GREEDY)
    assert result.token_ids == expected[:, IDS.shape[1] :].tolist()


def test_a_row_without_tokens_is_left_to_transformers(looping_llama: PreTrainedModel) -> None:
    options = {**RAGGED, "attention_mask": torch.tensor([[0] * 12, [1] * 12]), **GREEDY, "pad_token_id": None}
    expected = looping_llama.generate(**options)
    with lookahead.enable(looping_llama), pytest.warns(UserWarning, match="prompt 0 is all zeros"):
        assert torch.equal(looping_llama.generate(**options), expected)
    with pytest.raises(UnsupportedModelError, match="prompt 0 is all zeros"):
        looping_llama.generate(**options, custom_generate=lookahead.decode)


@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 12), (3, 2, 12)], ids=str)
def test_the_usual_positions_are_served_in_any_shape(
    looping_llama: PreTrainedModel, accepted: list[int], shape: tuple[int, ...]
) -> None:
    ids, expected = IDS.repeat(2, 1), looping_llama.generate(IDS.repeat(2, 1), **GREEDY)
    options = {**GREEDY, "custom_generate": lookahead.decode, "position_ids": torch.arange(12).expand(shape)}
    assert torch.equal(looping_llama.generate(ids, **options), expected)
    assert len(accepted) == 1


@pytest.mark.parametrize("shape", [(1, 12), (2, 12)], ids=str)
def test_positions_of_a_users_own_are_gone_on_from_as_by_generate(
    looping_llama: PreTrainedModel, accepted: list[int], shape: tuple[int, ...]
) -> None:
    ids, options = IDS.repeat(2, 1), {**GREEDY, "position_ids": 2 * torch.arange(12).expand(shape)}
    expected = looping_llama.generate(ids, **options)
    got = looping_llama.generate(ids, **options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(got, expected)
    assert len(accepted) == 1
    assert not torch.equal(expected, looping_llama.generate(ids, **GREEDY)), "the positions do nothing here"


@pytest.mark.parametrize("kind", ["dynamic rotary embeddings", "a table"])
def test_positions_near_a_limit_are_left_to_transformers_though_the_text_is_short(
    kind: str, looping_llama: PreTrainedModel
) -> None:
    first = 48
    if kind == "a table":
        model = built(gpt2)
    else:
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        config = copy.deepcopy(looping_llama.config)
        config.rope_parameters, config.max_position_embeddings = rope, 64
        model = built(lambda: type(looping_llama)(config))
    options = {**GREEDY, "position_ids": first + torch.arange(12)[None], "max_new_tokens": 20}
    if kind == "a table":  # transformers ends before the last position
        end = int(model.generate(IDS, **{**options, "max_new_tokens": 3})[0, -1])
        options["eos_token_id"] = end
    expected = model.generate(IDS, **options)
    for offer in (perfect(expected.tolist()), random_trees(101)):
        with drafting_by(offer), pytest.warns(UserWarning, match=r"beyond (its )?64.*decoded plainly"):
            assert torch.equal(model.generate(IDS, **options, custom_generate=lookahead.decode), expected)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_positions_that_come_with_tokens_are_those_of_the_output(
    padding: str, looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    mask = RAGGED["attention_mask"]
    given = {**RAGGED, "position_ids": (2 * (mask.cumsum(-1) - 1)).clamp(0)}
    if padding == "right":
        kept = [(mask.shape[1] - int(row.sum())) for row in mask]
        given = {
            name: torch.stack([each.roll(-n) for each, n in zip(given[name], kept, strict=True)]) for name in given
        }
    options: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    left = {**RAGGED, "position_ids": (2 * (mask.cumsum(-1) - 1)).clamp(0)}
    expected = looping_llama.generate(**left, **options)[:, mask.shape[1] :]
    got = lookahead.generate(looping_llama, tiny_tokenizer, given, config=DRAFTING, **options)
    assert got.token_ids == expected.tolist()
    assert got.token_ids != lookahead.generate(looping_llama, tiny_tokenizer, RAGGED, **options).token_ids


def test_the_usual_positions_of_a_tokenizer_leave_a_prompt_a_text(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    with pytest.raises(PromptError, match="position_ids must have the shape of input_ids"):
        lookahead.generate(looping_llama, tiny_tokenizer, {"input_ids": IDS, "position_ids": torch.zeros(3, 1, 12)})
    given = {"input_ids": IDS, "position_ids": torch.arange(12)[None]}
    options: Any = {"max_new_tokens": 4, "do_sample": False, "truncate": "left"}  # refused behind anything else
    got = lookahead.generate(looping_llama, tiny_tokenizer, given, **options)
    assert got.token_ids == lookahead.generate(looping_llama, tiny_tokenizer, IDS, **options).token_ids
