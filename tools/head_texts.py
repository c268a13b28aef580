"""Texts to train heads with.

    python -m tools.head_texts --write copies.jsonl --text novels.tar.xz squality_train.jsonl.xz --limit 6000
    lookahead train medusa --model tests/models/summarizer --data copies.jsonl -o heads/medusa
    python -m bench.proposers --heads heads --documents squality_dev.jsonl
    python -m tools.head_texts --write stories.jsonl --model DIR --limit 3000
    python -m tools.head_texts --write prompts.jsonl --model smollm2 --limit 600

The first command cuts passages out of texts, as prompts that ask for a summary, which the model answers itself. The
last two write what a model writes from nothing: texts, or for a chat model messages of users, which `lookahead train`
lets it answer. `bench.proposers` measures heads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.command import use_one_thread
from bench.prompts import SUMMARIZER, passages
from lookahead.loading.loading import LoadedModel, load
from lookahead.summarization.prompting import Prompting
from tools.texts import read_documents

_PIECE = 120_000  # characters of a document that passages are cut from at a time
_BATCH, _SAMPLE = 100, 250  # texts that are sampled together, and tokens of each
_PLACE = "\0"  # of a message in a chat template


def write_copies(loaded: LoadedModel, texts: Sequence[Path], file: Path, limit: int) -> None:
    """Write JSON lines to train with: prompts that ask for summaries, and as outputs half of their sentences.

    The summarizer of the tests copies what it was begun with, so that its own choice stands at nearly every token of
    such an output too, and one pass over a passage gives several times the tokens that an answer of three sentences
    has.
    """
    rng = np.random.default_rng(1)
    pieces = [document.text for document in read_documents(texts)]
    begins = [int(rng.integers(0, max(1, len(text) - _PIECE))) for text in pieces]
    cut = (text[begin : begin + _PIECE] for text, begin in zip(pieces, begins, strict=True))
    prompting, lines = Prompting(loaded.tokenizer), []
    for sentences in passages(cut, loaded.tokenizer, limit=limit, shortest=100, longest=500):
        chosen = np.sort(rng.choice(len(sentences), size=(len(sentences) + 1) // 2, replace=False))
        output = " " + "".join(sentences[index] for index in chosen).strip()
        lines.append({"prompt": prompting.render("".join(sentences).strip()), "output": output})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} examples written to {file}")


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
    parser.add_argument("--model", default=SUMMARIZER, help=f"a folder, or a name on the Hub (default {SUMMARIZER})")
    parser.add_argument("--write", type=Path, metavar="FILE", required=True, help="the file")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="PATH", help="what passages are cut from; sampled without"
    )
    parser.add_argument("--limit", type=int, default=40, help="how many texts (default 40)")
    options = parser.parse_args(argv)
    use_one_thread()
    loaded = load(options.model, dtype="fp32", device="cpu")
    if options.text:
        write_copies(loaded, options.text, options.write, options.limit)
    else:
        write_samples(loaded, options.write, options.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
