"""Every option of `generate` that shapes the choice of a token: ours gives what `model.generate` gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    WatermarkingConfig,
)

import lookahead
from lookahead.errors import LogitsError
from lookahead.model.facts import CACHE
from tests.support.token_prompts import DRAFTING, IDS, INPUTS

ENDING = {"eos_token_id": [20, 58], "pad_token_id": 0}


class Leaning(LogitsProcessor):
    """A user's processor: what it adds depends on the row, the length and the newest token."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        row = torch.arange(len(scores))[:, None]
        return scores + 9 * torch.sin((row + 1) * torch.arange(scores.shape[1]) + input_ids[:, -1:])


class InPlace(LogitsProcessor):
    """A user's processor that writes into what it was given."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, input_ids.shape[1] % 7 :: 7] -= 50
        return scores


def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
    """A constraint that depends on the row and on the ids before."""
    return [token for token in range(101) if (token + int(ids[-1]) + batch_id) % 4]


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[100], [17, 18], [41, 42]]},
    "sequence_bias": {"sequence_bias": {(100,): -60.0, (17, 18): -60.0, (41, 42): -60.0}},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "suppress_tokens": {"suppress_tokens": [16, 17, 100]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [16, 43, 42, 6]},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (4, 1.3),
        "eos_token_id": [44, 48],
        "pad_token_id": 0,
    },
    "min_length": {"min_length": 40, **ENDING},
    "min_new_tokens": {"min_new_tokens": 30, **ENDING},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=20.0)},
    "self-hashing watermark": {
        "watermarking_config": WatermarkingConfig(bias=20.0, seeding_scheme="selfhash", context_width=3)
    },
    "a user's processor": {"logits_processor": [Leaning()]},
    "a user's processor in place": {"logits_processor": [InPlace()]},
    "transformers' processor given by the user": {"logits_processor": [TemperatureLogitsWarper(9.0), Leaning()]},
}
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 4.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "top_h": {"top_h": 0.3},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.2},
    "eta_cutoff": {"eta_cutoff": 0.5},
    "SynthID watermark": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=list(range(30, 40)), ngram_len=3)},
}
MANY = {
    "temperature": 2.0,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 4,
    "bad_words_ids": [[56, 57]],
    "sequence_bias": {(58,): -3.0},
    "suppress_tokens": [100],
    "min_new_tokens": 6,
    "prefix_allowed_tokens_fn": allowed,
    "logits_processor": [Leaning()],
    "watermarking_config": WatermarkingConfig(),
    "renormalize_logits": True,
    "remove_invalid_values": True,
    **ENDING,
}


WITHOUT: dict[str, torch.Tensor] = {}  # what `generate` gives without an option, by all the others
Foretell = Callable[[torch.Tensor, torch.Tensor | None], None]


def is_foreign(options: dict[str, Any]) -> bool:
    """Whether a batch is left to transformers: what a user brings along may keep a state."""
    rows = len(options.get("input_ids", [0])) * options.get("num_return_sequences", 1)
    return rows > 1 and not options.keys().isdisjoint(("logits_processor", "prefix_allowed_tokens_fn"))


def both(model: PreTrainedModel, foretell: Foretell, **options: Any) -> tuple[Any, Any]:
    """What transformers gives and what we give from the same seed, with drafts that are right for a while."""
    torch.manual_seed(3)
    expected = model.generate(**options)
    foretell(getattr(expected, "sequences", expected), options.get("attention_mask"))
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match="may keep a state") if is_foreign(options) else nullcontext():
        return expected, model.generate(**options, custom_generate=lookahead.decode, lookahead_config=DRAFTING)


def check(
    model: PreTrainedModel, foretell: Foretell, accepted: list[int], common: dict[str, Any], options: dict[str, Any]
) -> None:
    """Ours is what transformers gives, with accepted drafts, and not what it gives without the option."""
    expected, got = both(model, foretell, **{**common, **options})
    assert torch.equal(got, expected)
    assert not accepted if is_foreign({**common, **options}) else sum(accepted) > 0
    if repr(common) not in WITHOUT:
        torch.manual_seed(3)
        WITHOUT[repr(common)] = model.generate(**common)
    assert not torch.equal(expected, WITHOUT[repr(common)]), "the option does nothing here"


@pytest.mark.covering(2)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_an_option_that_changes_the_output_changes_ours_alike(
    looping_llama: PreTrainedModel,
    foretell: Foretell,
    accepted: list[int],
    inputs: dict[str, Any],
    do_sample: bool,
    options: dict[str, Any],
) -> None:
    ending = {name: value for name, value in options.items() if name in ("eos_token_id", "pad_token_id")}
    common = {**inputs, **ending, "do_sample": do_sample, "max_new_tokens": 40}
    check(looping_llama, foretell, accepted, common, options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("options", WARPERS.values(), ids=WARPERS.keys())
def test_an_option_of_sampling_changes_ours_alike(
    looping_llama: PreTrainedModel,
    foretell: Foretell,
    accepted: list[int],
    inputs: dict[str, Any],
    options: dict[str, Any],
) -> None:
    common = {**inputs, "do_sample": True, "max_new_tokens": 30, "temperature": 2.0, "top_k": 0}
    check(looping_llama, foretell, accepted, common, options)


@pytest.mark.parametrize("name", ["renormalize_logits", "remove_invalid_values"])
def test_an_option_that_tidies_the_scores_tidies_ours_alike(
    looping_llama: PreTrainedModel, foretell: Foretell, name: str
) -> None:
    expected, got = both(
        looping_llama,
        foretell,
        **INPUTS["ragged"],
        **{name: True},
        do_sample=True,
        max_new_tokens=10,
        suppress_tokens=[16],
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(expected.scores), rtol=1e-5, atol=1e-5)
    if name == "renormalize_logits":
        assert torch.stack(got.scores).exp().sum(-1).sub(1).abs().max() < 1e-5


NAN, INF = float("nan"), float("inf")
ADDED: dict[str, dict[int, float]] = {  # to the scores of some tokens
    "NaN everywhere": dict.fromkeys(range(101), NAN),
    "NaN in one place": {40: NAN},
    "NaN in two places and infinity in one": {60: NAN, 17: NAN, 3: INF},
    "infinity in one place": {9: INF},
    "infinity in two places": {50: INF, 20: INF},
    "infinity everywhere": dict.fromkeys(range(101), INF),
    "minus infinity everywhere": dict.fromkeys(range(101), -INF),
    "minus infinity nearly everywhere": dict.fromkeys(range(90), -INF),
}


class Adding(LogitsProcessor):
    """A user's processor that adds to the scores of some tokens, from the fourth new token of `IDS` on."""

    def __init__(self, added: dict[int, float]) -> None:
        self.tokens, self.values = list(added), torch.tensor(list(added.values()))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= IDS.shape[1] + 3:
            scores[:, self.tokens] += self.values
        return scores


@pytest.mark.parametrize("kind", ["a user's", "transformers' own"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_scores_that_a_processor_makes_no_numbers_do_what_they_do_in_generate(
    looping_llama: PreTrainedModel, added: dict[int, float], do_sample: bool, kind: str
) -> None:
    options: dict[str, Any] = {"input_ids": IDS, "logits_processor": [Adding(added)]}
    if kind == "transformers' own":  # it treats every row by itself, so that a batch is drafted for
        options = {**INPUTS["ragged"], "sequence_bias": {(token,): value for token, value in added.items()}}
    options |= {"do_sample": do_sample, "max_new_tokens": 9, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(3)
    try:
        expected = looping_llama.generate(**options)
    except RuntimeError:  # of torch.multinomial
        assert do_sample
        with pytest.raises(LogitsError, match=f"new token {4 if 'logits_processor' in options else 1} of row 0"):
            looping_llama.generate(**options, custom_generate=lookahead.decode)
        return
    torch.manual_seed(3)
    got = looping_llama.generate(**options, custom_generate=lookahead.decode)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.scores, expected.scores, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_a_beginning_that_is_forced_stands_behind_a_prompt_of_one_token(
    looping_llama: PreTrainedModel, foretell: Foretell
) -> None:
    for options in ({}, {"input_ids": torch.tensor([[5], [9]])}):
        expected, got = both(looping_llama, foretell, **options, forced_bos_token_id=41, max_new_tokens=9)
        assert torch.equal(got, expected)
        assert (got[:, 1] == 41).all()


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_many_options_together_change_ours_alike(
    looping_llama: PreTrainedModel, foretell: Foretell, accepted: list[int], inputs: dict[str, Any], do_sample: bool
) -> None:
    options = {**inputs, **MANY, "do_sample": do_sample, "max_new_tokens": 40}
    if len(inputs["input_ids"]) > 1:  # there ours drafts only beside processors of transformers' own
        options = {name: value for name, value in options.items() if not is_foreign({**inputs, name: value})}
    expected, got = both(looping_llama, foretell, **options)
    assert torch.equal(got, expected)
    assert sum(accepted) > 0


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
def test_options_that_know_the_row_see_every_returned_sequence_as_a_row(
    looping_llama: PreTrainedModel, foretell: Foretell, inputs: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        **inputs,
        "do_sample": True,
        "temperature": 2.0,
        "num_return_sequences": 3,
        "max_new_tokens": 20,
        "encoder_repetition_penalty": 1.5,
    }
    for own in ({}, {"prefix_allowed_tokens_fn": allowed, "logits_processor": [Leaning()]}):
        expected, got = both(looping_llama, lambda *_: None, **options, **own)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_scores_logits_and_the_cache_come_out_as_they_would_have(
    looping_llama: PreTrainedModel, foretell: Foretell, accepted: list[int], do_sample: bool
) -> None:
    expected, got = both(
        looping_llama,
        foretell,
        input_ids=IDS,
        do_sample=do_sample,
        max_new_tokens=20,
        repetition_penalty=1.2,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    assert sum(accepted) > 0
    assert type(got) is type(expected)
    assert got.keys() == expected.keys()
    for name in ("scores", "logits"):
        assert [x.shape for x in got[name]] == [(1, 101)] * 20
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(expected[name]), rtol=1e-5, atol=1e-5)
    assert got[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
    for ours, theirs in zip(got[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", ["as an argument", "as the model's own", "with arguments beside it"])
def test_a_configuration_loaded_from_a_file_rules_ours_alike(
    looping_llama: PreTrainedModel,
    foretell: Foretell,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    given: str,
) -> None:
    options = {"do_sample": True, "temperature": 2.0, "top_k": 30, "repetition_penalty": 1.1, "max_new_tokens": 25}
    GenerationConfig(**options, **ENDING).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    arguments: dict[str, Any] = {"generation_config": config}
    if given == "as the model's own":
        monkeypatch.setattr(looping_llama, "generation_config", config)
        arguments = {}
    elif given == "with arguments beside it":
        arguments["top_k"] = 2
    before = config.to_dict()
    expected, got = both(looping_llama, foretell, **INPUTS["ragged"], **arguments)
    assert torch.equal(got, expected)
    assert config.to_dict() == before
    torch.manual_seed(3)
    assert not torch.equal(got, looping_llama.generate(**INPUTS["ragged"], max_new_tokens=25, do_sample=False))
