"""What processors and stopping criteria write into ids and change of the model during a call is heeded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

import lookahead
from lookahead import LookaheadConfig
from tests.support.small_layers import HALF, PACKED, SINGLE, made
from tests.support.stateful_code import steered
from tests.test_user_code import IDS, NEW, OURS, tokens


def edit_of_the_ids(at: int) -> Callable[..., Any]:
    def edit(input_ids: Tensor, scores: Tensor, **_: Any) -> Any:
        if input_ids.shape[1] in (14, 18):
            input_ids[:, at] = 11
        return scores

    return edit


@pytest.mark.parametrize("at", [-1, -3, 2])
@pytest.mark.parametrize("where", ["processor", "criterion"])
def test_ids_that_a_processor_or_criterion_writes_are_those_of_generate(where, at, tiny_tokenizer):
    model = made("llama", SINGLE)

    def options() -> dict[str, Any]:
        edit = edit_of_the_ids(at)
        if where == "processor":
            return {"logits_processor": [edit], "repetition_penalty": 1.5}  # which reads the ids
        never = torch.zeros(1, dtype=torch.bool)
        return {
            "stopping_criteria": [lambda ids, scores, **_: (edit(ids, scores), never)[1]],
            "repetition_penalty": 1.5,
        }

    answers = tokens(model, **options())
    assert 11 in answers[0]
    assert tokens(model, **options(), **OURS) == answers
    result = lookahead.generate(model, tiny_tokenizer, IDS, max_new_tokens=NEW, do_sample=False, **options())
    assert result.token_ids[0] == answers[0][IDS.shape[1] :]


DURING: dict[str, Callable[[Any], Any]] = {
    "a hook on the head": lambda model: model.lm_head.register_forward_hook(lambda module, args, out: steered(out)),
    "a hook on a product": lambda model: down(model).register_forward_hook(lambda module, args, out: out * 1.5),
    "a hook on all modules": lambda model: register_module_forward_hook(
        lambda module, args, out: out * 1.5 if module is down(model) else None
    ),
    "a weight": lambda model: down(model).weight.data.mul_(-1),
    "an activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", torch.nn.Tanh()),
    "a forward": lambda model: setattr(down(model), "forward", lambda x: torch.nn.Linear.forward(down(model), x) * 2),
    "a scale": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.5),
}


def down(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj


@functools.cache
def unchanged(dtype: torch.dtype) -> list[list[int]]:
    return tokens(made("llama", dtype, **PACKED))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("change", DURING)
def test_a_change_of_the_model_during_a_call_is_heeded_from_the_next_pass_on(change, where, dtype):
    answers = []
    plainly = {**OURS, "lookahead_config": LookaheadConfig(proposers=())}
    for options in ({}, plainly, {**OURS, "lookahead_prediction": []}):
        model, handles = made("llama", dtype, **PACKED), list[Any]()
        if "lookahead_prediction" in options:
            options["lookahead_prediction"] = answers[0][0][IDS.shape[1] :]

        def changing(input_ids: Tensor, scores: Tensor, model: Any = model, handles: list[Any] = handles) -> Any:
            if input_ids.shape[1] == IDS.shape[1] + 3 and not handles:
                handles.append(DURING[change](model))
            return scores if where == "logits_processor" else torch.zeros(1, dtype=torch.bool)

        answers.append(tokens(model, **{where: [changing]}, **options))
        for handle in handles:
            if hasattr(handle, "remove"):
                handle.remove()
    # A pass that was made before the change may give several tokens with drafts.
    assert answers[0] == answers[1] != unchanged(dtype) != answers[2]


def test_a_processor_may_keep_the_ids_and_compute_gradients():
    class Keeping:
        first: Any = None

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if self.first is None:
                self.first = input_ids
            elif input_ids.shape[1] == 15:
                self.first.fill_(7)  # a tensor of an earlier step
            with torch.enable_grad():
                leaf = scores.clone().requires_grad_()
                leaf.logsumexp(-1).sum().backward()
            assert leaf.grad is not None
            return scores + leaf.grad

    model = made("llama", SINGLE)
    ids = IDS.clone()  # which `generate` gives to the first call
    answers = tokens(model, input_ids=ids.clone(), logits_processor=[Keeping()], repetition_penalty=1.3)
    assert (
        tokens(model, input_ids=ids, logits_processor=[Keeping()], repetition_penalty=1.3, **OURS)[0][11:]
        == answers[0][11:]
    )
