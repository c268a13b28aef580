"""Every way to end an output, alone and against another: ours ends where `model.generate` ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
)

import lookahead
from lookahead.backend.support import Support
from tests.support.token_prompts import DRAFTING, IDS, INPUTS

SAMPLED = {"do_sample": True, "temperature": 1.5}
Foretell = Callable[[torch.Tensor, torch.Tensor | None], None]


class RowsEndAt(StoppingCriteria):
    """A user's criterion that knows the row it is asked about: each ends at a length of its own."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.lengths[: len(input_ids)]


class SumReaches(StoppingCriteria):
    """A user's criterion that depends on all the ids before."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(1) > 1000


class CallsReach(StoppingCriteria):
    """A user's criterion that counts how often it was asked."""

    def __init__(self, limit: int) -> None:
        self.limit, self.calls = limit, 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> bool:
        self.calls += 1
        return self.calls >= self.limit


class Unsure(StoppingCriteria):
    """A user's criterion that looks at the newest scores."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return scores[-1].softmax(-1).max(-1).values < 0.5


ANSWERS: dict[str, torch.Tensor] = {}  # what `generate` says of inputs where nothing ends it, by what it was given


def both(model: PreTrainedModel, foretell: Foretell | None = None, **options: Any) -> tuple[Any, Any]:
    """What transformers gives and what we give from the same seed, with drafts that run past every end.

    A batch with criteria of a user's own is left to transformers, with a warning.
    """
    torch.manual_seed(3)
    expected = model.generate(**options)
    if foretell is not None:
        torch.manual_seed(3)
        inputs = {name: options[name] for name in ("input_ids", "attention_mask") if name in options}
        sampled = {name: options[name] for name in SAMPLED if name in options}
        asked = repr((inputs, sampled))
        if asked not in ANSWERS:
            ANSWERS[asked] = model.generate(**inputs, **sampled, max_new_tokens=60)
        foretell(ANSWERS[asked], options.get("attention_mask"))
    torch.manual_seed(3)
    own = [each for each in options.get("stopping_criteria", ()) if type(each).__module__ == __name__]
    is_left = own and len(options["input_ids"]) > 1
    with pytest.warns(UserWarning, match=type(own[0]).__name__) if is_left else nullcontext():
        return expected, model.generate(**options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)


ENDINGS: dict[str, dict[str, Any]] = {
    "a token": {"eos_token_id": 58},
    "a list of tokens": {"eos_token_id": [58, 48, 6]},
    "a tensor of tokens": {"eos_token_id": torch.tensor([58, 48, 6])},
    "a token outside the vocabulary": {"eos_token_id": -1},
    "tokens that are no 32-bit numbers": {"eos_token_id": [58, 1 << 40, -(1 << 40)]},
    "a sum of ids": {"stopping_criteria": [SumReaches()], "eos_token_id": 1},
    "lengths of their own": {"stopping_criteria": [RowsEndAt(19, 25, 14)], "eos_token_id": 1},
    "the user's own length": {"stopping_criteria": [MaxLengthCriteria(21)]},
    "the user's own token": {"stopping_criteria": [EosTokenCriteria([58, 48])]},
    "a length and a token": {"stopping_criteria": [MaxLengthCriteria(21)], "eos_token_id": [57, 43]},
    "no time": {"max_time": 0.0, "eos_token_id": 1},
    "all the time": {"max_time": 1e9, "eos_token_id": 1},
}


STOPPING: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


@pytest.mark.parametrize(
    "given", [None, GenerationConfig(), GenerationConfig(stop_strings=["~"])], ids=["none", "another", "strings"]
)
def test_stop_strings_of_the_models_own_configuration_end_an_output(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    prompt = "the cat sat on the mat"
    ids = tiny_tokenizer(prompt, return_tensors="pt").input_ids
    text = tiny_tokenizer.decode(looping_llama.generate(ids, **STOPPING)[0, ids.shape[1] :])
    monkeypatch.setattr(looping_llama.generation_config, "stop_strings", [text[7:9]])
    options: dict[str, Any] = {**STOPPING, "generation_config": given}
    expected = looping_llama.generate(ids, **options, tokenizer=tiny_tokenizer)
    with lookahead.enable(looping_llama):
        assert torch.equal(looping_llama.generate(ids, **options, tokenizer=tiny_tokenizer), expected)
    got = lookahead.generate(looping_llama, tiny_tokenizer, prompt, **options)
    assert got.token_ids == expected[:, ids.shape[1] :].tolist()
    assert got.finish_reasons == ["length" if given is not None and given.stop_strings else "stop"]


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", ENDINGS.values(), ids=ENDINGS.keys())
def test_an_output_ends_where_that_of_generate_ends(
    looping_llama: PreTrainedModel,
    foretell: Foretell,
    accepted: list[int],
    inputs: dict[str, Any],
    sampling: dict[str, Any],
    options: dict[str, Any],
) -> None:
    options = {"pad_token_id": 0, "max_new_tokens": 30, **sampling, **options}
    expected, got = both(looping_llama, foretell, **inputs, **options)
    assert torch.equal(got, expected)
    if inputs is INPUTS["ragged"] and isinstance(options.get("stopping_criteria", [0])[0], RowsEndAt | SumReaches):
        assert not accepted
    elif "max_time" not in options:
        assert sum(accepted) > 0
    elif options["max_time"] == 0.0:
        assert got.shape[1] == 13


@pytest.mark.parametrize("length", range(13, 24))
def test_a_stop_inside_an_accepted_block_ends_the_output_there(
    looping_llama: PreTrainedModel, foretell: Foretell, length: int
) -> None:
    for ending in ({"stopping_criteria": [RowsEndAt(length)], "max_length": 40}, {"max_length": length}):
        expected, got = both(looping_llama, foretell, input_ids=IDS, do_sample=False, **ending)
        assert got.shape == (1, length)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("criterion", [RowsEndAt(19, 25, 14), SumReaches()], ids=["lengths", "sums"])
def test_a_row_that_ended_by_itself_grows_on_where_nothing_pads_it(
    looping_llama: PreTrainedModel, sampling: dict[str, Any], criterion: StoppingCriteria
) -> None:
    # Without an end-of-sequence token transformers pads nothing: all rows go on until the last one has ended.
    options = {**INPUTS["ragged"], "stopping_criteria": [criterion], "max_new_tokens": 30, **sampling}
    torch.manual_seed(3)
    expected = looping_llama.generate(**options)
    torch.manual_seed(3)
    with lookahead.enable(looping_llama, DRAFTING), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be left to transformers, with a warning
        assert torch.equal(looping_llama.generate(**options), expected)


def test_a_criterion_is_asked_once_for_every_token(looping_llama: PreTrainedModel, foretell: Foretell) -> None:
    theirs, ours = CallsReach(17), CallsReach(17)
    expected, _ = both(looping_llama, input_ids=IDS, do_sample=False, max_new_tokens=30, stopping_criteria=[theirs])
    theirs.calls = 0
    looping_llama.generate(IDS, do_sample=False, max_new_tokens=30, stopping_criteria=[theirs])
    foretell(looping_llama.generate(IDS, do_sample=False, max_new_tokens=30), None)
    got = looping_llama.generate(
        IDS,
        do_sample=False,
        max_new_tokens=30,
        stopping_criteria=[ours],
        custom_generate=lookahead.decode,
        lookahead_config=DRAFTING,
    )
    assert torch.equal(got, expected)
    assert ours.calls == theirs.calls == 17


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
def test_a_criterion_may_look_at_the_scores(
    looping_llama: PreTrainedModel, foretell: Foretell, inputs: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "stopping_criteria": [Unsure()],
        "return_dict_in_generate": True,
        "output_scores": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    expected, got = both(looping_llama, foretell, **inputs, **options, do_sample=False, max_new_tokens=40)
    assert torch.equal(got.sequences, expected.sequences)
    assert expected.sequences.shape[1] < 52, "the criterion never fires"


def through_decode(model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    criteria = [StopStringCriteria(tokenizer, options.pop("stop_strings"))]
    extra = {"custom_generate": lookahead.decode, "lookahead_config": DRAFTING}
    return model.generate(**inputs, **options, **extra, stopping_criteria=criteria)


def through_enable(model: PreTrainedModel, tokenizer: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    with lookahead.enable(model, DRAFTING):
        return model.generate(**inputs, **options, tokenizer=tokenizer)


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("through", [through_decode, through_enable])
@pytest.mark.parametrize("how_many", [1, 3])
def test_stop_strings_end_every_row_where_generate_ends_it(
    looping_llama: PreTrainedModel,
    tiny_tokenizer: Any,
    accepted: list[int],
    inputs: dict[str, Any],
    through: Callable[..., torch.Tensor],
    how_many: int,
) -> None:
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
    free = looping_llama.generate(**inputs, **options)
    stops = [tiny_tokenizer.decode(free[row % len(free), 19 + row : 21 + row]) for row in range(how_many)]
    options["stop_strings"] = stops[0] if how_many == 1 else stops
    expected = looping_llama.generate(**inputs, **options, tokenizer=tiny_tokenizer)
    got = through(looping_llama, tiny_tokenizer, inputs, **options)
    assert torch.equal(got, expected)
    assert len(accepted) == 1
    assert not torch.equal(expected, free), "no string stops anything"


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    "limits", [{"max_length": 40}, {"max_new_tokens": 9}, {"max_length": 40, "max_new_tokens": 9}, {"max_time": 0.0}]
)
def test_text_ends_at_the_limit_that_generate_heeds(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any, limits: dict[str, Any]
) -> None:
    ids = torch.tensor([tiny_tokenizer("abab abab")["input_ids"]])
    expected = looping_llama.generate(ids, do_sample=False, **limits)[0, ids.shape[1] :].tolist()
    result = lookahead.generate(looping_llama, tiny_tokenizer, "abab abab", do_sample=False, **limits)
    assert result.token_ids == [expected]


@pytest.mark.parametrize("max_new_tokens", [1 << 31, 1 << 33, 1 << 60], ids=str)
@pytest.mark.parametrize("is_drafted", [True, False], ids=["drafted", "default"])
def test_a_limit_that_no_memory_could_hold_is_no_limit(
    looping_llama: PreTrainedModel, is_drafted: bool, max_new_tokens: int
) -> None:
    ours: dict[str, Any] = {"lookahead_config": DRAFTING} if is_drafted else {}
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "stopping_criteria": [SumReaches()]}
    expected = looping_llama.generate(IDS, **options)
    assert torch.equal(looping_llama.generate(IDS, **options, custom_generate=lookahead.decode, **ours), expected)


def test_new_tokens_come_before_a_length_that_the_prompt_already_has(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    ids = torch.tensor([tiny_tokenizer("abab abab")["input_ids"]])
    limits = {"max_length": 5, "max_new_tokens": 7, "do_sample": False}
    expected = looping_llama.generate(ids, **limits)[0, ids.shape[1] :].tolist()
    assert lookahead.generate(looping_llama, tiny_tokenizer, "abab abab", **limits).token_ids == [expected]


def outcome(call: Callable[[], torch.Tensor]) -> tuple[Any, list[str]]:
    """The tokens or the error of a call, and what it warns of."""
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result: Any = call().tolist()
        except Exception as error:
            result = (type(error), str(error))
    return result, [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 3},
        {"max_length": 12},
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"max_length": 17, "max_new_tokens": 4},
        {"min_new_tokens": 9, "max_new_tokens": 4, "eos_token_id": 16},
        {"min_length": 90, "max_new_tokens": 4, "eos_token_id": 16},
        {"min_length": 30, "min_new_tokens": 2, "max_new_tokens": 9, "eos_token_id": 18},
        {"temperature": 0.0, "do_sample": True, "max_new_tokens": 4},
        {"temperature": 0.5, "do_sample": False, "max_new_tokens": 4},
        {"top_p": 1.5, "do_sample": True, "max_new_tokens": 4},
        {"top_k": -1, "do_sample": True, "max_new_tokens": 4},
        {"repetition_penalty": -1.0, "max_new_tokens": 4},
        {"num_return_sequences": 2, "do_sample": False, "max_new_tokens": 4},
        {"stop_strings": "ab", "max_new_tokens": 4},
        {"bad_words_ids": [], "max_new_tokens": 4},
        {"max_new_tokenz": 4},
    ],
    ids=str,
)
def test_what_contradicts_itself_fails_or_warns_as_it_does_in_generate(
    looping_llama: PreTrainedModel, options: dict[str, Any]
) -> None:
    options = {"pad_token_id": 0, **options}
    expected = outcome(lambda: looping_llama.generate(IDS, **options))
    with lookahead.enable(looping_llama, DRAFTING):
        got = outcome(lambda: looping_llama.generate(IDS, **options))
    assert got == expected


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({}, "length"),
    "one-token": ({"max_new_tokens": 1}, "length"),
    "end-token": ({"eos_token_id": 16, "min_new_tokens": 3}, "stop"),
    "end-token-at-the-limit": ({"eos_token_id": list(range(101)), "max_new_tokens": 1}, "stop"),
    "stop-string": ({"stop_strings": list("abcdefghijklmnopqrstuvwxyz0123456789"), "max_new_tokens": 40}, "stop"),
    "criterion": ({"stopping_criteria": [RowsEndAt(14)]}, "criteria"),
    "criterion-at-the-limit": ({"stopping_criteria": [RowsEndAt(13)], "max_new_tokens": 4}, "criteria"),
    "criterion-at-the-only-token": ({"stopping_criteria": [RowsEndAt(10)], "max_new_tokens": 1}, "criteria"),
    "criterion-at-an-end-token": (
        {"stopping_criteria": [RowsEndAt(11)], "eos_token_id": list(range(101)), "min_new_tokens": 2},
        "stop",
    ),
}


@pytest.mark.parametrize(("options", "reason"), REASONS.values(), ids=REASONS.keys())
@pytest.mark.parametrize("is_plain", [False, True], ids=["drafted", "plain"])
def test_a_result_says_why_its_output_ended(
    looping_llama: PreTrainedModel,
    tiny_tokenizer: Any,
    options: dict[str, Any],
    reason: str,
    is_plain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"max_new_tokens": 9, "do_sample": False, **options}
    if is_plain:
        none = Support("none", "it is told so")
        monkeypatch.setattr("lookahead.backend.support.support_of", lambda *_, **__: none)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LlamaForCausalLM cannot be decoded speculatively")
        result = lookahead.generate(looping_llama, tiny_tokenizer, "abab abab", **options)
    assert result.finish_reasons == [reason]
    if not is_plain and "stopping_criteria" not in options:  # which is refused there
        (done,) = lookahead.stream_many(looping_llama, tiny_tokenizer, ["abab abab"], **options)
        assert (done.finish_reason, done.token_ids) == (reason, result.token_ids[0])


def test_every_row_of_a_batch_has_its_own_reason(looping_llama: PreTrainedModel, tiny_tokenizer: Any) -> None:
    prompts, options = ["abab abab", "0123", "xyxyx"], {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    free = lookahead.generate(looping_llama, tiny_tokenizer, prompts, **options).token_ids
    end = next(token for token in free[1] if token not in free[0])
    result = lookahead.generate(looping_llama, tiny_tokenizer, prompts, eos_token_id=end, **options)
    assert result.finish_reasons == ["stop" if end in ids else "length" for ids in free]
    assert set(result.finish_reasons) == {"stop", "length"}


def test_every_row_of_a_batch_that_is_decoded_plainly_has_its_own_reason(
    looping_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    prompts = ["abab abab", "0123", "xyxyx", "zz"]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    free = lookahead.generate(looping_llama, tiny_tokenizer, prompts, **options).token_ids
    end = next(token for token in free[1] if token not in free[0] + free[2] + free[3])
    begin = max(len(tiny_tokenizer(prompt)["input_ids"]) for prompt in prompts)
    with pytest.warns(UserWarning, match="RowsEndAt may keep a state"):
        result = lookahead.generate(
            looping_llama,
            tiny_tokenizer,
            prompts,
            eos_token_id=end,
            stopping_criteria=[RowsEndAt(begin + 4, 99, 99, begin + 6)],
            **options,
        )
    assert result.finish_reasons == ["criteria", "stop", "length", "criteria"]
    assert result.token_ids == [free[0][:4], free[1][: free[1].index(end) + 1], free[2], free[3]]
