"""A model in training mode, as loops of reinforcement learning call it: served unless its passes are random."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from tests.support.families import FAMILIES, build

IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])
GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return build(FAMILIES["Llama"])


def decode(model: Any, **options: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(IDS, **GREEDY, **options, custom_generate=lookahead.decode)
    return tokens


def test_a_model_in_training_mode_is_served_unless_its_passes_are_random(model: PreTrainedModel) -> None:
    expected = model.generate(IDS, **GREEDY)
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(decode(model), expected)
    cast(Any, model).model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
    torch.manual_seed(1)
    expected = model.generate(IDS, **GREEDY)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="training mode, and its passes draw random numbers"):
        assert torch.equal(decode(model), expected)


def test_gradient_checkpointing_is_served_where_generate_has_no_cache_either(
    model: PreTrainedModel,
) -> None:
    expected = model.generate(IDS, **GREEDY)
    model.train()
    cast(Any, model).gradient_checkpointing_enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(decode(model, use_cache=False), expected)
    without_context = model.generate(IDS, **GREEDY)  # its layers drop the cache
    with pytest.warns(UserWarning, match="use_cache=False"):
        assert torch.equal(decode(model), without_context)
    assert all(each.gradient_checkpointing for each in cast(Any, model).model.layers)


@pytest.mark.parametrize("name", ["Gemma2", "GPT2", "Mixtral", "OPT"])
def test_other_families_say_the_same_in_training_mode(name: str) -> None:
    model = build(FAMILIES[name]).train()
    torch.manual_seed(1)
    expected = cast(Any, model).generate(IDS, **GREEDY)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2 has dropout
        assert torch.equal(decode(model), expected)


def test_gradients_of_scores_are_recorded_for_who_asks_for_them(model: PreTrainedModel) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    generate = cast(Any, type(model).generate).__wrapped__
    expected = generate(model, IDS, **options)
    with pytest.warns(UserWarning, match="gradients are recorded"):
        got = generate(model, IDS, **options, custom_generate=lookahead.decode)
    assert torch.equal(got.sequences, expected.sequences)
    assert got.logits[3].requires_grad and expected.logits[3].requires_grad
