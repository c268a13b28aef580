"""Encoder-decoder models: one tiny random model of every family, and its tokens are those of `model.generate`."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    DynamicCache,
    EncoderDecoderCache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.support import support_of
from lookahead.drafting.sizes import MAX_NODES_LIMIT
from lookahead.errors import UnsupportedModelError
from lookahead.model.facts import CACHE, empty_cache
from tests.support.adversarial_proposers import (
    Offer,
    always_wrong,
    among_decoys,
    drafting_by,
    nothing,
    perfect,
    random_trees,
)
from tests.support.families import ENCODER_DECODERS, build, cases
from tests.support.pass_recorder import counted_passes

PLAIN = [family for family in ENCODER_DECODERS.values() if family.decoded == "plain"]
DRAFTED = [family for family in ENCODER_DECODERS.values() if family not in PLAIN]
READ = [5, 9, 31, 77, 5, 9, 31, 8, 60, 5, 9, 31, 44, 12, 7]
ONE = {"input_ids": torch.tensor([READ])}
PADDED = {"input_ids": torch.tensor([READ + [0] * 5]), "attention_mask": torch.tensor([[1] * 15 + [0] * 5])}
PADDED_BEFORE = {"input_ids": torch.tensor([[0] * 3 + READ]), "attention_mask": torch.tensor([[0] * 3 + [1] * 15])}
BATCH = {
    "input_ids": torch.tensor([READ, [44, 17, 44, 17, 44] + [0] * 10]),
    "attention_mask": torch.tensor([[1] * 15, [1] * 5 + [0] * 10]),
}
NEW_TOKENS = 13
WANDERING = {"do_sample": False, "no_repeat_ngram_size": 2, "suppress_tokens": [0]}
FIXED = LookaheadConfig(draft="fixed", min_probability=0.0, trust_user_code=True)
BRANCH = replace(FIXED, proposers=("prompt", "recycled", "jacobi"), window=(3, 4, 3))
# What the generation configurations of published summarizers ask for, and more that needs the text so far.
OPTIONS: dict[str, dict[str, Any]] = {
    "as BART-CNN asks": {"min_length": 12, "no_repeat_ngram_size": 3, "forced_bos_token_id": 4, "eos_token_id": 31},
    "a forced last token": {"forced_eos_token_id": 77, "no_repeat_ngram_size": 2},
    "a language code first": {"forced_bos_token_id": 60, "max_length": 11},
    "nothing from the input": {"encoder_no_repeat_ngram_size": 1},
    "more from the input": {"encoder_repetition_penalty": 3.0},
    "a penalty": {"repetition_penalty": 1.4},
    "words left out": {"bad_words_ids": [[5], [9, 31]], "suppress_tokens": [8], "begin_suppress_tokens": [44]},
    "a minimum of new tokens": {"min_new_tokens": 9, "eos_token_id": [2, 31, 44, 90]},
    "sampled, truncated": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9},
}


@cache
def model_of(name: str) -> PreTrainedModel:
    """One model for all tests that leave it as it is, probed, so that its passes can be counted."""
    model = build(ENCODER_DECODERS[name])
    support_of(model, shortest=1, max_length=NEW_TOKENS)
    return model


def generate(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    limit = {} if "max_length" in options else {"max_new_tokens": NEW_TOKENS}
    tokens: torch.Tensor = model.generate(**inputs, **limit, **options)
    return tokens


def texts_of(outputs: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """What a proposer sees of a row in the end: the input without its padding, and all the decoder wrote."""
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    return [ids[row][mask[row]].tolist() + outputs[row].tolist() for row in range(len(ids))]


def never_right(answers: list[list[int]]) -> Offer:
    """Draft what a row will not say, and no padding either."""
    return always_wrong([[token % 100 for token in answer] for answer in answers], 101)


def compare(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    *offers: str | Offer,
    config: LookaheadConfig | None = FIXED,
    **options: Any,
) -> list[int]:
    """Compare with `model.generate`, whatever drafts; returns the passes of the decoder for each of them."""
    expected = generate(model, inputs, **options)
    answers = texts_of(expected, inputs)
    named = {"empty": nothing, "perfect": perfect(answers), "always wrong": never_right(answers), "real": None}
    named["among decoys"] = among_decoys(answers, 101)
    passes = []
    for offer in offers:
        drafts = named[offer] if isinstance(offer, str) else offer
        with drafting_by(drafts) if drafts else nullcontext(), counted_passes(model) as counted:
            got = generate(model, inputs, **options, custom_generate=lookahead.decode, lookahead_config=config)
        assert torch.equal(got, expected), offer
        passes.append(len(counted))
    return passes


@pytest.mark.parametrize("family", cases(DRAFTED, by_feature=True))
def test_a_decoder_that_verifies_drafts_gives_the_tokens_of_generate(family: Any) -> None:
    model = model_of(family.name)
    assert support_of(model, shortest=1, max_length=NEW_TOKENS).shape == family.decoded
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*decoded plainly")
        passes = compare(model, ONE, "perfect", "empty", "among decoys", **WANDERING)
        assert passes[:2] == [2, NEW_TOKENS]
        assert compare(model, PADDED, "always wrong", **WANDERING) == [NEW_TOKENS]
        compare(model, PADDED_BEFORE, "perfect", do_sample=True)
        compare(model, PADDED, "real", "among decoys", random_trees(101), do_sample=True)
        if family.decoded == "trees":
            assert passes[2] == 1 + (NEW_TOKENS - 1) // 6  # after the prompt every pass accepts five of its nodes


@pytest.mark.parametrize("family", cases(PLAIN))
def test_a_decoder_that_cannot_verify_drafts_is_decoded_plainly_and_says_so(family: Any) -> None:
    model = model_of(family.name)
    with pytest.warns(UserWarning, match="cannot be decoded speculatively.*decoded plainly"):
        compare(model, ONE, "real", config=LookaheadConfig(trust_user_code=True), do_sample=True)
    with pytest.raises(UnsupportedModelError, match=r"cannot be decoded speculatively.*leave out window=\(3, 4, 3\)"):
        generate(model, ONE, custom_generate=lookahead.decode, lookahead_config=BRANCH)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["Bart", "Pegasus", "T5"])
def test_processors_see_the_text_that_generate_would_show_them(name: str, options: dict[str, Any]) -> None:
    compare(model_of(name), PADDED, "perfect", "among decoys", "always wrong", "real", **options)


@pytest.mark.parametrize("name", ["Bart", "Pegasus", "T5"])
def test_an_end_or_a_limit_inside_a_draft_ends_the_output_there(name: str) -> None:
    model = model_of(name)
    text = generate(model, ONE, **WANDERING)[0].tolist()
    for eos in [token for place, token in enumerate(text) if place > 2 and token not in text[:place]][:3]:
        assert compare(model, ONE, "perfect", **WANDERING, eos_token_id=eos, pad_token_id=0) == [2]
        compare(model, ONE, "among decoys", **WANDERING, eos_token_id=eos, pad_token_id=0)
    right, decoys = perfect([READ + text]), among_decoys([READ + text], 101)
    for limit in (2, 3, 7):
        assert compare(model, ONE, right, decoys, **WANDERING, max_length=limit) == [min(2, limit - 1)] * 2


@pytest.mark.parametrize("name", ["T5", "UMT5", "LongT5"])
def test_biases_of_a_tree_are_those_of_depths_where_attention_follows_them(name: str) -> None:
    model = build(ENCODER_DECODERS[name])
    with torch.no_grad():
        for name, parameter in model.get_decoder().named_parameters():
            if "relative_attention_bias" in name:
                parameter.mul_(30.0)
    for options in (WANDERING, {"do_sample": True}):
        compare(model, PADDED, "among decoys", random_trees(101), **options, max_length=40)


@pytest.mark.parametrize("name", ["Bart", "Pegasus"])
def test_a_tree_has_no_more_nodes_than_the_decoder_has_positions_left(name: str) -> None:
    family = ENCODER_DECODERS[name]
    model = build(replace(family, options={**family.options, "max_position_embeddings": 20}))
    compare(model, ONE, random_trees(101), "among decoys", "perfect", "real", **WANDERING, max_length=20)


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_the_lookahead_branch_is_verified_for_one_input(name: str) -> None:
    for options in (WANDERING, {"do_sample": True}):
        compare(model_of(name), PADDED, "real", config=BRANCH, **options)


def test_a_decoder_that_shows_no_positions_for_nodes_is_decoded_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookahead.plugins.encoder_decoder.decoder_inputs._position_tables", lambda model: [[], []])
    for name in ("Bart", "T5"):
        model = build(ENCODER_DECODERS[name])
        assert support_of(model, shortest=1, max_length=NEW_TOKENS).shape == "none"
        with pytest.warns(UserWarning, match="cannot be decoded speculatively.*decoded plainly"):
            compare(model, ONE, "among decoys", **WANDERING)


@pytest.mark.parametrize("name", ["Bart", "T5", "T5Gemma"])
def test_trees_have_the_bits_of_generate_in_half_precision(name: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = build(ENCODER_DECODERS[name]).to(torch.bfloat16)
    wanted = {"return_dict_in_generate": True, "output_logits": True}
    for inputs, options, drafts in (
        (ONE, WANDERING, lambda answers: among_decoys(answers, 101)),
        (PADDED, {"do_sample": True}, lambda _: random_trees(101)),
        (PADDED_BEFORE, WANDERING, never_right),
    ):
        expected: Any = generate(model, inputs, **options, **wanted)
        with drafting_by(drafts(texts_of(expected.sequences, inputs))):
            got: Any = generate(
                model, inputs, **options, **wanted, custom_generate=lookahead.decode, lookahead_config=FIXED
            )
        assert torch.equal(got.sequences, expected.sequences)
        assert all(map(torch.equal, got.logits, expected.logits))
    assert compare(model, ONE, "among decoys", **WANDERING) == [1 + (NEW_TOKENS - 1) // 6]
    short = {"max_new_tokens": 8, "do_sample": False}
    for options, exactness in (
        (short, "bitwise"),
        ({**short, "cache_implementation": "static"}, "rounding"),  # whose empty slots change the bits of `generate`
    ):
        done = lookahead.generate(model, tiny_tokenizer, "A boy met a dog.", **options)
        assert done.stats.exactness == exactness


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_half_precision_on_a_cpu_is_decoded_plainly_where_bits_would_change(inputs: Any) -> None:
    model = build(ENCODER_DECODERS["Mvp" if inputs is ONE else "Bart"]).to(torch.bfloat16)  # Mvp attends by itself
    branch: dict[str, Any] = {"proposers": ("prompt", "jacobi"), "window": 3}
    with pytest.raises(UnsupportedModelError, match="trees would change its bits in half precision on a CPU"):
        generate(model, inputs, custom_generate=lookahead.decode, lookahead_config=LookaheadConfig(**branch))
    with pytest.warns(UserWarning, match="trees would change its bits.*decoded plainly"):
        compare(model, inputs, "perfect", "real", **WANDERING)
    config, static = LookaheadConfig(**branch), {"cache_implementation": "static"}  # whose bits differ anyway
    got = generate(model, inputs, **static, custom_generate=lookahead.decode, lookahead_config=config)
    assert got.shape == (len(inputs["input_ids"]), NEW_TOKENS + 1)


def test_other_calls_of_the_model_keep_their_positions_while_a_tree_is_scored() -> None:
    model, seen = model_of("Bart"), []
    text = {**ONE, "decoder_input_ids": torch.arange(16)[None] + 2}  # as many tokens as the tree has nodes
    expected = model(**text).logits
    answer, own = texts_of(generate(model, ONE, **WANDERING), ONE), threading.get_ident()

    def call_it_too(_module: Any, _inputs: Any, options: dict[str, Any]) -> None:
        if threading.get_ident() == own and options["input_ids"].shape[1] == 16:  # of that tree
            seen.append(others.submit(lambda: model(**text).logits).result())

    handle = model.get_decoder().register_forward_pre_hook(call_it_too, with_kwargs=True)
    with ThreadPoolExecutor(1) as others, drafting_by(among_decoys(answer, 101)):
        generate(model, ONE, **WANDERING, custom_generate=lookahead.decode, lookahead_config=FIXED)
    handle.remove()
    assert seen and torch.equal(seen[0], expected)
    assert not any(module._forward_hooks for module in model.modules())


class StopsAfter:
    """A user's criterion: stop once the text holds so many different tokens."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([len(set(row.tolist())) >= self.number for row in input_ids])


def test_a_criterion_that_fires_inside_a_draft_ends_the_output_there() -> None:
    compare(model_of("T5"), ONE, "perfect", **WANDERING, stopping_criteria=[StopsAfter(5)])


def test_a_window_that_the_longest_draft_could_outgrow_is_no_window_to_draft_in() -> None:
    model = build(ENCODER_DECODERS["T5Gemma"])
    window = model.config.get_text_config(decoder=True).sliding_window = MAX_NODES_LIMIT + NEW_TOKENS
    for each in model.get_decoder().modules():
        if vars(each).get("sliding_window"):
            each.sliding_window = window
    assert support_of(model, shortest=1, max_length=NEW_TOKENS - 1).shape == "trees"
    assert support_of(model, shortest=1, max_length=NEW_TOKENS).shape == "none"
    with pytest.warns(UserWarning, match=f"the cache of its decoder drops tokens beyond {window}.*decoded plainly"):
        generate(model, ONE, custom_generate=lookahead.decode, do_sample=False)


def test_a_prompt_for_the_decoder_is_gone_on_from() -> None:
    for name in ("Bart", "T5"):
        for prompt in ([[2, 9, 31]], [[50, 4]]):
            compare(model_of(name), ONE, "real", **WANDERING, decoder_input_ids=torch.tensor(prompt))


def test_scores_logits_and_the_cache_are_those_of_generate() -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for name in ("Bart", "T5"):
        model = model_of(name)
        expected: Any = generate(model, ONE, **WANDERING, **wanted)
        with drafting_by(among_decoys(texts_of(expected.sequences, ONE), 101)):
            got: Any = generate(
                model, ONE, **WANDERING, **wanted, custom_generate=lookahead.decode, lookahead_config=FIXED
            )
        assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
        for one, other in zip((*got.scores, *got.logits), (*expected.scores, *expected.logits), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        caches = [output[CACHE].self_attention_cache for output in (got, expected)]
        for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-3, atol=1e-3)
        (mine.values * torch.ones(1, requires_grad=True)).sum().backward()  # not a tensor of inference mode


def test_inputs_that_are_not_served_are_named() -> None:
    model: Any = model_of("Bart")
    embeds = model.get_input_embeddings()(ONE["input_ids"])
    with pytest.warns(UserWarning, match="decoder_attention_mask"):
        prompt = {"decoder_input_ids": torch.tensor([[2, 9]]), "decoder_attention_mask": torch.tensor([[0, 1]])}
        generate(model, ONE, **prompt, custom_generate=lookahead.decode, lookahead_config=FIXED)
    got = model.generate(inputs_embeds=embeds, max_new_tokens=9, custom_generate=lookahead.decode)
    assert torch.equal(got, model.generate(inputs_embeds=embeds, max_new_tokens=9))  # nothing to draft from, yet served


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
def test_outputs_of_the_encoder_may_come_without_its_inputs(inputs: Any, options: dict[str, Any]) -> None:
    model = model_of("T5")
    expected = generate(model, inputs, **options)
    for ours in ({}, {"lookahead_config": FIXED}):
        given = {**inputs, "encoder_outputs": model.get_encoder()(**inputs, return_dict=True)}
        del given["input_ids"]  # transformers expands the outputs in place
        assert torch.equal(generate(model, given, **options, custom_generate=lookahead.decode, **ours), expected)


def test_a_filled_cache_is_refused_and_one_that_is_empty_is_filled() -> None:
    model: Any = model_of("T5")
    for past in (EncoderDecoderCache(DynamicCache(), DynamicCache()), empty_cache(model)):
        generate(model, ONE, **WANDERING, **{CACHE: past}, custom_generate=lookahead.decode, lookahead_config=FIXED)
        assert past.get_seq_length() == NEW_TOKENS
    with pytest.raises(UnsupportedModelError, match=f"must be empty, got {NEW_TOKENS} tokens"):
        generate(model, ONE, **{CACHE: past}, custom_generate=lookahead.decode)


def test_without_a_cache_or_with_one_of_fixed_size_the_tokens_are_the_same() -> None:
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        model, wanted = model_of("T5"), {**WANDERING, **options}  # not counted: a hook is code of a user
        got = generate(model, ONE, **wanted, custom_generate=lookahead.decode, lookahead_config=FIXED)
        assert torch.equal(got, generate(model, ONE, **wanted))


def test_an_encoder_of_another_vocabulary_is_not_drafted_from() -> None:
    side = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    encoder, decoder = BertConfig(vocab_size=101, **side), BertConfig(vocab_size=23, **side)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(3)
    model = EncoderDecoderModel(config).eval()
    model.generation_config.update(decoder_start_token_id=1, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    support_of(model, shortest=1, max_length=NEW_TOKENS)
    compare(model, ONE, "real", do_sample=True)


def test_a_model_in_training_mode_is_decoded_plainly() -> None:
    model = build(ENCODER_DECODERS["T5"]).train()
    with pytest.warns(UserWarning, match="training mode"):
        generate(model, ONE, custom_generate=lookahead.decode)


def test_a_decoder_is_probed_again_where_there_was_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    model = build(ENCODER_DECODERS["T5"])
    with monkeypatch.context() as patch:
        patch.setattr(model.get_encoder(), "forward", fail)
        found = support_of(model, shortest=1, max_length=NEW_TOKENS, trusted=True)
        assert found.reason == "there was too little memory to probe it"
    assert support_of(model, shortest=1, max_length=NEW_TOKENS).shape == "trees"
