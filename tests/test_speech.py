"""Speech: whatever Whisper's own `generate` is asked for, its text, tokens, times and segments stay what they are."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import lookahead
from lookahead import DraftModel, LookaheadConfig
from lookahead.backend.support import support_of
from lookahead.errors import ProposerError, UnsupportedModelError
from lookahead.model.facts import calls_registered_attention
from lookahead.plugins.encoder_decoder.encoding import encode_probe
from tests.support.adversarial_proposers import always_wrong, among_decoys, drafting_by, nothing, perfect, random_trees
from tests.support.families import ENCODER_DECODERS, FEATURE_ENCODERS, build, cases
from tests.support.feature_encoders import CONFORMER, features
from tests.support.pass_recorder import counted_passes
from tests.support.speech import FRAMES, PREVIOUS, VOCABULARY, sounds, tiny_recognizer, tiny_whisper

PLAIN = [family for family in FEATURE_ENCODERS.values() if family.decoded == "plain"]
DRAFTED = [family for family in FEATURE_ENCODERS.values() if family not in PLAIN]
FIXED = LookaheadConfig(draft="fixed", min_probability=0.0, trust_user_code=True)
LONG = sounds(3, 150)
HEARD = (torch.arange(150) < torch.tensor([150, 80, 120])[:, None]).long()  # their lengths in frames
BATCH = {"attention_mask": HEARD, "language": "en"}
ONE = {"language": "en"}
# A mask for two of four rows.
TWICE = {"attention_mask": HEARD[:2], **ONE, "num_return_sequences": 2, "do_sample": True}
PROMPT = torch.tensor([PREVIOUS, 30, 31])
# Falls back to higher temperatures, and takes some segments for silence.
DOUBTS: dict[str, Any] = {
    "temperature": (0.0, 0.4, 0.8),
    "compression_ratio_threshold": 3.0,
    "logprob_threshold": -0.6,
    "no_speech_threshold": 1e-4,
}
SHORT: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, ONE),
    "translated, with times": (1, {"task": "translate", "return_timestamps": True}),
    "a language that is detected": (2, {}),
    "sampled": (1, {**ONE, "do_sample": True, "temperature": 0.8}),
    "a batch": (2, {**ONE, "return_timestamps": True, "num_return_sequences": 2, "do_sample": True}),
    "a prompt, and words left out": (
        1,
        {**ONE, "prompt_ids": torch.tensor([PREVIOUS, 30, 31]), "suppress_tokens": [8]},
    ),
    "scores": (2, {**ONE, "return_dict_in_generate": True, "output_scores": True}),
}
SEQUENTIAL: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {**ONE, "return_segments": True}),
    "a batch": (3, BATCH),
    "behind what was said": (1, {**ONE, "condition_on_prev_tokens": True}),
    "a batch behind what was said": (3, {**BATCH, "condition_on_prev_tokens": True}),
    "with doubts": (1, {**ONE, **DOUBTS, "return_segments": True}),
    "a batch with doubts": (3, {**BATCH, **DOUBTS, "return_segments": True, "condition_on_prev_tokens": True}),
    "behind a prompt": (1, {**ONE, "prompt_ids": PROMPT, "condition_on_prev_tokens": True}),
}


@cache
def model_of() -> Any:
    """One model for all tests that leave it as it is, probed, so that its passes can be counted."""
    model = tiny_whisper()
    support_of(model, shortest=1, max_length=FRAMES)
    return model


def hear(model: Any, *inputs: torch.Tensor, **options: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(*inputs, **options)


def assert_same(got: Any, expected: Any) -> None:
    """Tokens are equal, and scores but for rounding, up to a row's end; a cache is compared elsewhere."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in expected.keys() - {"past_key_values", "cache"}:
            assert_same(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for mine, theirs in zip(got, expected, strict=True):
            assert_same(mine, theirs)
    elif isinstance(expected, torch.Tensor) and expected.is_floating_point():
        goes_on = got.isfinite().sum(-1) != 1 if got.ndim else torch.tensor(True)
        torch.testing.assert_close(got[goes_on], expected[goes_on], rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected))


def compare(features: torch.Tensor, **options: Any) -> tuple[int, int]:
    """Compare the switch with the model's own `generate`; the passes of both."""
    model = model_of()
    with counted_passes(model) as own:
        expected = hear(model, features, **options)
    with warnings.catch_warnings(), lookahead.enable(model, FIXED), counted_passes(model) as ours:
        warnings.filterwarnings("error", message=".*(decoded plainly|by transformers alone)")
        assert_same(hear(model, features, **options), expected)
    return len(own), len(ours)


@pytest.mark.parametrize(("count", "options"), SHORT.values(), ids=SHORT)
def test_sound_of_one_segment_has_the_tokens_of_generate(count: int, options: dict[str, Any]) -> None:
    compare(sounds(count), **options)
    expected = hear(model_of(), sounds(count), **options)
    ours = {"custom_generate": lookahead.decode, "lookahead_config": FIXED}
    assert_same(hear(model_of(), sounds(count), **options, **ours), expected)


def test_what_was_recognized_before_predicts_all_segments() -> None:
    model, options = model_of(), {**ONE, "return_timestamps": True}
    expected = hear(model, LONG[:1], **options)
    with lookahead.enable(model, replace(FIXED, memory="request", proposers=("prompt",))):
        passes = []
        for given in ({}, {"lookahead_prediction": expected[0]}):
            with counted_passes(model) as counted:
                assert_same(hear(model, LONG[:1], **options, **given), expected)
            passes.append(len(counted))
    assert passes[1] < passes[0]


@pytest.mark.parametrize(("count", "options"), SEQUENTIAL.values(), ids=SEQUENTIAL)
def test_sound_of_several_segments_has_the_tokens_and_times_of_generate(count: int, options: dict[str, Any]) -> None:
    own, ours = compare(LONG[:count], return_timestamps=True, **options)
    assert ours < own


def test_no_encoder_runs_to_find_out_what_a_decoder_verifies() -> None:
    model, heard = tiny_whisper(), []
    model.get_encoder().register_forward_hook(lambda *_: heard.append(1))
    assert support_of(model, shortest=1, max_length=FRAMES, trusted=True).shape == "trees"
    assert not heard
    ours = {"custom_generate": lookahead.decode, "lookahead_config": FIXED}
    hear(model, sounds(), **ONE, force_unique_generate_call=True, **ours)
    assert len(heard) == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"return_timestamps": True}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_whatever_is_drafted_no_token_changes(count: int, options: dict[str, Any]) -> None:
    model, features = model_of(), sounds(count)
    options = {**ONE, **options, "force_unique_generate_call": True, "return_dict_in_generate": True}
    options["max_new_tokens"] = 24
    expected = hear(model, features, **options).sequences
    answers = expected.tolist()
    for offer in (
        *(nothing, perfect(answers), among_decoys(answers, VOCABULARY)),
        *(always_wrong(answers, VOCABULARY), random_trees(VOCABULARY)),
    ):
        with drafting_by(offer):
            got = hear(model, features, **options, custom_generate=lookahead.decode, lookahead_config=FIXED)
        assert torch.equal(got.sequences, expected)


def test_an_end_or_a_limit_inside_a_draft_ends_the_text_there() -> None:
    model, features = model_of(), sounds()
    options: dict[str, Any] = {**ONE, "force_unique_generate_call": True, "return_dict_in_generate": True}
    text = hear(model, features, **options).sequences[0].tolist()
    right = perfect([text])
    for end in [token for place, token in enumerate(text) if place > 6 and token not in text[:place]][:3]:
        with drafting_by(right), counted_passes(model) as passes:
            ours = {"custom_generate": lookahead.decode, "lookahead_config": FIXED}
            got = hear(model, features, **options, eos_token_id=end, **ours).sequences[0].tolist()
        assert got == text[: text.index(end) + 1] and len(passes) == 2
    for new in (2, 3, 7):
        with drafting_by(right), counted_passes(model) as passes:
            got = hear(model, features, **options, max_new_tokens=new, **ours).sequences[0].tolist()
        assert got == text[: 4 + new] and len(passes) == 2


def test_no_node_stands_behind_the_positions_of_a_decoder() -> None:
    model, small = model_of(), tiny_whisper(max_target_positions=24)  # which drafts as far as it has positions
    config = LookaheadConfig(proposers=(DraftModel(small),), draft="fixed")
    for length in (None, 24):
        options = {**ONE, "max_length": length} if length else ONE
        expected = hear(model, sounds(), **options)
        got = hear(model, sounds(), **options, custom_generate=lookahead.decode, lookahead_config=config)
        assert torch.equal(got, expected)
    options = {**ONE, "max_new_tokens": 19}
    expected = hear(small, sounds(), **options)
    with drafting_by(random_trees(VOCABULARY)):
        assert torch.equal(hear(small, sounds(), **options, custom_generate=lookahead.decode), expected)


def test_half_precision_on_a_cpu_has_the_bits_of_generate_for_one_sound() -> None:
    model, features = tiny_whisper().to(torch.bfloat16), sounds().bfloat16()
    wanted: dict[str, Any] = {**ONE, "return_dict_in_generate": True, "output_logits": True}
    wanted |= {"force_unique_generate_call": True, "max_new_tokens": 24}
    expected = hear(model, features, **wanted)
    for offer in (random_trees(VOCABULARY), among_decoys(expected.sequences.tolist(), VOCABULARY)):
        with drafting_by(offer):
            got = hear(model, features, **wanted, custom_generate=lookahead.decode, lookahead_config=FIXED)
        assert torch.equal(got.sequences, expected.sequences)
        assert all(map(torch.equal, got.logits, expected.logits))


@pytest.mark.parametrize("name", ["return_token_timestamps", "output_attentions"])
def test_what_needs_more_than_tokens_is_decoded_plainly_and_says_so(name: str) -> None:
    model, options = tiny_whisper(), {**ONE, name: True, "return_dict_in_generate": True}
    expected = hear(model, sounds(), **options)
    told = "by transformers alone: output_attentions=True is not served"
    with pytest.warns(UserWarning, match=told), lookahead.enable(model):
        assert_same(hear(model, sounds(), **options), expected)


@pytest.mark.filterwarnings("ignore:the tokenizer")
def test_the_api_of_text_refuses_a_model_that_reads_none(tiny_tokenizer: Any) -> None:
    for call in (lookahead.generate, lookahead.stream):
        with pytest.raises(UnsupportedModelError, match="reads input_features, not text: call"):
            call(model_of(), tiny_tokenizer, "hello", max_new_tokens=3)


@pytest.mark.parametrize("memory", ["shared", "request"])
def test_later_segments_are_drafted_from_earlier_ones(memory: str) -> None:
    model, refrain = tiny_whisper(), sounds().repeat(1, 1, 5)
    support_of(model, shortest=1, max_length=FRAMES)
    config = LookaheadConfig(
        proposers=("outputs",), draft="fixed", min_probability=0.0, memory=memory, trust_user_code=True
    )
    options = {**ONE, "return_timestamps": True}
    expected = hear(model, refrain, **options)
    with lookahead.enable(model, config), counted_passes(model) as passes:
        assert torch.equal(hear(model, refrain, **options), expected)
    with lookahead.enable(model, config), counted_passes(model) as of_another:
        hear(model, refrain, **options)
    apart = {"custom_generate": lookahead.decode, "lookahead_config": replace(config, memory="request")}
    with counted_passes(model) as segment_by_segment:
        hear(model, refrain, **options, **apart)
    assert len(passes) < 0.8 * len(segment_by_segment)
    assert (len(of_another) < len(passes) / 3) is (memory == "shared")


def heard_by(model: Any) -> list[int]:
    """A list that gets the number of sounds whenever the encoder of a model runs."""
    heard: list[int] = []
    model.get_encoder().register_forward_hook(lambda _, inputs, outputs: heard.append(len(outputs[0])))
    return heard


@pytest.mark.parametrize(("count", "options"), [(1, ONE), (2, TWICE)], ids=["one", "batch"])
@pytest.mark.parametrize("encoder", ["shared", "own"])
def test_a_small_model_that_hears_drafts_for_any_number_of_sounds(
    encoder: str, count: int, options: dict[str, Any]
) -> None:
    model, small = tiny_whisper(), tiny_whisper(seed=4, decoder_layers=1)
    small.model.decoder.load_state_dict(model.model.decoder.state_dict(), strict=False)
    small.proj_out.load_state_dict(model.proj_out.state_dict())
    if encoder == "shared":
        small.model.encoder.load_state_dict(model.model.encoder.state_dict())
    options = {**options, "return_timestamps": True, "max_length": 24}
    expected = hear(model, LONG[:count], **options)
    of_large, of_small = heard_by(model), heard_by(small)
    config = LookaheadConfig(proposers=(DraftModel(small),), draft="fixed", trust_user_code=True)
    with lookahead.enable(model, config):
        assert_same(hear(model, LONG[:count], **options), expected)
    assert of_large and (not of_small if encoder == "shared" else max(of_small) == count**2)


def test_a_copy_drafts_all_that_is_said_and_reads_the_sound_once() -> None:
    model = tiny_whisper()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    config = LookaheadConfig(
        proposers=(DraftModel(copy.deepcopy(model), depth=16),), draft="fixed", trust_user_code=True
    )
    expected = hear(model, sounds(2), **ONE, force_unique_generate_call=True)
    hear(model, sounds(2), **ONE, custom_generate=lookahead.decode, lookahead_config=config)  # probed
    heard = heard_by(model)
    with counted_passes(model) as passes:
        ours = {"custom_generate": lookahead.decode, "lookahead_config": config, "force_unique_generate_call": True}
        assert torch.equal(hear(model, sounds(2), **ONE, **ours), expected)
    assert len(passes) < expected.shape[1] / 4 and heard == [2]


def test_a_model_that_reads_text_cannot_draft_for_one_that_hears() -> None:
    config = LookaheadConfig(proposers=(DraftModel(build(ENCODER_DECODERS["Bart"])),))
    with pytest.raises(ProposerError, match="it reads input_ids, and the target input_features"):
        hear(model_of(), sounds(), **ONE, custom_generate=lookahead.decode, lookahead_config=config)


@pytest.mark.parametrize("seconds", [0.8, 2.9])
def test_a_pipeline_of_speech_recognition_shows_what_it_shows_without(seconds: float) -> None:
    model = tiny_whisper()
    recognize = tiny_recognizer(model)
    wave = np.random.default_rng(0).standard_normal(int(6000 * seconds)).astype(np.float32)

    def run(beams: int = 1, **options: Any) -> Any:
        sound, given = {"raw": wave.copy(), "sampling_rate": 6000}, {"language": "en", "num_beams": beams}
        return recognize(sound, return_timestamps=True, generate_kwargs=given, **options)

    with counted_passes(model) as own:
        expected = [run(), run(batch_size=2, chunk_length_s=1)]
    beamed = run(beams=5)  # as pipelines do unless they are told otherwise
    with lookahead.enable(model, FIXED):
        with counted_passes(model) as ours:
            assert [run(), run(batch_size=2, chunk_length_s=1)] == expected and expected[0]["chunks"]
        assert run(beams=5) == beamed
    assert len(ours) < len(own)


@pytest.mark.parametrize("family", cases(DRAFTED, by_feature=True))
def test_decoders_of_sound_and_images_have_the_tokens_of_generate(family: Any) -> None:
    model, architecture = build(family), family.name.partition("-")[0]
    for count, options in ((1, {"do_sample": True}), (2, {"no_repeat_ngram_size": 2})):
        inputs = features(architecture, count)
        options = {**options, "max_new_tokens": 13, "use_cache": True}  # which Pix2Struct does not use by default
        expected = hear(model, **inputs, **options)
        if count == 2:  # the first row ends, and leaves the passes
            options |= {"eos_token_id": int(expected[0, 6]), "pad_token_id": 0}
            expected = hear(model, **inputs, **options)
        read = inputs.get("input_ids", torch.zeros(count, 0, dtype=torch.int64))
        answers = torch.cat([read, expected], 1).tolist()
        for offer in (random_trees(101), among_decoys(answers, 101), perfect(answers)):
            told: Any = warnings.catch_warnings()
            if is_plain := count == 2 and not calls_registered_attention(model):
                told = pytest.warns(UserWarning, match="must keep one length for its own attention code")
            with told, drafting_by(offer), counted_passes(model) as passes:
                if not is_plain:
                    warnings.filterwarnings("error", message=".*decoded plainly")
                got = hear(model, **inputs, **options, custom_generate=lookahead.decode, lookahead_config=FIXED)
            assert torch.equal(got, expected)
        assert (
            len(passes) < 9 or is_plain or architecture == "Whisper"
        )  # which gives back no prompt to draft the rest from
    assert support_of(model, shortest=1, max_length=20).shape == family.decoded


@pytest.mark.parametrize("family", cases(PLAIN, by_feature=True))
def test_a_decoder_whose_positions_skip_padding_is_decoded_plainly(family: Any) -> None:
    model, inputs = build(family), features(family.name.partition("-")[0], 2)
    expected = hear(model, **inputs, max_new_tokens=9, do_sample=True)
    with pytest.warns(UserWarning, match="cannot be decoded speculatively.*decoded plainly"):
        got = hear(model, **inputs, max_new_tokens=9, do_sample=True, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:.*beams.*")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["VisionEncoderDecoder-Donut", "VisionEncoderDecoder-GPT2", "PPFormulaNet"])
def test_beams_behind_encoders_of_images_are_those_of_transformers(name: str, count: int) -> None:
    family = FEATURE_ENCODERS[name]
    inputs: dict[str, Any] = features(name.partition("-")[0], count)
    inputs |= {"num_beams": 2, "max_new_tokens": 9, "use_cache": True, "return_dict_in_generate": True}
    expected = hear(build(family), **inputs)
    got = hear(build(family), **inputs, custom_generate=lookahead.decode)
    assert torch.equal(got.sequences, expected.sequences)


def test_a_row_that_ends_leaves_an_encoder_whose_outputs_the_model_edits_in_place() -> None:
    model, inputs = build(FEATURE_ENCODERS["MoonshineStreaming"]), features("MoonshineStreaming", 2)
    options: dict[str, Any] = {"max_new_tokens": 16, "use_cache": True, "return_dict_in_generate": True}
    expected = hear(model, **inputs, **options).sequences
    with drafting_by(random_trees(101)):
        got = hear(model, **inputs, **options, custom_generate=lookahead.decode, lookahead_config=FIXED).sequences
    assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["MoonshineStreaming", "PPFormulaNet"])
def test_other_caches_behind_encoders_of_sound_and_images_are_left_to_transformers(
    name: str, options: dict[str, Any]
) -> None:
    inputs = {**features(name, 1), "max_new_tokens": 12, **options}
    expected = hear(build(FEATURE_ENCODERS[name]), **inputs)
    with pytest.warns(UserWarning, match="does not grow.*decoded plainly"):
        got = hear(build(FEATURE_ENCODERS[name]), **inputs, custom_generate=lookahead.decode)
    assert torch.equal(got, expected)


@pytest.mark.skipif(not hasattr(transformers, "ParakeetForRNNT"), reason="it is newer than the installed transformers")
def test_a_transducer_is_refused_by_name(tiny_tokenizer: Any) -> None:
    config = transformers.ParakeetRNNTConfig(
        encoder_config=CONFORMER,
        **{"vocab_size": 101, "decoder_hidden_size": 32, "joint_hidden_size": 32, "num_decoder_layers": 1},
    )
    model = transformers.ParakeetForRNNT(config).eval()
    for call in (lookahead.enable, lambda model: lookahead.generate(model, tiny_tokenizer, "hello")):
        with pytest.raises(UnsupportedModelError, match="ParakeetForRNNT has no decoder that reads tokens"):
            call(model)


def test_a_decoder_is_probed_with_outputs_of_the_form_that_its_encoder_gave() -> None:
    model = build(FEATURE_ENCODERS["PPFormulaNet"])
    inputs = features("PPFormulaNet", 1)
    hear(model, **inputs, max_new_tokens=3, custom_generate=lookahead.decode)
    given, probed = model.get_encoder()(**inputs), encode_probe(model, [5, 6, 7], 2).outputs
    assert type(probed) is type(given)
    assert probed.pooler_output.shape == (2, 3, given.pooler_output.shape[-1])
