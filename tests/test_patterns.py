"""The patterns of transformers' own generation tests, under the switch: what comes out is what comes out without it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead.model.facts import CACHE
from tests.support.families import ENCODER_DECODERS, FAMILIES, build
from tests.support.stateful import DoneTracker, Grammar
from tests.support.vision_models import gemma3, llava

Options = dict[str, Any]
IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31], [0, 0, 0, 41, 42, 41, 42, 41, 42, 41, 42, 41]])
ONE: Options = {"input_ids": IDS[:1]}
TWO: Options = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}
SEEING = {"Llava": llava, "Gemma3": gemma3}
RETURNED: Options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class Shown(BaseStreamer):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def made(name: str) -> PreTrainedModel:
    """The model of a name."""
    if name in SEEING:
        return SEEING[name]()
    return build({**FAMILIES, **ENCODER_DECODERS}[name])


def calls() -> dict[str, Options]:
    """The arguments of `generate`, by what they are for."""
    sampled: Options = {"do_sample": True, "top_k": 20, "temperature": 0.8}
    beams: Options = {"num_beams": 3}
    return {
        "greedy": ONE,
        "greedy, padded": TWO,
        "sampled": {**ONE, **sampled},
        "sampled, padded": {**TWO, **sampled},
        "returned": {**ONE, **RETURNED},
        "returned, padded": {**TWO, **RETURNED, **sampled},
        "states returned": {**ONE, "return_dict_in_generate": True, "output_hidden_states": True},
        "sequences": {**TWO, **sampled, "num_return_sequences": 2},
        "ends": {**TWO, **sampled, "eos_token_id": list(range(20, 50)), "min_new_tokens": 3},
        "processors": {**TWO, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "bad_words_ids": [[31, 9]]},
        "forced": {**ONE, "forced_eos_token_id": 7, "suppress_tokens": [5, 9], "begin_suppress_tokens": [31]},
        "own processor": {**TWO, "logits_processor": [Grammar()]},
        "own criterion": {**TWO, "stopping_criteria": StoppingCriteriaList([DoneTracker([9], 2)])},
        "beams": {**TWO, **beams},
        "beams returned": {**ONE, **beams, **RETURNED, "num_return_sequences": 2},
        "beams sampled": {**ONE, **beams, **sampled},
        "no cache": {**ONE, "use_cache": False},
        "one token": {**TWO, "max_new_tokens": 1},
        "a streamer": {**ONE, "streamer": Shown()},
        "chunks": {**ONE, "prefill_chunk_size": 5},
    }


def outcome(model: PreTrainedModel, options: Options) -> Any:
    """All that a call gives, or the class of its error."""
    options = copy.deepcopy(options)
    torch.manual_seed(5)
    try:
        given = model.generate(**{"max_new_tokens": 10, "pad_token_id": 0, **options})
    except Exception as error:
        return type(error)
    shown = getattr(options.get("streamer"), "tokens", None)
    if isinstance(given, torch.Tensor):
        return given.tolist(), shown
    past = getattr(given, CACHE, None)
    held = int(past.get_seq_length()) if past is not None and not model._is_stateful else None
    return type(given), sorted(given.keys()), given.sequences.tolist(), held, given.get("scores"), given.get("logits")


def assert_same(got: Any, expected: Any, name: str) -> None:
    """Tokens and shapes are the same; scores and logits but for rounding, as far as the rows run."""
    if not (isinstance(expected, tuple) and len(expected) == 6):
        assert got == expected, name
        return
    assert got[:4] == expected[:4], name
    for ours, theirs in zip(got[4:], expected[4:], strict=True):
        assert (ours is None) == (theirs is None), name
        for one, other in zip(ours or (), theirs or (), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT", "CodeGen", "XGLM", "Mamba", "T5", "Bart", "Llava", "Gemma3"])
def test_the_patterns_of_generate_give_under_the_switch_what_they_give_without_it(name: str, half: int) -> None:
    model = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pattern, options in list(calls().items())[half::2]:
            expected = outcome(model, options)
            with lookahead.enable(model):
                assert_same(outcome(model, options), expected, pattern)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT", "CodeGen", "XGLM", "Gemma3"])
def test_a_text_is_gone_on_with_from_its_cache(name: str) -> None:
    model = made(name)

    def twice(inputs: Options) -> list[list[int]]:
        options: Options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "return_dict_in_generate": True}
        first = model.generate(**inputs, **options)
        mask = torch.cat([inputs.get("attention_mask", torch.ones_like(IDS[:1])), torch.ones(len(first[0]), 6)], 1)
        past = first[CACHE]
        whole = model.generate(first.sequences, attention_mask=mask.long(), **{CACHE: past}, **options)
        tokens: list[list[int]] = whole.sequences.tolist()
        return tokens

    for inputs in (ONE, TWO):
        expected = twice(inputs)
        with lookahead.enable(model):
            assert twice(inputs) == expected
