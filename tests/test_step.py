"""A decode step stays small: how much of this package one step of one prompt runs."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lookahead
from lookahead import LookaheadConfig
from lookahead.hf.model_state import LearnedState, use_learned
from tests.support.engines import engine_of
from tests.support.simulated_devices import on_device

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / name) for name in ("lookahead", "ngram", "kernels"))
# 14 of the functions, in 5 of the files, are fused layers of a CPU, which the model calls.
MAX_FUNCTIONS, MAX_FILES = 60, 18
# Where measured costs decide there are also the controller, the budget, the cost model, and the size of a tree.
MAX_DECIDING_FUNCTIONS, MAX_DECIDING_FILES = 23, 4


@pytest.mark.parametrize("draft", ["fixed", "auto"])
def test_a_step_runs_few_functions_of_few_files(tiny_llama, draft) -> None:
    ids = torch.tensor([[5, 9, 31, 77] * 10])
    config, decides = LookaheadConfig(draft=draft), draft == "auto"
    options = {"max_new_tokens": 80, "do_sample": False, "lookahead_config": config}
    deepcopy(tiny_llama).generate(ids, custom_generate=lookahead.decode, **options)  # compiles what steps call
    ran: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS) and not code.co_name.startswith("<"):
            ran.add((code.co_filename, code.co_name))

    most: set[tuple[str, str]] = set()
    drafted = 0
    device = on_device(lambda nodes: 1.0 + 0.01 * nodes) if decides else nullcontext()  # where drafts pay
    with device, use_learned(tiny_llama, LearnedState()):
        engine = engine_of(tiny_llama, ids, **options)
        with engine.serving():
            steps = engine.run()
            for _ in range(3):  # the prefill, and what steps do once
                next(steps)
            for _ in range(20):
                ran.clear()
                sys.setprofile(note)
                try:
                    outputs = engine.step()
                finally:
                    sys.setprofile(None)
                drafted = max(drafted, len(outputs[0].draft.tree))
                most = max(most, ran, key=len).copy()
    assert drafted > 1
    assert len(most) <= MAX_FUNCTIONS + decides * MAX_DECIDING_FUNCTIONS, sorted(most)
    assert len({file for file, _ in most}) <= MAX_FILES + decides * MAX_DECIDING_FILES
