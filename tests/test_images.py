"""Prompts with images or sound: the tokens of `model.generate`, drafted, with one pass of the encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchFeature, PreTrainedModel, PreTrainedTokenizerFast, pipeline
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead import LookaheadConfig, PromptError
from lookahead.decoding.prompt_reading import PromptReading, placeholders_of
from lookahead.model.calls import ResolvedCall
from lookahead.model.facts import CACHE, tokens_in
from tests.support.adversarial_proposers import Offer, Scripted, always_wrong, drafting_by, perfect, random_trees
from tests.support.token_prompts import DRAFTING
from tests.support.vision_models import PLACE, SEEING, Seeing, build, cases, prompts

NEW = 20
LENGTH: dict[str, Any] = {"max_new_tokens": NEW}
DRAWN = [False, True]
TRUSTING = replace(DRAFTING, trust_user_code=True)
OURS: dict[str, Any] = {"custom_generate": lookahead.decode, "lookahead_config": TRUSTING}
DECODED = [family for family in SEEING.values() if family.decoded != "plain"]
# What PaliGemma verifies is known behind a prompt of its own reading, and not where a user's hook takes part.
HOOKED = [family for family in DECODED if family.name != "PaliGemma"]


@cache
def built(name: str) -> PreTrainedModel:
    return build(SEEING[name])


@contextmanager
def calls_of(module: torch.nn.Module) -> Iterator[list[None]]:
    """A list that holds an element for every call of a module within the block."""
    calls: list[None] = []
    handle = module.register_forward_hook(lambda *_: calls.append(None))  # code of a user's, which has to be trusted
    try:
        yield calls
    finally:
        handle.remove()


def generated(model: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(**{**LENGTH, "do_sample": False, **options})


def seen_by_drafts(answer: Tensor, inputs: dict[str, Tensor]) -> list[list[int]]:
    """Whole texts as proposers know them: without padding, and without what stands for images in the prompt."""
    width, texts = inputs["input_ids"].shape[1], []
    for ids, mask in zip(answer.tolist(), inputs["attention_mask"].tolist(), strict=True):
        prompt = [token for token, seen in zip(ids[:width], mask, strict=True) if seen and token != PLACE]
        texts.append(prompt + ids[width:])
    return texts


def offer_of(kind: str, answer: Tensor, inputs: dict[str, Tensor]) -> Offer | None:
    texts = seen_by_drafts(answer, inputs)
    return {
        "real": lambda: None,
        "perfect": lambda: perfect(texts),
        "wrong": lambda: always_wrong(texts, 101),
        "random": lambda: random_trees(101),
    }[kind]()


@pytest.mark.covering(1)
@pytest.mark.parametrize("drafts", ["real", "perfect", "wrong", "random"])
@pytest.mark.parametrize("rows", [1, 2], ids=["one", "batch"])
@pytest.mark.parametrize("do_sample", DRAWN, ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", cases(DECODED))
def test_a_prompt_of_more_than_text_gives_the_tokens_of_generate(
    accepted: list[int], family: Seeing, do_sample: bool, rows: int, drafts: str
) -> None:
    model, inputs = built(family.name), prompts(family, rows)
    expected = generated(model, **inputs, do_sample=do_sample)
    offer = offer_of(drafts, expected, inputs)
    with nullcontext() if offer is None else drafting_by(offer):
        assert torch.equal(generated(model, **inputs, do_sample=do_sample, **OURS), expected)
    assert len(accepted) == 1
    assert drafts != "perfect" or accepted[0] >= rows * (NEW - 4)


@pytest.mark.parametrize("family", cases(HOOKED))
def test_an_encoder_runs_once_and_a_pass_gives_several_tokens(family: Seeing) -> None:
    model, inputs = built(family.name), prompts(family)
    expected = generated(model, **inputs)
    with drafting_by(perfect(seen_by_drafts(expected, inputs))), calls_of(model) as passes:
        for begins in (True, False):  # the first call compares passes of ours with the model's own
            passes.clear()
            with calls_of(model.get_submodule(family.encoder)) as reads:
                assert torch.equal(generated(model, **inputs, **OURS), expected)
            assert len(reads) == 1
            assert begins or 1 < len(passes) < NEW / 2


@pytest.mark.parametrize("name", ["Llava", "Qwen2.5VL"])
def test_in_bfloat16_the_logits_behind_an_image_have_the_bits_of_generate(name: str) -> None:
    family = SEEING[name]
    model = build(family).to(torch.bfloat16)
    inputs = {
        key: each.to(torch.bfloat16) if each.is_floating_point() else each for key, each in prompts(family).items()
    }
    shown = {"return_dict_in_generate": True, "output_logits": True}
    expected = generated(model, **inputs, **shown)
    with drafting_by(random_trees(101)):
        got = generated(model, **inputs, **shown, **OURS)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(ours.float(), theirs) for ours, theirs in zip(got.logits, expected.logits, strict=True))


@pytest.mark.parametrize("name", ["Qwen2.5VL", "Gemma3", "Qwen3.5"])
def test_a_cache_that_holds_an_image_is_given_back_and_continued_from(accepted: list[int], name: str) -> None:
    family, turns = SEEING[name], []
    model, inputs = built(name), prompts(family)
    marks = {key: each for key, each in inputs.items() if key == family.types}
    for options in ({}, OURS):
        first = generated(model, **inputs, **options, return_dict_in_generate=True)
        text = torch.cat([first.sequences, torch.tensor([[12, 5, 9]])], -1)
        types = {key: torch.nn.functional.pad(each, (0, text.shape[1] - each.shape[1])) for key, each in marks.items()}
        held = {CACHE: first[CACHE], "attention_mask": torch.ones_like(text)}
        second = generated(model, input_ids=text, **types, **held, **options)
        turns.append((first.sequences, first[CACHE].get_seq_length(), second))
    assert torch.equal(turns[1][0], turns[0][0])
    assert turns[1][1] == turns[0][1]
    assert torch.equal(turns[1][2], turns[0][2])
    assert accepted


def test_a_turn_of_text_goes_on_from_a_cache_with_an_image(accepted: list[int]) -> None:
    model, inputs, turns = built("Qwen2.5VL"), prompts(SEEING["Qwen2.5VL"]), list[Tensor]()
    for options in ({}, OURS):
        first = generated(model, **inputs, **options, return_dict_in_generate=True)
        text = torch.cat([first.sequences, torch.tensor([[12, 5, 9]])], -1)
        held = {CACHE: first[CACHE], "attention_mask": torch.ones_like(text)}
        turns.append(generated(model, input_ids=text, **held, **options))
    assert torch.equal(*turns)
    assert len(accepted) == 2


def test_places_are_not_drafted_from_and_the_text_around_them_is() -> None:
    family, started = SEEING["Llava"], []

    class Listener(Scripted):
        def start(self, row: int, prompt: Any) -> None:
            started.append(prompt.tolist())
            super().start(row, prompt)

    inputs = prompts(family)
    config = LookaheadConfig(draft="fixed", proposers=(lambda call: Listener(lambda *_: None),))
    generated(built("Llava"), **inputs, custom_generate=lookahead.decode, lookahead_config=config)
    assert started == [[token for token in inputs["input_ids"][0].tolist() if token != PLACE]]


def test_a_proposer_of_hidden_states_is_refused_where_a_pass_shows_none() -> None:
    class Reader(Scripted):
        hidden_layers = (-1,)

    config = LookaheadConfig(proposers=(lambda call: Reader(lambda *_: None),))
    with pytest.raises(lookahead.UnsupportedModelError, match="shows no hidden states"):
        generated(built("Llava"), **prompts(SEEING["Llava"]), **{**OURS, "lookahead_config": config})


def test_a_prompt_may_be_nothing_but_an_image(accepted: list[int]) -> None:
    model, inputs = built("Llava"), prompts(SEEING["Llava"])
    inputs |= {"input_ids": torch.full((1, 4), PLACE), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    assert torch.equal(generated(model, **inputs, **OURS), generated(model, **inputs))
    assert len(accepted) == 1


@pytest.mark.parametrize("rows", [1, 2], ids=["one", "batch"])
def test_a_model_whose_prompts_attend_to_all_of_themselves_reads_text_itself(accepted: list[int], rows: int) -> None:
    model, inputs = built("PaliGemma"), prompts(SEEING["PaliGemma"], rows)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    inputs["input_ids"] = inputs["input_ids"].clamp(max=PLACE - 1)
    assert torch.equal(generated(model, **inputs, **OURS), generated(model, **inputs))
    assert len(accepted) == 1


def test_prompts_that_the_model_reads_itself_come_one_by_one_from_a_stream(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    model, texts = built("PaliGemma"), [[5, 9, 31, 5, 9], [41, 42, 41]]
    done = lookahead.stream_many(model, tiny_tokenizer, texts, config=DRAFTING, **LENGTH)
    got = {each.index: each.token_ids for each in done}
    for index, text in enumerate(texts):
        assert got[index] == generated(model, input_ids=torch.tensor([text]))[0, len(text) :].tolist()


def test_a_place_is_what_the_configuration_names_or_the_vocabulary_lacks() -> None:
    model = built("Llava")
    assert set(placeholders_of(model, torch.tensor([[5, 120, PLACE]]))) == {120, PLACE}


def test_a_place_may_stand_outside_of_the_vocabulary(accepted: list[int]) -> None:
    family = SEEING["PaliGemma"]
    model = build(replace(family, options={**family.options, "image_token_index": 101}))
    inputs = prompts(family)
    inputs["input_ids"] = inputs["input_ids"].where(inputs["input_ids"] != PLACE, torch.tensor(101))
    assert torch.equal(generated(model, **inputs, **OURS), generated(model, **inputs))
    assert len(accepted) == 1


def test_a_lack_of_memory_for_the_comparison_is_no_verdict(accepted: list[int]) -> None:
    model, inputs, lacking = build(SEEING["Llava"]), prompts(SEEING["Llava"]), [True]
    expected, width = generated(model, **inputs), inputs["input_ids"].shape[1]

    def lack(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] == 1 and tokens_in(given.get(CACHE)) == width and lacking:
            lacking.clear()
            raise MemoryError

    model.register_forward_pre_hook(lack, with_kwargs=True)
    for reason in ("too little memory", ""):
        with pytest.warns(UserWarning, match=reason) if reason else nullcontext(), lookahead.enable(model, TRUSTING):
            assert torch.equal(generated(model, **inputs), expected)
        assert len(accepted) == (not reason)


def test_several_outputs_of_an_image_are_those_of_generate(accepted: list[int]) -> None:
    model, inputs = built("Qwen2.5VL"), prompts(SEEING["Qwen2.5VL"])
    options = {**inputs, "do_sample": True, "num_return_sequences": 3}
    assert torch.equal(generated(model, **options, **OURS), generated(model, **options))
    assert len(accepted) == 1


def test_rows_that_end_leave_the_others_their_positions(accepted: list[int]) -> None:
    model, inputs = built("Qwen2.5VL"), prompts(SEEING["Qwen2.5VL"], rows=2)
    # The second prompt is text, whose positions are not those of tokens behind an image.
    text = inputs["input_ids"][1].where(inputs["input_ids"][1] != PLACE, torch.tensor(44))
    inputs |= {"input_ids": torch.stack([inputs["input_ids"][0], text]), "pixel_values": inputs["pixel_values"][:16]}
    inputs |= {"image_grid_thw": inputs["image_grid_thw"][:1], "mm_token_type_ids": inputs["mm_token_type_ids"].clone()}
    inputs["mm_token_type_ids"][1] = 0
    answer = generated(model, **inputs)[:, inputs["input_ids"].shape[1] :]
    end = next(token for token in answer[0].tolist() if token not in answer[1].tolist())
    options = {**inputs, "eos_token_id": end, "max_new_tokens": 30}
    assert torch.equal(generated(model, **options, **OURS), generated(model, **options))
    assert len(accepted) == 1


def test_a_video_gives_the_tokens_of_generate(accepted: list[int]) -> None:
    model, inputs = built("Qwen2.5VL"), prompts(SEEING["Qwen2.5VL"])
    inputs["input_ids"] = torch.where(inputs["input_ids"] == PLACE, 98, inputs["input_ids"])
    inputs["mm_token_type_ids"] *= 2
    video = {"pixel_values_videos": inputs.pop("pixel_values"), "video_grid_thw": inputs.pop("image_grid_thw")}
    assert torch.equal(generated(model, **inputs, **video, **OURS), generated(model, **inputs, **video))
    assert len(accepted) == 1


def test_a_switch_and_a_streamer_serve_a_prompt_with_an_image(accepted: list[int]) -> None:
    family = SEEING["Gemma3"]
    model, inputs, shown = built("Gemma3"), prompts(family), list[int]()

    class Shown(BaseStreamer):
        def put(self, value: Tensor) -> None:
            shown.extend(value.flatten().tolist())

        def end(self) -> None:
            shown.append(-1)

    expected = generated(model, **inputs)
    with lookahead.enable(model, TRUSTING):
        assert torch.equal(generated(model, **inputs, streamer=Shown()), expected)
    assert shown == [*expected[0].tolist(), -1]
    assert len(accepted) == 1


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Mllama", {}, "its cache holds more than the text"),
        ("Llava", {"num_beams": 2}, "after images, videos or sound"),
        ("Llava", {"use_cache": False}, "read again"),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each), "greedy"),
)
def test_what_is_not_served_behind_an_image_is_decoded_plainly_and_says_why(
    accepted: list[int], name: str, options: dict[str, Any], why: str
) -> None:
    model, inputs = built(name), prompts(SEEING[name])
    expected = generated(model, **inputs, **options)
    with lookahead.enable(model), pytest.warns(UserWarning, match=why) as said:
        assert torch.equal(generated(model, **inputs, **options), expected)
    assert len(said) == 1
    assert not accepted


@pytest.mark.parametrize("lost", [0, 1])
def test_passes_that_do_not_see_all_that_the_model_sees_are_found_out(lost: int) -> None:
    model = build(SEEING["Llava"])
    inputs = dict(prompts(SEEING["Llava"]))
    call = ResolvedCall.resolve(model, inputs.pop("input_ids"), **inputs, **LENGTH)
    reading = PromptReading(call, np.array([call.input_ids.shape[1] - lost]), keeps_cache=False)
    assert reading.unsupported_reason("trees", (), 8) == ("its passes after them differ from ours" if lost else "")


def test_the_callers_cache_is_filled_once_if_drafts_turn_out_not_to_follow() -> None:
    family = SEEING["Mllama"]
    model, inputs = build(family), prompts(family)
    expected = generated(model, **inputs, return_dict_in_generate=True)
    with lookahead.enable(model), pytest.warns(UserWarning, match="its cache holds more"):
        got = generated(model, **inputs, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected.sequences)
    assert got[CACHE].get_seq_length() == expected[CACHE].get_seq_length()


def test_a_mistake_in_the_inputs_is_told_by_the_model_and_not_remembered(accepted: list[int]) -> None:
    family = SEEING["Llava"]
    model, inputs = build(family), prompts(family)
    wrong = {**inputs, "pixel_values": inputs["pixel_values"].repeat(2, 1, 1, 1)}
    for options in ({}, OURS):
        with pytest.raises(ValueError, match=r"[Ii]mage features and image tokens do not match"):
            generated(model, **wrong, **options)
    assert torch.equal(generated(model, **inputs, **OURS), generated(model, **inputs))
    assert len(accepted) == 1


@pytest.mark.parametrize("rows", [1, 2], ids=["one", "batch"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_a_processor_returns_is_a_prompt(
    accepted: list[int], tiny_tokenizer: PreTrainedTokenizerFast, rows: int, side: str
) -> None:
    family = SEEING["Gemma3"]
    model, inputs = built("Gemma3"), prompts(family, rows)
    expected = generated(model, **inputs)[:, inputs["input_ids"].shape[1] :].tolist()
    given = dict(inputs)
    if side == "right":
        padding = (inputs["attention_mask"] == 0).sum(1).tolist()
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            given[name] = torch.stack([each.roll(-n) for each, n in zip(inputs[name], padding, strict=True)])
    result = lookahead.generate(model, tiny_tokenizer, BatchFeature(given), config=DRAFTING, **LENGTH)
    assert result.token_ids == expected
    assert len(accepted) == 1
    if rows == 1:
        pieces = lookahead.stream(model, tiny_tokenizer, given, config=DRAFTING, **LENGTH)
        assert "".join(pieces) == result.texts[0]


def test_types_that_mark_no_image_leave_prompts_of_text_as_they_are(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model, ids = built("Gemma3"), torch.tensor([[5, 9, 31, 5, 9]])
    given = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)}
    expected = [generated(model, input_ids=ids)[0, 5:].tolist()] * 2
    assert lookahead.generate(model, tiny_tokenizer, [given, given], config=DRAFTING, **LENGTH).token_ids == expected
    done = lookahead.stream_many(model, tiny_tokenizer, given, config=DRAFTING, **LENGTH)
    assert [each.token_ids for each in done] == expected[:1]


@pytest.mark.parametrize("case", ["list", "many", "truncate", "mask", "text model"])
def test_a_mistake_with_what_a_processor_returns_is_told(
    tiny_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerFast, case: str
) -> None:
    model, inputs, tokenizer = built("Llava"), prompts(SEEING["Llava"], 2), tiny_tokenizer
    unmasked = {name: each for name, each in inputs.items() if name != "attention_mask"}
    one = prompts(SEEING["Llava"])
    calls: dict[str, Any] = {
        "list": (lambda: lookahead.generate(model, tokenizer, [one, one], **LENGTH), "prompt 0 holds pixel_values"),
        "many": (lambda: lookahead.stream_many(model, tokenizer, inputs, **LENGTH), "takes tokens alone"),
        "truncate": (lambda: lookahead.generate(model, tokenizer, one, truncate="left", **LENGTH), "truncate must be"),
        "mask": (lambda: lookahead.generate(model, tokenizer, unmasked, **LENGTH), "need their attention_mask"),
        "text model": (
            lambda: lookahead.generate(tiny_llama, tokenizer, inputs, **LENGTH), "does not read pixel_values"
        ),
    }  # fmt: skip
    call, told = calls[case]
    with pytest.raises(PromptError, match=told):
        call()


def test_a_pipeline_of_images_and_text_gives_the_same_under_the_switch(
    accepted: list[int], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    images = pytest.importorskip("PIL.Image")
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    from transformers import LlavaProcessor

    shape = {"height": 8, "width": 8}
    place = tiny_tokenizer.decode([PLACE])
    options = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = LlavaProcessor(
        clip.CLIPImageProcessorPil(size=shape, crop_size=shape), tiny_tokenizer, image_token=place, **options
    )
    model = build(SEEING["Llava"])
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    asked = {"text": f"{place}what is this? this is", "images": images.new("RGB", (16, 12), (200, 30, 90))}
    expected = pipe(**asked, max_new_tokens=NEW)
    with lookahead.enable(model, TRUSTING):
        assert pipe(**asked, max_new_tokens=NEW) == expected
    assert len(accepted) == 1
