"""Processors and criteria of a user's own see the calls that `model.generate` makes, whatever they keep of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

import lookahead
from lookahead import LookaheadConfig, UnsupportedModelError
from tests.support.stateful import DoneTracker, Grammar, calls_of
from tests.support.token_prompts import DRAFTING, IDS, INPUTS

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": [58, 48], "pad_token_id": 0}


class CallsReach(DoneTracker):
    """Stops after so many calls."""

    def __init__(self, limit: int) -> None:
        super().__init__([-1], 3)
        self.limit = limit

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        super().__call__(input_ids, scores)
        return len(self.calls) >= self.limit


class EosAfter(EosTokenCriteria):
    """A kind of transformers', changed: an end token counts only after a length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return super().__call__(input_ids, scores, **kwargs) & (input_ids.shape[1] > 20)


class LengthOfRows(MaxLengthCriteria):
    """Likewise: every row has a length of its own."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.arange(len(input_ids)) + input_ids.shape[1] >= self.max_length


class Cooling(TemperatureLogitsWarper):
    """A kind of transformers', changed: it counts its calls."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return scores + self.calls * torch.sin(torch.arange(scores.shape[1]) * self.calls)


def allowing() -> Callable[[int, torch.Tensor], list[int]]:
    """A constraint that counts its calls."""
    calls: list[int] = []

    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        calls.append(1)
        return [token for token in range(101) if (token + len(calls)) % 3]

    return allowed


MAKERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "done tracker": lambda rows: {"stopping_criteria": [DoneTracker([43, 44], rows)]},
    "done tracker by row": lambda rows: {"stopping_criteria": [DoneTracker([43, 44], rows, by_row=True)]},
    "six calls": lambda rows: {"stopping_criteria": [CallsReach(6)]},
    "a changed end": lambda rows: {"stopping_criteria": [EosAfter([58, 48])], "eos_token_id": 1},
    "a changed length": lambda rows: {"stopping_criteria": [LengthOfRows(24)]},
    "confidence": lambda rows: {
        "stopping_criteria": [ConfidenceCriteria(0.9)],
        "return_dict_in_generate": True,
        "output_scores": True,
    },
    "grammar": lambda rows: {"logits_processor": [Grammar()]},
    "a changed warper": lambda rows: {"logits_processor": [Cooling(1.0)]},
    "a constraint": lambda rows: {"prefix_allowed_tokens_fn": allowing()},
    "a watermark twice": lambda rows: {
        "logits_processor": [SynthIDTextWatermarkLogitsProcessor(ngram_len=3, keys=[30, 31], sampling_table_size=64,
                             sampling_table_seed=0, context_history_size=16, device="cpu")],
        "do_sample": True,
    },
}  # fmt: skip


def outcome(model: PreTrainedModel, options: dict[str, Any], **extra: Any) -> tuple[Any, Any]:
    """The tokens of a call, and what the user's object has seen."""
    torch.manual_seed(3)
    got = model.generate(**options, **extra)
    return getattr(got, "sequences", got).tolist(), calls_of(options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_what_keeps_a_state_sees_the_calls_of_generate_and_no_others(
    looping_llama: PreTrainedModel, make: Callable[[int], dict[str, Any]], inputs: dict[str, Any]
) -> None:
    rows = len(inputs["input_ids"])
    expected = outcome(looping_llama, {**OPTIONS, **inputs, **make(rows)})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        extra = {"custom_generate": lookahead.decode, "lookahead_config": DRAFTING}
        got = outcome(looping_llama, {**OPTIONS, **inputs, **make(rows)}, **extra)
    assert got == expected
    assert sum("may keep a state" in str(each.message) for each in said) == (rows > 1)


def test_the_warning_names_what_keeps_the_batch_from_being_drafted_for(looping_llama: PreTrainedModel) -> None:
    def lean(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    for options in ({"logits_processor": [TopKLogitsWarper(5), lean]}, {"stopping_criteria": [CallsReach(3)]}):
        name = "lean" if "logits_processor" in options else "CallsReach"
        with lookahead.enable(looping_llama), pytest.warns(UserWarning, match=f"{name} may keep a state"):
            looping_llama.generate(**INPUTS["ragged"], **OPTIONS, **options)


def test_processors_of_transformers_own_are_drafted_beside(looping_llama: PreTrainedModel, accepted: list[int]) -> None:
    options: dict[str, Any] = {
        **INPUTS["ragged"],
        **OPTIONS,
        "do_sample": True,
        "max_new_tokens": 40,
        "eos_token_id": None,
    }
    options["watermarking_config"] = SynthIDTextWatermarkingConfig(keys=[30, 31, 32], ngram_len=3)
    options["logits_processor"] = [TopKLogitsWarper(3)]
    expected = outcome(looping_llama, options)
    assert outcome(looping_llama, options, custom_generate=lookahead.decode) == expected
    assert len(accepted) == 1


@pytest.mark.parametrize("keeps", [{}, {"output_logits": True}, {"output_scores": True}], ids=str)
@pytest.mark.parametrize("returns", [False, True])
def test_a_criterion_gets_scores_where_generate_gives_it_some(
    looping_llama: PreTrainedModel, keeps: dict[str, Any], returns: bool
) -> None:
    options = {**OPTIONS, "input_ids": IDS, **keeps, "return_dict_in_generate": returns}
    theirs, ours = CallsReach(5), CallsReach(5)
    looping_llama.generate(**options, stopping_criteria=[theirs])
    looping_llama.generate(**options, stopping_criteria=[ours], custom_generate=lookahead.decode)
    assert ours.calls == theirs.calls


def test_text_of_a_row_that_a_criterion_ended_holds_no_padding(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    prompts = ["abab abab", "the cat"]
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 1, "pad_token_id": 7}
    with pytest.warns(UserWarning, match="DoneTracker"):
        whole = lookahead.generate(
            looping_llama, tiny_tokenizer, prompts, **options, stopping_criteria=[DoneTracker([-1], 2, by_row=True)]
        ).token_ids
    with pytest.warns(UserWarning, match="DoneTracker"):
        ended = lookahead.generate(
            looping_llama,
            tiny_tokenizer,
            prompts,
            **options,
            stopping_criteria=[DoneTracker(whole[0][3:5], 2, by_row=True)],
        ).token_ids
    assert ended[0] == whole[0][: len(ended[0])]
    assert len(ended[0]) < len(whole[0])


@pytest.mark.parametrize(
    "make", [MAKERS[name] for name in ("grammar", "six calls", "a constraint", "a watermark twice")]
)
def test_rows_that_are_refilled_refuse_what_may_keep_a_state_by_name(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, make: Callable[[int], dict[str, Any]]
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"may keep a state.*one prompt at a time"):
        lookahead.stream_many(looping_llama, tiny_tokenizer, ["ab", "cd"], max_new_tokens=4, **make(1))
    options = {"logits_processor": [TemperatureLogitsWarper(2.0)], "repetition_penalty": 1.2, "max_new_tokens": 4}
    assert len(list(lookahead.stream_many(looping_llama, tiny_tokenizer, ["ab", "cd"], **options))) == 2


def test_typical_acceptance_asks_no_stateful_object_about_tokens_not_emitted(
    looping_llama: PreTrainedModel,
) -> None:
    typical = LookaheadConfig(acceptance="typical", draft="fixed", memory="request")
    extra = {"custom_generate": lookahead.decode, "lookahead_config": typical}
    sampled = {**OPTIONS, "input_ids": IDS, "do_sample": True, "temperature": 2.0, "max_new_tokens": 40}
    watermark = SynthIDTextWatermarkingConfig(keys=[30, 31, 32], ngram_len=3)
    for make, name in (
        (lambda: {"logits_processor": [Grammar()]}, "Grammar"),
        (lambda: {"logits_processor": [Cooling(1.0)]}, "Cooling"),
        (lambda: {"prefix_allowed_tokens_fn": allowing()}, "prefix_allowed_tokens_fn"),
        (lambda: {"watermarking_config": watermark}, "SynthIDTextWatermarkLogitsProcessor"),
    ):
        expected = outcome(looping_llama, {**sampled, **make()})
        with pytest.warns(UserWarning, match=f"{name} may keep a state, and acceptance='typical'") as said:
            assert outcome(looping_llama, {**sampled, **make()}, **extra) == expected
        assert len(said) == 1
        with warnings.catch_warnings():  # where nothing is sampled, nothing is typical
            warnings.simplefilter("error")
            outcome(looping_llama, {**sampled, **make(), "do_sample": False}, **extra)


def test_typical_acceptance_drafts_beside_stateless_processors_and_criteria(
    looping_llama: PreTrainedModel, accepted: list[int]
) -> None:
    typical = LookaheadConfig(acceptance="typical", draft="fixed", memory="request")
    options = {**OPTIONS, "input_ids": IDS, "do_sample": True, "repetition_penalty": 1.1, "max_new_tokens": 40}
    tracker = DoneTracker([-1], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extra = {"custom_generate": lookahead.decode, "lookahead_config": typical}
        tokens, _ = outcome(looping_llama, {**options, "stopping_criteria": [tracker], "eos_token_id": None}, **extra)
    assert len(accepted) == 1
    assert [ids[0] for ids, _ in tracker.calls] == [tokens[0][: len(IDS[0]) + n] for n in range(1, 41)]
