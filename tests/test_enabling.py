"""The switch: third-party code that calls `model.generate` gains, and the model is left as it was."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel, TextGenerationPipeline

import lookahead
from lookahead import LookaheadConfig
from lookahead.decoding.enable import Generate
from lookahead.engine.engine import Engine

enable_module = import_module("lookahead.decoding.enable")
IDS = torch.tensor([[5, 9, 31, 77, 5, 9, 31, 2, 60, 5, 9, 31]])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps of our engine, to tell whether it was at work."""
    counted: list[int] = []
    step = Engine.step

    def counting(self: Engine) -> Any:
        counted.append(1)
        return step(self)

    monkeypatch.setattr(Engine, "step", counting)
    return counted


def as_it_was(model: PreTrainedModel) -> bool:
    return "generate" not in model.__dict__ and model.config._attn_implementation == "sdpa"


def test_generate_gives_the_same_tokens_while_the_switch_is_on(tiny_llama: PreTrainedModel, steps: list[int]) -> None:
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 20}):
        torch.manual_seed(2)
        expected = tiny_llama.generate(IDS, max_new_tokens=30, **options)
        assert not steps
        torch.manual_seed(2)
        with lookahead.enable(tiny_llama):
            got = tiny_llama.generate(IDS, max_new_tokens=30, **options)
        assert torch.equal(got, expected)
        assert steps
        steps.clear()
    assert as_it_was(tiny_llama)


def test_a_pipeline_gains_without_knowing(tiny_llama: PreTrainedModel, tiny_tokenizer: Any, steps: list[int]) -> None:
    pipeline = TextGenerationPipeline(model=tiny_llama, tokenizer=tiny_tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False}
    expected = pipeline("the cat sat on the cat", **options)
    assert not steps
    with lookahead.enable(tiny_llama):
        assert pipeline("the cat sat on the cat", **options) == expected
    assert steps


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_nested_switches_may_end_in_any_order(tiny_llama: PreTrainedModel, steps: list[int], order: str) -> None:
    outer = lookahead.enable(tiny_llama)
    inner = lookahead.enable(tiny_llama, LookaheadConfig(proposers=()))
    first, last = (inner, outer) if order == "inner first" else (outer, inner)
    first.disable()
    first.disable()  # a second time does nothing
    tiny_llama.generate(IDS, max_new_tokens=3, do_sample=False)
    assert steps
    last.disable()
    assert as_it_was(tiny_llama)


def test_a_copy_of_a_model_is_not_switched_on_with_it(tiny_llama: PreTrainedModel, steps: list[int]) -> None:
    model = type(tiny_llama)(tiny_llama.config).eval()  # no test has left a hook on it, which cannot be pickled
    with lookahead.enable(model):
        deep, shallow = copy.deepcopy(model), copy.copy(model)
        pickled = pickle.loads(pickle.dumps(model))  # our own bytes
        with torch.no_grad():
            deep.lm_head.weight.neg_()
        assert not torch.equal(deep.generate(IDS, max_new_tokens=4), model.generate(IDS, max_new_tokens=4))
        steps.clear()
        for copied in (deep, pickled):
            copied.generate(IDS, max_new_tokens=4, do_sample=False)
    shallow.generate(IDS, max_new_tokens=4, do_sample=False)
    assert not steps
    assert as_it_was(model)


def test_a_shallow_copy_made_under_a_switch_gets_one_of_its_own(tiny_llama: PreTrainedModel, steps: list[int]) -> None:
    with lookahead.enable(tiny_llama):
        shallow = copy.copy(tiny_llama)
        shallow.generation_config = GenerationConfig(max_new_tokens=4, do_sample=False)
        with lookahead.enable(shallow):
            assert shallow.generate(IDS).shape[1] == IDS.shape[1] + 4
            assert steps
        assert as_it_was(shallow)
        assert not as_it_was(tiny_llama)
    assert as_it_was(tiny_llama)


def test_an_exception_leaves_the_model_as_it_was(tiny_llama: PreTrainedModel) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a user's processor failed")

    with pytest.raises(RuntimeError, match="user's processor"), lookahead.enable(tiny_llama):
        tiny_llama.generate(IDS, max_new_tokens=3, logits_processor=[broken])
    assert as_it_was(tiny_llama)
    tiny_llama.generate(IDS, max_new_tokens=3, do_sample=False)


def test_a_generate_of_the_models_own_is_put_back(tiny_llama: PreTrainedModel) -> None:
    own = tiny_llama.generate
    tiny_llama.generate = own  # type: ignore[method-assign]
    try:
        with lookahead.enable(tiny_llama):
            assert tiny_llama.generate is not own
        assert tiny_llama.__dict__["generate"] is own
    finally:
        del tiny_llama.generate


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3, "eos_token_id": 100},  # old releases look nothing up without an end token
        {"output_hidden_states": True, "return_dict_in_generate": True},
    ],
    ids=["lookup", "states"],
)
def test_what_has_no_speculative_form_goes_to_transformers_with_a_warning(
    tiny_llama: PreTrainedModel, steps: list[int], options: dict[str, Any]
) -> None:
    expected = tiny_llama.generate(IDS, max_new_tokens=5, do_sample=False, **options)
    with lookahead.enable(tiny_llama), pytest.warns(UserWarning, match="transformers alone"):
        got = tiny_llama.generate(IDS, max_new_tokens=5, do_sample=False, **options)
    assert torch.equal(getattr(got, "sequences", got), getattr(expected, "sequences", expected))
    assert not steps


def test_threads_that_share_a_model_get_the_tokens_of_generate(tiny_llama: PreTrainedModel) -> None:
    prompts = [torch.tensor([[5 + i, 9, 31, 77, 5 + i, 9]]) for i in range(4)]
    expected = [tiny_llama.generate(ids, max_new_tokens=40, do_sample=False) for ids in prompts]
    got: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        got[i] = tiny_llama.generate(prompts[i], max_new_tokens=40, do_sample=False, custom_generate=lookahead.decode)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], expected[i]) for i in range(4))
    assert as_it_was(tiny_llama)


def test_threads_that_turn_switches_on_together_leave_the_model_as_it_was(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = threading.Barrier(2)

    class Meeting(Generate):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            with suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)  # for a thread that makes another one for the same model

    monkeypatch.setattr(enable_module, "Generate", Meeting)
    with ThreadPoolExecutor(2) as threads:
        switches = list(threads.map(lambda _: lookahead.enable(tiny_llama), range(2)))
        list(threads.map(lambda switch: switch.disable(), switches))
    assert as_it_was(tiny_llama)


def test_between_two_pieces_of_a_stream_the_model_is_as_it_was(
    tiny_llama: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    pieces = lookahead.stream(tiny_llama, tiny_tokenizer, "the cat sat", max_new_tokens=40, do_sample=False)
    first = next(pieces)
    assert as_it_was(tiny_llama)
    other = tiny_llama.generate(IDS, max_new_tokens=5, do_sample=False)
    assert torch.equal(other, tiny_llama.generate(IDS, max_new_tokens=5, do_sample=False))
    whole = lookahead.generate(tiny_llama, tiny_tokenizer, "the cat sat", max_new_tokens=40, do_sample=False).texts[0]
    assert first + "".join(pieces) == whole


def test_no_warning_is_shown_for_an_ordinary_call(tiny_llama: PreTrainedModel) -> None:
    with warnings.catch_warnings(), lookahead.enable(tiny_llama):
        warnings.simplefilter("error")
        tiny_llama.generate(IDS, max_new_tokens=3, do_sample=False)


def test_a_switch_shows_its_model_and_whether_it_is_on(tiny_llama):
    with lookahead.enable(tiny_llama, LookaheadConfig(max_nodes=7)) as switch:
        assert repr(switch).startswith("<lookahead on for LlamaForCausalLM") and "max_nodes=7" in repr(switch)
    assert repr(switch).startswith("<lookahead off for LlamaForCausalLM")
