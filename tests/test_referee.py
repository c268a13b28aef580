"""What transformers' own tests ask of `generate`, asked of a model whose `generate` is ours."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TextGenerationPipeline,
)
from transformers.generation import GenerateDecoderOnlyOutput

import lookahead
from lookahead import LookaheadConfig
from lookahead.model.facts import CACHE

BATCH = torch.tensor([[5, 9, 31, 77, 5, 9, 31], [41, 42, 41, 42, 41, 42, 41]])
NEW = 12
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


@pytest.fixture
def model(looping_llama: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model under test: a caller cannot tell it from one without the switch."""
    with lookahead.enable(looping_llama, LookaheadConfig(draft="fixed", min_probability=0.0)):
        yield looping_llama


@pytest.fixture(autouse=True)
def served(accepted: list[int]) -> Iterator[None]:
    """Everything in this file is decoded by our engine."""
    yield
    assert accepted


def of_transformers(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """What the class's own `generate` gives."""
    return type(model).generate(model, *args, **kwargs)


def test_greedy_output_has_the_prompt_and_as_many_tokens_as_asked_for(model: PreTrainedModel) -> None:
    output = model.generate(BATCH, **GREEDY)
    assert output.shape == (2, BATCH.shape[1] + NEW)
    assert torch.equal(output[:, : BATCH.shape[1]], BATCH)
    assert output.dtype == BATCH.dtype


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_dict_holds_sequences_scores_logits_and_a_cache_of_the_right_shapes(
    model: PreTrainedModel, sequences: int
) -> None:
    output = model.generate(BATCH, max_new_tokens=NEW, do_sample=True, num_return_sequences=sequences, **DICT)
    rows, config = 2 * sequences, model.config
    assert isinstance(output, GenerateDecoderOnlyOutput)
    assert output.sequences.shape == (rows, BATCH.shape[1] + NEW)
    for name in ("scores", "logits"):
        assert isinstance(output[name], tuple)
        assert [step.shape for step in output[name]] == [(rows, config.vocab_size)] * NEW
        assert {step.dtype for step in output[name]} == {torch.float32}
    assert (output.attentions, output.hidden_states) == (None, None)
    cache = output[CACHE]
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    assert isinstance(cache, DynamicCache)
    assert len(cache.layers) == config.num_hidden_layers
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (rows, heads, BATCH.shape[1] + NEW - 1, width)


def test_without_being_asked_for_scores_and_logits_are_none(model: PreTrainedModel) -> None:
    output = model.generate(BATCH, **GREEDY, return_dict_in_generate=True)
    assert (output.scores, output.logits) == (None, None)


def test_a_mask_of_ones_is_no_mask(model: PreTrainedModel) -> None:
    masked = model.generate(BATCH, attention_mask=torch.ones_like(BATCH), **GREEDY)
    assert torch.equal(masked, model.generate(BATCH, **GREEDY))


@pytest.mark.parametrize("pads", [1, 4])
def test_left_padding_changes_nothing(model: PreTrainedModel, pads: int) -> None:
    padded = torch.nn.functional.pad(BATCH, (pads, 0))
    output = model.generate(padded, attention_mask=(padded != 0).long(), **GREEDY, **DICT)
    plain = model.generate(BATCH, **GREEDY, **DICT)
    assert torch.equal(output.sequences[:, pads:], plain.sequences)
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_two_halves_with_the_cache_between_them_are_one_whole(model: PreTrainedModel, padded: bool) -> None:
    ids = torch.nn.functional.pad(BATCH, (3, 0)) if padded else BATCH
    mask = (ids != 0).long()
    whole = model.generate(ids, attention_mask=mask, **GREEDY, **DICT)
    half = {**GREEDY, "max_new_tokens": NEW // 2, **DICT}
    first = model.generate(ids, attention_mask=mask, **half)
    longer = torch.nn.functional.pad(mask, (0, NEW // 2), value=1)
    second = model.generate(first.sequences, attention_mask=longer, **{CACHE: first[CACHE]}, **half)
    assert torch.equal(second.sequences, whole.sequences)
    scores = torch.stack(first.scores + second.scores)
    torch.testing.assert_close(scores, torch.stack(whole.scores), rtol=1e-4, atol=1e-4)
    assert second[CACHE].get_seq_length() == whole[CACHE].get_seq_length()


def test_static_shapes_change_no_token(model: PreTrainedModel) -> None:
    assert torch.equal(model.generate(BATCH, **GREEDY, cache_implementation="static"), model.generate(BATCH, **GREEDY))


def test_options_and_the_processors_they_mean_are_the_same(model: PreTrainedModel) -> None:
    options = {"min_length": 15, "bad_words_ids": [[57, 58]], "no_repeat_ngram_size": 2, "repetition_penalty": 1.2}
    processors = [
        NoBadWordsLogitsProcessor([[57, 58]], torch.tensor([20])),
        RepetitionPenaltyLogitsProcessor(1.2),
        NoRepeatNGramLogitsProcessor(2),
        MinLengthLogitsProcessor(15, torch.tensor([20])),
    ]
    ending = {"eos_token_id": 20, "pad_token_id": 0}
    by_name = model.generate(BATCH, **GREEDY, **ending, **options)
    by_hand = model.generate(BATCH, **GREEDY, **ending, logits_processor=processors)
    assert torch.equal(by_name, by_hand)
    assert not torch.equal(by_name, model.generate(BATCH, **GREEDY, **ending))


def test_processed_scores_leave_the_raw_logits_alone(model: PreTrainedModel) -> None:
    class Scaled(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            scores.mul_(0.5)
            return scores

    with pytest.warns(UserWarning, match="Scaled may keep a state"):
        output = model.generate(BATCH, **GREEDY, **DICT, logits_processor=[Scaled()])
    plain = model.generate(BATCH, **GREEDY, **DICT)
    assert torch.equal(output.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(output.scores), 0.5 * torch.stack(plain.logits), rtol=1e-4, atol=1e-4)


def test_greedy_transition_scores_are_the_highest_scores(model: PreTrainedModel) -> None:
    output = model.generate(BATCH, **GREEDY, **DICT)
    transitions = model.compute_transition_scores(output.sequences, output.scores)
    torch.testing.assert_close(transitions, torch.stack(output.scores).max(-1).values.T, rtol=0.0, atol=0.0)
    normalized = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert (normalized <= 0).all()


@pytest.mark.parametrize(("limit", "length"), [(22, 15), (12, 12)])
def test_a_users_criterion_and_a_length_end_the_output_at_the_first_of_them(
    model: PreTrainedModel, limit: int, length: int
) -> None:
    class Fifteen(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 15)

    output = model.generate(BATCH[:1], do_sample=False, max_length=limit, stopping_criteria=[Fifteen()])
    assert output.shape == (1, length)


def test_an_end_token_may_be_a_number_a_list_or_a_tensor(model: PreTrainedModel) -> None:
    free = model.generate(BATCH[:1], **GREEDY)
    end = int(free[0, BATCH.shape[1] + 4])
    for eos in (end, [end], [end, 3], torch.tensor(end), torch.tensor([end, 3])):
        output = model.generate(BATCH[:1], **GREEDY, eos_token_id=eos, pad_token_id=0)
        assert torch.equal(output, of_transformers(model, BATCH[:1], **GREEDY, eos_token_id=eos, pad_token_id=0))
        assert output.shape[1] < free.shape[1]
        assert output[0, -1] == end


def test_without_a_padding_token_rows_are_padded_with_the_first_end_token(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    free = model.generate(BATCH, **GREEDY)
    ends = [3, int(free[0, BATCH.shape[1] + 3])]
    output = model.generate(BATCH, attention_mask=torch.ones_like(BATCH), **GREEDY, eos_token_id=ends)
    assert set(output[0, BATCH.shape[1] + 4 :].tolist()) == {3}
    assert torch.equal(output[1], free[1])


def test_without_a_length_twenty_tokens_come_with_a_warning(model: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="max_new_tokens"):
        assert model.generate(BATCH, do_sample=False).shape == (2, BATCH.shape[1] + 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(BATCH, **GREEDY)


def test_a_call_changes_neither_the_models_configuration_nor_the_one_passed_in(model: PreTrainedModel) -> None:
    own, given = model.generation_config, GenerationConfig(do_sample=True, top_k=7, max_new_tokens=NEW)
    before = own.to_dict(), given.to_dict(), model.config.to_dict()
    for _ in range(2):
        torch.manual_seed(0)
        first = model.generate(BATCH, generation_config=given, temperature=1.5, eos_token_id=[20, 48], pad_token_id=3)
        torch.manual_seed(0)
        again = model.generate(BATCH, generation_config=given, temperature=1.5, eos_token_id=[20, 48], pad_token_id=3)
        assert torch.equal(first, again)
    assert model.generation_config is own
    assert (own.to_dict(), given.to_dict(), model.config.to_dict()) == before


def test_a_misspelt_option_is_named(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="max_new_tokenz"):
        model.generate(BATCH, max_new_tokenz=5)
    assert model.generate(BATCH, **GREEDY).shape[1] == BATCH.shape[1] + NEW


def test_a_prompt_may_come_by_position_by_name_or_not_at_all(model: PreTrainedModel) -> None:
    expected = model.generate(BATCH, **GREEDY)
    assert torch.equal(model.generate(inputs=BATCH, **GREEDY), expected)
    assert torch.equal(model.generate(input_ids=BATCH, **GREEDY), expected)
    assert torch.equal(model.generate(**GREEDY), model.generate(torch.tensor([[1]]), **GREEDY))


def test_ids_of_32_bits_give_what_they_give_in_generate(model: PreTrainedModel) -> None:
    output, expected = model.generate(BATCH.int(), **GREEDY), of_transformers(model, BATCH.int(), **GREEDY)
    assert torch.equal(output, expected)
    assert output.dtype == expected.dtype


@pytest.mark.parametrize("scope", [nullcontext, torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradients_may_be_on_or_off_around_a_call(
    model: PreTrainedModel, scope: type[AbstractContextManager[None]]
) -> None:
    with scope():
        output = model.generate(BATCH, **GREEDY)
    assert torch.equal(output, of_transformers(model, BATCH, **GREEDY))
    assert not output.requires_grad


def test_what_comes_out_may_take_part_in_training(model: PreTrainedModel) -> None:
    output = model.generate(BATCH, **GREEDY, **DICT)
    weight = torch.ones(model.config.vocab_size, requires_grad=True)
    for name in ("scores", "logits"):
        for step in output[name]:
            (step * weight).sum().backward()
    for layer in output[CACHE].layers:
        (layer.keys * torch.ones(layer.keys.shape[-1], requires_grad=True)).sum().backward()
    model(output.sequences, labels=output.sequences).loss.backward()
    assert all(weights.grad is not None for weights in (weight, model.get_input_embeddings().weight))
    model.zero_grad()


def test_a_model_in_training_stays_in_training(model: PreTrainedModel) -> None:
    expected = model.generate(BATCH, **GREEDY)
    model.train()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may be left to transformers, with a warning
            assert torch.equal(model.generate(BATCH, **GREEDY), expected)
        assert model.training
    finally:
        model.eval()


def test_half_precision_runs_and_chooses_likely_tokens(looping_llama: PreTrainedModel) -> None:
    half = copy.deepcopy(looping_llama).to(torch.bfloat16)
    with lookahead.enable(half):
        output = half.generate(BATCH, **GREEDY, **DICT)
    assert output.sequences.shape == (2, BATCH.shape[1] + NEW)
    assert output[CACHE].layers[0].keys.dtype == torch.bfloat16
    logits = half(output.sequences[:, :-1]).logits[:, BATCH.shape[1] - 1 :].float()
    chosen = logits.gather(2, output.sequences[:, BATCH.shape[1] :, None])[..., 0]
    assert (logits.max(-1).values - chosen).max() <= 0.05 * logits.std()


PIPELINE_CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": ("abab abab", {}),
    "new text only": ("abab abab", {"return_full_text": False}),
    "tokens": ("abab abab", {"return_tensors": True}),
    "texts": (["abab abab", "count", "xyz xyz xyz"], {}),
    "texts in a batch": (["abab abab", "count", "xyz xyz xyz"], {"batch_size": 2}),
    "several answers": ("abab abab", {"num_return_sequences": 3, "do_sample": True}),
    "a word to stop at": ("abab abab", {"stop_sequence": "*"}),
    "a chat": ([{"role": "user", "content": "abab"}], {}),
    "chats": ([[{"role": "user", "content": text}] for text in ("abab", "count")], {"return_full_text": False}),
}


@pytest.mark.parametrize(("prompts", "options"), PIPELINE_CALLS.values(), ids=PIPELINE_CALLS.keys())
def test_a_pipeline_gives_what_it_would_have_given(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, prompts: Any, options: dict[str, Any]
) -> None:
    tiny_tokenizer.chat_template, before = CHAT, tiny_tokenizer.chat_template
    try:
        pipeline = TextGenerationPipeline(model=looping_llama, tokenizer=tiny_tokenizer)
        torch.manual_seed(4)
        expected = pipeline(prompts, **{**GREEDY, **options})
        torch.manual_seed(4)
        with lookahead.enable(looping_llama):
            got = pipeline(prompts, **{**GREEDY, **options})
    finally:
        tiny_tokenizer.chat_template = before
    assert str(got) == str(expected)
