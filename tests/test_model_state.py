"""What is remembered of a model belongs to its weights and its vocabulary."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.model.model_state import LearnedState, recognise, state_of, use_learned
from tests.support.small_layers import serving


class Source:
    """Owns what it keeps of a model."""


def test_a_model_has_one_state_and_a_copy_of_it_another(tiny_llama: PreTrainedModel) -> None:
    state = state_of(tiny_llama)
    assert state_of(tiny_llama) is state
    assert state_of(copy.deepcopy(tiny_llama)) is not state


def test_another_vocabulary_begins_a_new_state(tiny_llama: PreTrainedModel) -> None:
    model = copy.deepcopy(tiny_llama)
    recognise(model)
    before = state_of(model)
    model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False)
    recognise(model)
    assert state_of(model) is not before


def test_a_probe_is_asked_again_once_a_weight_changed_and_what_was_learned_stays(tiny_llama: PreTrainedModel) -> None:
    model, answers = copy.deepcopy(tiny_llama), iter("ab")
    learned = state_of(model).learned
    found = [state_of(model).probed("letter", model, lambda: next(answers)) for _ in range(2)]
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    recognise(model)
    found.append(state_of(model).probed("letter", model, lambda: next(answers)))
    assert found == ["a", "a", "b"]
    assert state_of(model).learned is learned


def test_code_that_stands_where_freed_code_stood_has_another_stamp(tiny_llama: PreTrainedModel) -> None:
    model, numbers = copy.deepcopy(tiny_llama), []
    for _ in range(20):
        space: dict[str, Any] = {}
        exec("def forward(x): return x", space)
        model.model.layers[0].mlp.forward = space["forward"]
        numbers.append(recognise(model, trusted=True).stamp.number)
        del space, model.model.layers[0].mlp.forward
    assert len(set(numbers)) == len(numbers)


def test_threads_that_ask_at_once_probe_a_model_once(tiny_llama: PreTrainedModel) -> None:
    model, begin, asked = copy.deepcopy(tiny_llama), Barrier(4), []

    def ask() -> None:
        begin.wait()
        state_of(model).probed("once", model, lambda: asked.append(1) or "known")

    threads = [Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [1]


def test_what_a_source_keeps_of_a_model_goes_with_either(tiny_llama: PreTrainedModel) -> None:
    model, source = copy.deepcopy(tiny_llama), Source()
    kept = [weakref.ref(state_of(model).learned.of(source, Source)) for _ in range(2)]
    assert kept[0]() is kept[1]() is not None
    del source
    gc.collect()
    assert kept[0]() is None
    state = weakref.ref(state_of(model))
    del model
    gc.collect()
    assert state() is None


def test_measurements_learn_apart(tiny_llama: PreTrainedModel) -> None:
    own, other = state_of(tiny_llama).learned, LearnedState()
    with use_learned(tiny_llama, other):
        assert state_of(tiny_llama).learned is other
    assert state_of(tiny_llama).learned is own


def test_a_verdict_stands_while_another_thread_decodes(tiny_llama: PreTrainedModel) -> None:
    model, probes = copy.deepcopy(tiny_llama), list[int]()
    state = state_of(model)

    def probe() -> int:
        probes.append(1)
        return 1

    def found() -> int:
        recognise(model, trusted=True)
        return state.probed("a probe", model, probe)

    found()
    with serving(model), ThreadPoolExecutor(1) as pool:
        pool.submit(found).result()
    assert probes == [1]
    model.model.layers[0].mlp.forward = lambda x: x
    found()
    assert probes == [1, 1]


def test_verdicts_of_a_hook_that_comes_and_goes_are_kept_and_old_ones_are_not():
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    probes: list[int] = []
    state = state_of(model)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation="sdpa"))

    def found() -> int:
        recognise(model, trusted=True)
        return state.probed("letter", model, lambda: probes.append(1) or len(probes))

    for _ in range(3):
        assert found() == 1
        handle = model[0].register_forward_hook(lambda *_: None)
        assert found() == 2
        handle.remove()
    for version in range(3, 7):
        with torch.no_grad():
            model[0].weight += 1
        assert found() == version
    assert len(state.plans) == 4
