"""A user's own code runs as `generate` runs it: what it emits is emitted, and it sees the calls that it would see."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune
from transformers import DynamicCache, LlamaForCausalLM

import lookahead
from lookahead import LookaheadConfig
from lookahead.backend.support import support_of
from lookahead.model.facts import CACHE
from lookahead.model.known_code import is_known, users_code
from tests.support.small_layers import HALF, PACKED, SINGLE, made
from tests.support.stateful_code import PLACES, STATES, Seen, recorded, steered

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]])
NEW = 20
OURS: dict[str, Any] = {"custom_generate": lookahead.decode}
TRUSTED = LookaheadConfig(trust_user_code=True, draft="fixed")


def tokens(model: Any, **options: Any) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: list[list[int]] = model.generate(
            **{"input_ids": IDS, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, **options}
        ).tolist()
    return found


def outcome(model: Any, place: str, state: str, **options: Any) -> tuple[list[list[int]], Seen]:
    """The tokens of a call, and what a new object of a user's saw of it."""
    seen: Seen = []
    with PLACES[place](model, recorded(STATES[state](), seen)):
        return tokens(model, **options), seen


USES = {f"{place} of a {age} model": (place, age == "warm") for place in PLACES for age in ("fresh", "warm")}


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_predicted", [False, True], ids=["unpredicted", "predicted"])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("where", USES)
@pytest.mark.parametrize("state", STATES)
def test_code_with_a_state_says_and_sees_what_it_does_in_generate(state, where, dtype, is_predicted):
    place, is_warm = USES[where]
    model = made("llama", dtype, **PACKED)
    if is_warm:
        assert tokens(model, **OURS) == tokens(model)
    answers, seen = outcome(model, place, state)
    options = {**OURS, "lookahead_prediction": answers[0][IDS.shape[1] :]} if is_predicted else OURS
    assert outcome(model, place, state, **options) == (answers, seen)
    assert seen


@pytest.mark.parametrize("place", PLACES)
def test_one_warning_names_the_code_its_place_and_the_way_on(place):
    model = made("llama", SINGLE)
    with PLACES[place](model, steered), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.generate(IDS, max_new_tokens=4, do_sample=False, **OURS)
        where = users_code(model)
    assert len(told) == 1
    assert where in str(told[0].message)
    assert "trust_user_code=True" in str(told[0].message)
    assert not users_code(model)


@pytest.mark.parametrize("how", ["stream", "stream_many", "enable", "beams", "sampled", "ragged", "report"])
def test_every_way_to_decode_runs_a_users_code_as_transformers_does(how, tiny_tokenizer):
    def run(model: Any, *, is_ours: bool) -> Any:
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        if how == "sampled":
            torch.manual_seed(3)
            options |= {"do_sample": True}
        if how == "beams":
            options |= {"num_beams": 2}
        prompt: dict[str, Any] = {"input_ids": IDS}
        if how == "ragged":
            ids = torch.cat([IDS, torch.cat([torch.zeros(1, 4, dtype=torch.long), IDS[:, 4:]], 1)])
            prompt = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        if not is_ours:
            return model.generate(**prompt, **options)[:, IDS.shape[1] :].tolist()
        if how == "enable":
            with lookahead.enable(model):
                return model.generate(**prompt, **options)[:, IDS.shape[1] :].tolist()
        if how == "report":
            assert "transformers" in str(lookahead.backend_report(model))
        if how == "stream":
            stream = lookahead.stream(model, tiny_tokenizer, IDS, **options)
            list(stream)
            return [stream.token_ids]
        if how == "stream_many":
            return [
                done.token_ids for done in lookahead.stream_many(model, tiny_tokenizer, [IDS[0].tolist()], **options)
            ]
        return model.generate(**prompt, **options, **OURS)[:, IDS.shape[1] :].tolist()

    results = []
    for is_ours in (False, True):
        model, seen = made("llama", SINGLE), list[Any]()
        edit = recorded(STATES["a flag after nine calls"](), seen)
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out, edit=edit: edit(out))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append((run(model, is_ours=is_ours), seen))
    assert results[0] == results[1]


def _hooked(edit: Callable[[Tensor], Any]) -> Any:
    model = made("llama", SINGLE, **PACKED)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: edit(out))
    return model


def test_trusted_code_that_treats_tokens_alike_is_drafted_for():
    seen: Seen = []
    model = _hooked(recorded(steered, seen))
    answers = tokens(model)
    predicted = {"lookahead_config": TRUSTED, "lookahead_prediction": answers[0][IDS.shape[1] :]}
    tokens(model, **OURS, **predicted)  # compared
    seen.clear()
    assert tokens(model, **OURS, **predicted) == answers
    assert 0 < len(seen) < NEW / 2


def test_trusted_code_that_looks_at_other_tokens_is_found_by_the_comparison():
    model = _hooked(lambda out: out + 4 * out.mean(1, keepdim=True))
    answers = tokens(model)
    with pytest.warns(UserWarning, match="decoded plainly"):
        got = model.generate(IDS, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **OURS, lookahead_config=TRUSTED)
    assert got.tolist() == answers


def test_trust_is_asked_for_at_every_call():
    model, seen = None, list[Any]()
    model = _hooked(recorded(steered, seen))
    tokens(model, **OURS, lookahead_config=TRUSTED)
    seen.clear()
    tokens(model, **OURS)
    assert len(seen) == NEW


def test_a_configuration_without_demands_never_makes_plain_decoding_an_error():
    model = _hooked(steered)
    answers = tokens(model)
    for options in ({"max_nodes": 8}, {"memory": "request"}, {"draft": "fixed"}, {"window": "auto"}, {}):
        assert tokens(model, **OURS, lookahead_config=LookaheadConfig(**options)) == answers
    with pytest.raises(lookahead.UnsupportedModelError, match="window=7"):
        tokens(model, **OURS, lookahead_config=LookaheadConfig(window=7))


def test_hooks_of_the_known_libraries_are_known():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = made("llama", SINGLE)
    add_hook_to_module(model.model.layers[0], ModelHook())
    assert not users_code(model)

    class Own(ModelHook):
        pass

    add_hook_to_module(model.model.layers[0], Own())
    assert "Own" in users_code(model)


@pytest.mark.parametrize("wrap", [functools.partial, functools.lru_cache, functools.wraps(LlamaForCausalLM.forward)])
def test_a_function_wrapped_by_a_library_stays_the_users(wrap):
    def own(*args: Any) -> None:
        return None

    assert not is_known(wrap(own))
    assert not is_known(functools.partial(torch.nn.functional.silu, own))
    assert is_known(torch.nn.functional.silu) and is_known(LlamaForCausalLM.forward)


def test_a_mode_of_torch_that_a_user_enters_sees_the_operations_of_generate():
    from torch.overrides import TorchFunctionMode

    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.products = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += function is torch.nn.functional.linear
            return function(*args, **(kwargs or {}))

    model, counts = made("llama", SINGLE, **PACKED), []
    tokens(model, **OURS)
    for options in ({}, OURS):
        with Counting() as mode:
            tokens(model, **options)
        counts.append(mode.products)
    assert counts[0] == counts[1]


def test_one_call_for_many_prompts_warns_once(tiny_tokenizer):
    model = _hooked(steered)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        list(lookahead.stream_many(model, tiny_tokenizer, [IDS[0].tolist()] * 3, max_new_tokens=4))
    assert len([each for each in told if "is your own code" in str(each.message)]) == 1


def test_inputs_of_a_users_class_see_what_generate_does_with_them():
    class Counting(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += function is torch.nn.functional.embedding
            return super().__torch_function__(function, types, args, kwargs or {})

    counts = []
    for options in ({}, OURS):
        model, Counting.calls = made("llama", SINGLE), 0
        tokens(model, input_ids=IDS.as_subclass(Counting), **options)
        counts.append(Counting.calls)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("hook", [print, [].append, {}.__setitem__], ids=["print", "append", "setitem"])
def test_a_builtin_function_as_a_hook_is_the_users_choice(hook):
    model = made("llama", SINGLE)
    model.model.layers[1].mlp.register_forward_pre_hook(hook)
    assert "a hook on model.layers.1.mlp" in users_code(model)


def test_adapters_of_peft_and_layers_of_torch_are_known(looping_llama):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "up_proj"])
    assert not users_code(peft.get_peft_model(copy.deepcopy(looping_llama), config))
    model = made("llama", SINGLE)
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.down_proj)
    prune.random_unstructured(model.model.layers[0].mlp.up_proj, "weight", 0.5)
    assert not users_code(model)
    model.model.layers[0].mlp = torch.jit.trace(model.model.layers[0].mlp, torch.randn(1, 3, 72))
    assert tokens(model, **OURS) == tokens(model)


@pytest.mark.parametrize("how", ["class", "partial", "object"])
def test_a_cache_with_an_update_of_its_own_is_filled_by_it(how):
    def larger(own: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(keys, values * 1.3, *args, **kwargs)

    class Larger(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            return larger(super().update, *args, **kwargs)

    class Update:
        def __init__(self, own: Any) -> None:
            self.own = own

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return larger(self.own, *args, **kwargs)

    def cache() -> DynamicCache:
        past: Any = Larger(config=model.config) if how == "class" else DynamicCache(config=model.config)
        if how != "class":
            past.update = functools.partial(larger, past.update) if how == "partial" else Update(past.update)
        return past

    model = made("llama", SINGLE)
    answers = tokens(model, **{CACHE: cache()})
    assert tokens(model, **OURS, **{CACHE: cache()}) == answers != tokens(model)


def test_a_model_class_of_a_users_is_drafted_for_once_it_is_trusted():
    class Handing(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = made("llama", HALF)
    model.__class__ = Handing
    assert support_of(model, shortest=4, max_length=30).shape == "none"
    assert support_of(model, shortest=4, max_length=30, trusted=True).shape == "trees"
    assert tokens(model, **OURS, lookahead_config=TRUSTED) == tokens(model)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_change_between_pieces_of_a_stream_is_heard_and_stays(dtype, tiny_tokenizer):
    model = made("llama", dtype, **PACKED)
    mlp = model.model.layers[1].mlp.down_proj
    stream = lookahead.stream(model, tiny_tokenizer, IDS, max_new_tokens=8)
    next(stream)

    def doubled(self: Any, x: Tensor) -> Tensor:
        return 2 * type(self).forward(self, x)

    own = mlp.forward = MethodType(doubled, mlp)
    assert len([*stream]) > 0
    assert vars(mlp)["forward"] is own
    del mlp.forward
    assert stream.token_ids != tokens(model, max_new_tokens=8)[0][IDS.shape[1] :]


def test_the_first_use_of_a_model_leaves_nothing_behind():
    model = made("llama", SINGLE)
    buffers = {name: (each, each.clone(), each._version) for name, each in model.named_buffers()}
    torch.manual_seed(5)
    support_of(model, shortest=4, max_length=30)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    for name, each in model.named_buffers():
        assert each is buffers[name][0] and torch.equal(each, buffers[name][1])


def test_changes_of_one_model_leave_a_copy_alone():
    model = made("llama", SINGLE, **PACKED)
    twin = copy.deepcopy(model)
    with PLACES["a hook on the head"](model, steered):
        assert tokens(twin, **OURS) == tokens(twin) != tokens(model)


def test_a_model_that_a_user_changed_is_freed_with_its_verdicts():
    model = made("llama", SINGLE)
    model.model.layers[1].mlp.forward = functools.partial(
        type(model.model.layers[1].mlp).forward, model.model.layers[1].mlp
    )
    model.model.layers[0].register_forward_hook(lambda module, args, out, of=model: None)
    assert tokens(model, **OURS) == tokens(model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
