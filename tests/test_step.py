"""A decode step stays small: how much of this package one step of one prompt runs, and what a call enters before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.kernels import packed_product
from lookahead.model.model_state import LearnedState, use_learned
from tests.support.adversarial_proposers import drafting_by, perfect
from tests.support.engines import engine_of
from tests.support.products import kept_choice
from tests.support.simulated_devices import on_device
from tests.support.small_layers import SINGLE, made

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / name) for name in ("lookahead", "ngram", "kernels"))
# Functions and files of a step whose pass is one call of the kernels, and of one by fused layers and attention.
ONE_CALL, BY_LAYERS = (41, 18), (87, 25)
DECIDING = 22, 4  # what comes on top where measured costs decide: controller, budget, cost model, sizes of trees
ENTERED = 57  # files from the call of `stream` to its first text, that step included
IDS = [5, 9, 31, 77] * 10


@contextmanager
def noting(ran: set[tuple[str, str]]) -> Iterator[None]:
    """Note the functions of this package that run in a block, by file and name."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS) and not code.co_name.startswith("<"):
            ran.add((code.co_filename, code.co_name))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def packable() -> Any:
    """A small model whose weights are large enough to be packed."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4}
    return made(dtype=SINGLE, **sizes, head_dim=32, vocab_size=256)


@pytest.fixture(params=["one call", "by layers"])
def model_of(request: Any, tiny_llama: Any, own_cache_folder: Path) -> Iterator[tuple[Any, tuple[int, int]]]:
    """A model, and the functions and files that a step of it may run."""
    if request.param == "by layers":
        yield tiny_llama, BY_LAYERS
        return
    if not packed_product.is_supported(torch.zeros(2, 64)):
        pytest.skip("there is no kernel for products on this CPU")
    with kept_choice(own_cache_folder, "packed"):
        yield packable(), ONE_CALL


@pytest.mark.parametrize("draft", ["fixed", "auto"])
def test_a_step_runs_few_functions_of_few_files(model_of: tuple[Any, tuple[int, int]], draft: Any) -> None:
    model, (functions, files) = model_of
    config, decides = LookaheadConfig(draft=draft), draft == "auto"
    options = {"max_new_tokens": 80, "do_sample": False, "lookahead_config": config}
    ids = torch.tensor([IDS])
    deepcopy(model).generate(ids, custom_generate=lookahead.decode, **options)  # compiles what steps call
    ran, most, drafted = set[tuple[str, str]](), set[tuple[str, str]](), 0
    device = on_device(lambda nodes: 1.0 + 0.01 * nodes) if decides else nullcontext()  # where drafts pay
    with device, use_learned(model, LearnedState()):
        engine = engine_of(model, ids, **options)
        with engine.serving(is_alone=True):
            steps = engine.run()
            for _ in range(3):  # the prefill, and what steps do once
                next(steps)
            for _ in range(20):
                ran.clear()
                with noting(ran):
                    outputs = engine.step()
                drafted = max(drafted, len(outputs[0].draft.tree.tokens))
                most = max(most, ran, key=len).copy()
    assert drafted > 1
    assert len(most) <= functions + decides * DECIDING[0], sorted(most)
    entered = {file for file, _ in most}
    assert len(entered) <= files + decides * DECIDING[1], sorted(entered)


@pytest.mark.parametrize("width", [1, 2, 17, 63])
def test_a_step_emits_the_whole_of_a_draft_that_is_right_and_one_token_more(tiny_llama: Any, width: int) -> None:
    ids = torch.tensor([IDS])
    options = {"max_new_tokens": 2 + width, "do_sample": False}
    answer = tiny_llama.generate(ids, **options)[0].tolist()
    config = LookaheadConfig(draft="fixed", max_nodes=width)
    with drafting_by(perfect([answer])):
        steps = list(engine_of(tiny_llama, ids, **options, lookahead_config=config).run())
    assert [step[0].tokens.tolist() for step in steps] == [answer[len(IDS) : len(IDS) + 1], answer[len(IDS) + 1 :]]


@pytest.mark.parametrize("which", [1, 2, -1])
def test_a_draft_ends_where_the_output_does(tiny_llama: Any, which: int) -> None:
    ids, options = torch.tensor([IDS]), {"max_new_tokens": 20, "do_sample": False}
    answer = tiny_llama.generate(ids, **options)[0].tolist()
    end = list(dict.fromkeys(answer[len(IDS) :]))[which]
    options |= {"max_new_tokens": 30, "eos_token_id": [10**12, end]}  # the first is not even a number of 32 bits
    expected = tiny_llama.generate(ids, **options)[0].tolist()
    config = LookaheadConfig(draft="fixed", max_nodes=20)
    with drafting_by(perfect([answer])):
        _, (drafted,) = engine_of(tiny_llama, ids, **options, lookahead_config=config).run()
    assert drafted.tokens.tolist() == expected[len(IDS) + 1 :] and drafted.draft is not None
    assert drafted.draft.tree.tokens.tolist() == expected[len(IDS) :]


def test_a_call_enters_few_files_before_its_first_text(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    stream: Callable[[list[int]], Iterator[str]] = lambda ids: lookahead.stream(  # noqa: E731
        tiny_llama, tiny_tokenizer, ids, max_new_tokens=80, do_sample=False
    )
    list(stream(IDS))  # probes the model
    ran = set[tuple[str, str]]()
    with noting(ran):
        next(stream([*IDS, *IDS[:4]]))
    entered = {file.removeprefix(str(ROOT)) for file, _ in ran}
    assert len(entered) <= ENTERED, sorted(entered)
