"""What drafting from the encoder's input saves: a decoder that is told to write recorded summaries.

    python -m bench.reading --tokenizer GPT2_DIR --pairs spec_bench.jsonl

A random model of the given shape does all of a summarizer's work, and a logits processor lets it say a reference
summary. Every document is decoded by transformers, greedily, and by lookahead in turn, with memory of its own request
alone and with memory of earlier ones; the outputs must be the same. What trained weights would say is not measured: the
references are others' summaries, which copy as much as they copy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import BartConfig, BartForConditionalGeneration, LogitsProcessor

import lookahead
from bench.replay import load_tokenizer
from lookahead import LookaheadConfig
from lookahead.generation.api import prepare

CONFIGS = {
    "memory of the request": LookaheadConfig(memory="request"),
    "shared memory": LookaheadConfig(),
}


class Dictates(LogitsProcessor):
    """Raises the score of the token that a recorded text has at the place."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.text[input_ids.shape[1] - 1]] = 1e4
        return scores


def read_pairs(path: Path, tokenizer: Any, limit: int) -> list[tuple[list[int], list[int]]]:
    """Documents and their references, in tokens, of the records that hold a summary."""
    pairs = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("category") == "summarization" and record.get("reference"):
            texts = (record["turns"][0], record["reference"][0])
            pairs.append(tuple(tokenizer(text)["input_ids"][:1000] for text in texts))
    return pairs[:limit]


def run(model: Any, ids: list[int], text: list[int], config: LookaheadConfig | None) -> tuple[list[int], float, int]:
    """The tokens, the decoder's seconds and its passes."""
    options = {"max_new_tokens": len(text), "do_sample": False, "num_beams": 1, "logits_processor": [Dictates(text)]}
    inputs = torch.tensor([ids])
    if config is None:
        encoded = model.get_encoder()(input_ids=inputs, return_dict=True)
        start = time.perf_counter()
        out = model.generate(inputs, encoder_outputs=encoded, **options)
        return out[0, 1:].tolist(), time.perf_counter() - start, len(text)
    engine = model.generate(inputs, **options, custom_generate=prepare, lookahead_config=config)
    start, tokens = time.perf_counter(), []
    with engine.serving():
        for emissions in engine.run():
            tokens += [token for emission in emissions for token in emission.tokens.tolist()]
    return tokens, time.perf_counter() - start, engine.stats[0].target_forwards + 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if an output differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with a GPT-2 tokenizer")
    parser.add_argument("--pairs", type=Path, required=True, help="records with category, turns and reference")
    parser.add_argument("--limit", type=int, default=40, help="documents")
    parser.add_argument("--size", type=int, default=256, help="hidden size, four layers each side")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(str(options.tokenizer))
    sizes = {"encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 4 * options.size}
    sizes |= {"decoder_ffn_dim": 4 * options.size, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=len(tokenizer), d_model=options.size, forced_eos_token_id=None, **sizes)
    ).eval()
    model.generation_config.eos_token_id = None
    # One document more, to warm up with, so that no memory holds what is measured.
    *pairs, first = read_pairs(options.pairs, tokenizer, options.limit + 1)
    for config in (None, *CONFIGS.values()):
        run(model, *first, config)
    tokens, passes, seconds, same = 0, dict.fromkeys(CONFIGS, 0), {name: [] for name in ("plain", *CONFIGS)}, True
    for ids, text in pairs:
        expected, spent, _ = run(model, ids, text, None)
        seconds["plain"].append(spent / len(text))
        tokens += len(text)
        for name, config in CONFIGS.items():
            got, spent, taken = run(model, ids, text, config)
            same = same and got == expected
            passes[name] += taken
            seconds[name].append(spent / len(text))
    report = {
        "documents": len(pairs),
        "identical": same,
        "tokens_per_pass": {name: round(tokens / taken, 3) for name, taken in passes.items()},
        "ms_per_token_median": {name: round(1000 * median(each), 3) for name, each in seconds.items()},
        "torch": torch.__version__,
        "lookahead": lookahead.__version__,
    }
    print(json.dumps(report))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
