"""`bench.ablation` counts the tokens per pass of each source of drafts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from bench.ablation import config_of, decode_all
from bench.llm_figures import Prompt


def test_an_ablation_starts_every_prompt_from_what_its_memory_file_holds(tiny_llama, tmp_path: Path):
    prompt = Prompt("", torch.randint(0, 100, (1, 30), generator=torch.Generator().manual_seed(0)))
    passes = {
        str(memory): [
            len(output.steps)
            for output in decode_all(tiny_llama, [prompt] * 2, Namespace(max_new_tokens=48, temperature=0.0), config)
        ]
        for memory in ("shared", tmp_path / "none.lkm")
        for config in [config_of("prompt+outputs+recycled", 7, str(memory))]
    }
    (_, again), (first, anew) = passes.values()
    assert again < first / 2 < anew
