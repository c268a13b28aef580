"""What trained heads are worth: tokens per target pass on passages of documents that training never saw.

    python -m bench.heads --write copies.jsonl --text novels.tar.xz squality_train.jsonl.xz --limit 6000
    lookahead train medusa --model tests/models/summarizer --data copies.jsonl -o heads
    python -m bench.heads --heads heads --prompts squality_dev.jsonl --field document --limit 40
    python -m bench.heads --write stories.jsonl --model DIR --limit 3000

The first form cuts passages for training out of texts, as prompts that ask for a summary, which the model answers
itself. The last writes texts that a model which continues any beginning writes from none. The third decodes held-out
prompts greedily with at most `--nodes` draft nodes a step, the heads alone drafting (no cost model, so that a figure
does not depend on the machine). Every output must be that of greedy `model.generate`, or no figure is printed. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.command import parser_of, publish, use_one_thread
from bench.prompts import SUMMARIZER, passages, read_texts, summary_prompts
from lookahead import Heads, LookaheadConfig
from lookahead.generation.draft_selection import compare
from lookahead.models.loading import LoadedModel, load
from lookahead.summarization.prompting import Prompting
from tools.train_extractor.corpus import read_documents

_PIECE = 120_000  # characters of a document that passages are cut from at a time
_BATCH, _SAMPLE = 100, 250  # texts that are sampled together, and tokens of each


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
    """Write JSON lines to train with: what the model writes from nothing, by turns at temperature 1 and at 0.5."""
    torch.manual_seed(0)
    texts: list[str] = []
    while len(texts) < limit:
        begin = torch.full((min(_BATCH, limit - len(texts)), 1), loaded.tokenizer.bos_token_id)
        temperature = 0.5 if len(texts) // _BATCH % 2 else 1.0
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": _SAMPLE}
        rows = loaded.model.generate(begin, attention_mask=torch.ones_like(begin), **options)  # type: ignore[operator]
        texts += loaded.tokenizer.batch_decode(rows, skip_special_tokens=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    print(f"{len(texts)} examples written to {file}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = parser_of(__doc__, model=SUMMARIZER)
    options.add_argument("--write", type=Path, metavar="FILE", help="write texts to train with, and stop")
    options.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="PATH", help="what to cut them from; sampled without"
    )
    options.add_argument("--heads", type=Path, metavar="DIR", help="heads to measure")
    options.add_argument("--prompts", type=Path, metavar="FILE", help="held-out documents")
    options.add_argument("--field", default="document", help="JSON field with the text (default: document)")
    options.add_argument("--limit", type=int, default=40, help="prompts (default 40)")
    options.add_argument("--nodes", type=int, default=32, help="most draft nodes a step (default 32)")
    options.add_argument("--tokens", type=int, default=160, help="new tokens a prompt (default 160)")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print; 1 where an output differs."""
    options = parser().parse_args(arguments)
    use_one_thread()
    loaded = load(options.model, dtype="fp32", device="cpu")
    if options.write is not None:
        if options.text:
            write_copies(loaded, options.text, options.write, options.limit)
        else:
            write_samples(loaded, options.write, options.limit)
        return 0
    texts = read_texts(options.prompts, options.field)
    prompts = summary_prompts(texts, loaded.tokenizer, limit=options.limit, shortest=200, longest=900)
    config = LookaheadConfig(
        proposers=(Heads(options.heads),), draft="fixed", max_nodes=options.nodes, min_probability=0.0
    )
    greedy = {"max_new_tokens": options.tokens, "do_sample": False}
    score = compare(*loaded, prompts, {"heads": config}, warm_up=0, **greedy)["heads"]
    if score.identical < len(prompts):
        print(f"only {score.identical} of {len(prompts)} outputs are those of model.generate")
        return 1
    stats = score.stats
    figures = {
        "bench": "heads",
        "model": options.model,
        "heads": str(options.heads),
        "prompts": len(prompts),
        "nodes": options.nodes,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "drafted_per_forward": round(stats.drafted_tokens / stats.target_forwards, 2),
        "expected_per_forward": round(stats.expected_tokens / stats.target_forwards, 4),
        "accepted_per_forward": round(stats.accepted_tokens / stats.target_forwards, 4),
        "new_tokens": stats.emitted_tokens,
    }
    publish(figures, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
