"""Texts to train heads with, written by a model from nothing.

    python -m tools.head_texts --write stories.jsonl --model DIR --limit 3000
    python -m tools.head_texts --write prompts.jsonl --model smollm2 --limit 600

A chat model writes messages of users, which `lookahead train` lets it answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.command import use_one_thread
from lookahead.loading.loading import DEFAULT_MODEL, LoadedModel, load

_BATCH, _SAMPLE = 100, 250  # texts that are sampled together, and tokens of each
_PLACE = "\0"  # of a message in a chat template


def write_samples(loaded: LoadedModel, file: Path, limit: int) -> None:
    """Write JSON lines to train with: what the model writes from nothing, by turns at temperature 1 and at 0.5.

    A chat model writes messages of users instead, at temperature 1: prompts that it then answers itself.

    Source of such prompts: Xu et al. 2024, "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs
        with Nothing".
    """
    torch.manual_seed(0)
    tokenizer, lines = loaded.tokenizer, list[dict[str, str]]()
    before, after = "", ""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": _PLACE}]
        rendered: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, after = rendered.split(_PLACE)
    ids: Any = tokenizer(before, add_special_tokens=False)["input_ids"] if before else [tokenizer.bos_token_id]
    while len(lines) < limit:
        begin = torch.tensor(ids).repeat(min(_BATCH, limit - len(lines)), 1)
        temperature = 0.5 if len(lines) // _BATCH % 2 and not before else 1.0
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": _SAMPLE}
        rows = loaded.model.generate(begin, attention_mask=torch.ones_like(begin), **options)  # type: ignore[operator]
        texts = tokenizer.batch_decode(rows[:, begin.shape[1] :], skip_special_tokens=True)
        if before:
            lines += [{"prompt": f"{before}{text.strip()}{after}"} for text in texts if text.strip()]
        else:
            lines += [{"text": text} for text in texts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} examples written to {file}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"a folder, or a name on the Hub ({DEFAULT_MODEL})")
    parser.add_argument("--write", type=Path, metavar="FILE", required=True, help="the file")
    parser.add_argument("--limit", type=int, default=40, help="how many texts (default 40)")
    options = parser.parse_args(argv)
    use_one_thread()
    write_samples(load(options.model, dtype="fp32", device="cpu"), options.write, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
