"""Modes, caches and inputs other than the usual ones are served exactly, or refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.cache_utils import Cache, DynamicLayer

import lookahead
from lookahead.decoding.plan import plan_request
from lookahead.errors import UnsupportedModelError
from lookahead.model.calls import ResolvedCall
from lookahead.model.facts import CACHE
from tests.support.families import ENCODER_DECODERS, build
from tests.support.token_prompts import DRAFTING, IDS, RAGGED

MODES: dict[str, dict[str, Any]] = {
    "diverse beams": {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained beams": {"num_beams": 2, "force_words_ids": [[7]]},
    "constraints without beams": {"force_words_ids": [[7]]},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "layer contrasts": {"dola_layers": "high"},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "sampled prompt lookup": {"prompt_lookup_num_tokens": 3, "do_sample": True},
    "early exits": {"assistant_early_exit": 1},
    "guidance": {"guidance_scale": 1.5},
    "guidance away from a prompt": {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[7, 8]])},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
}
# Options that older releases have not.
NEEDS_LENGTHS = pytest.mark.skipif(not hasattr(GenerationConfig(), "max_cache_len"), reason="needs transformers 5.13")
if hasattr(GenerationConfig(), "use_mtp"):
    MODES["multi-token prediction"] = {"use_mtp": True}


def outcome(call: Callable[[], Any]) -> Any:
    """The tokens of a call, or the class of its error."""
    torch.manual_seed(3)
    try:
        result = call()
    except Exception as error:
        return type(error)
    return getattr(result, "sequences", result).tolist()


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_a_mode_without_a_speculative_form_is_refused_by_name(
    looping_llama: PreTrainedModel, options: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        looping_llama.generate(IDS, max_new_tokens=8, **options, custom_generate=lookahead.decode)
    assert any(name in str(refusal.value) for name in options)


@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_under_the_switch_such_a_mode_is_left_to_transformers_with_one_warning(
    looping_llama: PreTrainedModel, accepted: list[int], options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": 8, **options}
    expected = outcome(lambda: looping_llama.generate(IDS, **options))
    with lookahead.enable(looping_llama, DRAFTING), pytest.warns(UserWarning, match="transformers alone") as said:
        got = outcome(lambda: looping_llama.generate(IDS, **options))
    assert got == expected
    assert sum("transformers alone" in str(warning.message) for warning in said) == 1
    assert not accepted


def test_a_prompt_that_is_to_be_healed_is_left_to_transformers_with_its_tokenizer(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, accepted: list[int]
) -> None:
    ids = tiny_tokenizer("the cat sat on the mat", return_tensors="pt").input_ids
    options = {"token_healing": True, "tokenizer": tiny_tokenizer, "max_new_tokens": 8, "do_sample": False}
    expected = looping_llama.generate(ids, **options)
    with lookahead.enable(looping_llama, DRAFTING), pytest.warns(UserWarning, match="token_healing"):
        assert torch.equal(looping_llama.generate(ids, **options), expected)


def test_an_assistant_is_left_to_transformers(
    looping_llama: PreTrainedModel, tiny_llama: PreTrainedModel, accepted: list[int]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "assistant_model": tiny_llama}
    expected = outcome(lambda: looping_llama.generate(IDS, **options))
    with lookahead.enable(looping_llama, DRAFTING):
        assert outcome(lambda: looping_llama.generate(IDS, **options)) == expected
    assert not accepted


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_model_with_the_switch_on_may_assist_another(
    looping_llama: PreTrainedModel, tiny_llama: PreTrainedModel, do_sample: bool
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": do_sample, "assistant_model": looping_llama}
    expected = outcome(lambda: tiny_llama.generate(IDS, **options))
    with lookahead.enable(looping_llama, DRAFTING):
        assert outcome(lambda: tiny_llama.generate(IDS, **options)) == expected


@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, RAGGED], ids=["one", "ragged"])
def test_guidance_as_a_processor_of_the_users_guides_ours_alike(
    looping_llama: PreTrainedModel, inputs: dict[str, Any]
) -> None:
    def guided(**options: Any) -> Any:
        processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(6.0, looping_llama)
        return looping_llama.generate(**options, logits_processor=[processor])

    options = {**inputs, "max_new_tokens": 30, "do_sample": False}
    expected = guided(**options)
    with lookahead.enable(looping_llama, DRAFTING), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be left to transformers, with a warning
        assert torch.equal(guided(**options), expected)
    assert not torch.equal(expected, looping_llama.generate(**options)), "the processor does nothing here"


def test_a_configuration_by_position_is_served(looping_llama: PreTrainedModel, accepted: list[int]) -> None:
    config = GenerationConfig(max_new_tokens=20, do_sample=True, temperature=1.5)
    expected = outcome(lambda: looping_llama.generate(IDS, config))
    with lookahead.enable(looping_llama, DRAFTING):
        assert outcome(lambda: looping_llama.generate(IDS, config)) == expected
    assert len(accepted) == 1


@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        pytest.param({"cache_implementation": "static", "max_cache_len": 64}, marks=NEEDS_LENGTHS),
        {"prefill_chunk_size": 4},
        {"logits_to_keep": 1},
        {"disable_compile": True},
    ],
    ids=str,
)
def test_how_transformers_would_have_cached_changes_no_token(
    looping_llama: PreTrainedModel, accepted: list[int], inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    options = {**inputs, **options, "max_new_tokens": 30, "do_sample": False}
    expected = looping_llama.generate(**options)
    got = looping_llama.generate(**options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)
    assert torch.equal(got, expected)
    assert len(accepted) == 1


def test_a_lossy_cache_is_refused_by_name(looping_llama: PreTrainedModel) -> None:
    # A quantized cache changes tokens; its packages need not be installed for it to be refused.
    config = GenerationConfig(cache_implementation="quantized", max_length=20, num_beams=1)
    criteria = StoppingCriteriaList([MaxLengthCriteria(20)])
    with pytest.raises(UnsupportedModelError, match="quantized"):
        plan_request(ResolvedCall(looping_llama, IDS, LogitsProcessorList(), criteria, config, None, {}))


def test_a_cache_of_another_kind_that_was_passed_in_is_filled_by_transformers(looping_llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    expected = looping_llama.generate(IDS, **options)
    for cache in (
        Cache(layer_class_to_replicate=DynamicLayer),  # what it keeps, it may round
        StaticCache(config=looping_llama.config, max_cache_len=64),
    ):
        with pytest.warns(UserWarning, match=f"its cache is a {type(cache).__name__}; it is decoded plainly"):
            got = looping_llama.generate(IDS, **{CACHE: cache}, **options, custom_generate=lookahead.decode)
        assert torch.equal(got, expected) and int(cache.get_seq_length()) == got.shape[1] - 1


def test_a_cache_with_layers_of_different_lengths_fails_as_in_generate(looping_llama: PreTrainedModel) -> None:
    for extra in ({}, {"custom_generate": lookahead.decode}):
        cache = DynamicCache(config=looping_llama.config)
        looping_llama(IDS[:, :9], **{CACHE: cache})
        cache.layers[1].crop(-4)
        with pytest.raises(RuntimeError, match=r"size|expand|shape"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            looping_llama.generate(IDS, **{CACHE: cache}, max_new_tokens=3, do_sample=False, **extra)


def test_an_empty_cache_of_another_kind_is_not_left_empty(looping_llama: PreTrainedModel) -> None:
    def fill(cache: StaticCache) -> torch.Tensor:
        return looping_llama.generate(IDS, **{CACHE: cache}, max_new_tokens=9, do_sample=False)

    theirs, ours = (StaticCache(config=looping_llama.config, max_cache_len=64) for _ in range(2))
    expected = fill(theirs)
    with lookahead.enable(looping_llama, DRAFTING), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(fill(ours), expected)
    assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) > 0


def test_an_empty_cache_that_was_passed_in_is_filled(looping_llama: PreTrainedModel, accepted: list[int]) -> None:
    theirs, ours = DynamicCache(), DynamicCache()
    options: dict[str, Any] = {**RAGGED, "max_new_tokens": 9, "do_sample": False}
    expected = looping_llama.generate(**options, **{CACHE: theirs})
    with lookahead.enable(looping_llama, DRAFTING):
        assert torch.equal(looping_llama.generate(**options, **{CACHE: ours}), expected)
    assert len(accepted) == 1
    assert ours.get_seq_length() == theirs.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("stretch", [1, 2], ids=["the usual ones", "every other one"])
def test_positions_that_were_passed_in_are_heeded(looping_llama: PreTrainedModel, stretch: int) -> None:
    options: dict[str, Any] = {
        "position_ids": stretch * torch.arange(12)[None],
        "max_new_tokens": 20,
        "do_sample": False,
    }
    expected = looping_llama.generate(IDS, **copy.deepcopy(options))
    with lookahead.enable(looping_llama, DRAFTING), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(looping_llama.generate(IDS, **options), expected)


def test_embeddings_as_a_prompt_are_left_to_transformers_with_a_warning(looping_llama: PreTrainedModel) -> None:
    options: dict[str, Any] = {
        "inputs_embeds": looping_llama.get_input_embeddings()(IDS).detach(),
        "max_new_tokens": 9,
        "do_sample": False,
    }
    expected = looping_llama.generate(**options)
    with lookahead.enable(looping_llama, DRAFTING), pytest.warns(UserWarning, match="inputs_embeds"):
        assert torch.equal(looping_llama.generate(**options), expected)


class Unchanged(LogitsProcessor):
    """A user's processor, which may keep a state as far as we know."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return torch.from_numpy(scores.numpy().copy())


@pytest.mark.parametrize("name", ["Llama", "Bart"])
@pytest.mark.parametrize("prompts", [["hello"], ["hello", "a b"]], ids=len)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_new_tokens": 1}, {"num_beams": 2}, {"do_sample": True}, {"logits_processor": [Unchanged()]}],
    ids=lambda options: next(iter(options), "greedy"),
)
def test_no_call_of_the_python_api_records_gradients(
    options: dict[str, Any], prompts: list[str], name: str, looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    model, seen = looping_llama if name == "Llama" else build(ENCODER_DECODERS["Bart"]), set[bool]()
    given = {"max_new_tokens": 4, "do_sample": False, **options}
    handle = cast(Any, model.get_decoder()).register_forward_hook(lambda *_: seen.add(torch.is_grad_enabled()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may be decoded plainly
            lookahead.generate(model, tiny_tokenizer, prompts, **given)
            assert list(lookahead.stream(model, tiny_tokenizer, prompts[0], **given))
            if not {"num_beams", "logits_processor"} & options.keys():
                assert list(lookahead.stream_many(model, tiny_tokenizer, prompts, **given))
    finally:
        handle.remove()
    assert seen == {False}
