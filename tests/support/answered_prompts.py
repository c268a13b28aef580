"""Training data for heads: prompts with the model's answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_answered(path: Path, model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int) -> Path:
    """Write a line of JSON for every prompt. The model answers them in one batch."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    outputs = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
    lines = [{"prompt": prompt, "output": output} for prompt, output in zip(prompts, outputs, strict=True)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
