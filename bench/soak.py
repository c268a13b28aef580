"""Memory leaks: resident memory over thousands of requests with the default configuration and its shared memory.

    python -m bench.soak --model DIR --prompts squality_dev.jsonl --field document --output bench/results/soak.json

Requests are pieces of the texts of varied length, cut anywhere, with short outputs: greedy, sampled, in ragged batches,
and streamed, where every second stream is abandoned half-way. The shared memory is bounded (`LookaheadConfig.memory`)
but takes thousands of requests to fill. So requests warm up until the earlier outputs have been halved for the first
time; later growth is a leak. Resident memory is read from /proc (Linux) after garbage collection.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from bench.command import parser_of, publish, resident_bytes, use_one_thread
from bench.prompts import SUMMARIZER, read_tokens
from lookahead.loading.loading import load
from lookahead.model.model_state import state_of
from lookahead.proposers import ProposerState

NEW_TOKENS = 16  # maximum; the minimum is 4
LONGEST = 400  # maximum tokens of a prompt
REPORTS = 10


class Requests:
    """Requests drawn from the tokens of texts and served at once."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[list[int]]) -> None:
        self._model, self._tokenizer, self._texts = model, tokenizer, texts
        self._rng, self.served = np.random.default_rng(0), 0
        self._memory = state_of(model).learned.of(ProposerState, ProposerState).memory

    def serve(self) -> None:
        """One request: every fourth is a batch, every fourth is streamed, and one in three of the rest is sampled."""
        kind, self.served = self.served % 4, self.served + 1
        options: dict[str, Any] = {"max_new_tokens": int(self._rng.integers(4, NEW_TOKENS + 1))}
        options["do_sample"] = bool(self._rng.integers(3) == 0)
        if kind == 3:
            prompt = self._tokenizer.decode(self._piece())
            pieces = lookahead.stream(self._model, self._tokenizer, prompt, add_special_tokens=False, **options)
            for _ in pieces:
                if self.served % 8 == 0:
                    break
            return
        rows = [self._piece() for _ in range(3 if kind == 2 else 1)]
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        with lookahead.enable(self._model):
            self._model.generate(ids, attention_mask=mask, pad_token_id=0, **options)

    def _piece(self) -> list[int]:
        text = self._texts[self._rng.integers(len(self._texts))]
        begin = int(self._rng.integers(max(1, len(text) - LONGEST)))
        return text[begin : begin + int(self._rng.integers(2, LONGEST + 1))]

    def sizes(self) -> dict[str, Any]:
        """Resident memory of the process, and the sizes of the shared stores."""
        gc.collect()
        memory = self._memory
        return {
            "requests": self.served,
            "rss_mb": round(resident_bytes() / 2**20, 1),
            "outputs_tokens": len(memory.outputs),
            "stores_mb": round((memory.outputs.nbytes + memory.recycled.nbytes) / 2**20, 1),
            "python_objects": len(gc.get_objects()),
        }

    def warm_up(self) -> None:
        """Serve until the earlier outputs are halved for the first time."""
        before = 0
        while len(self._memory.outputs) >= before:
            before = len(self._memory.outputs)
            self.serve()
            if self.served % 1000 == 0:
                print(f"warming up: {self.sizes()}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=SUMMARIZER)
    parser.add_argument("--prompts", type=Path, required=True, help="a .jsonl file, or a text file of one text a line")
    parser.add_argument("--field", default="text", help="the field of each JSON line")
    parser.add_argument("--requests", type=int, default=10_000, help="after those that warm up")
    arguments = parser.parse_args(argv)
    use_one_thread()
    loaded = load(arguments.model, dtype="fp32", device="cpu")
    texts = read_tokens(arguments.prompts, arguments.field, loaded.tokenizer)
    requests = Requests(*loaded, texts)
    started = time.perf_counter()
    requests.warm_up()
    sizes = [requests.sizes()]
    print(f"warm: {sizes[0]}", flush=True)
    for number in range(1, arguments.requests + 1):
        requests.serve()
        if number % max(1, arguments.requests // REPORTS) == 0:
            sizes.append(requests.sizes())
            print(sizes[-1], flush=True)
    warm, end = sizes[0], sizes[-1]
    report = {"model": Path(arguments.model).name, "requests": arguments.requests, "warm_up_requests": warm["requests"]}
    report |= {"rss_mb_after_warmup": warm["rss_mb"], "rss_mb_end": end["rss_mb"]}
    report |= {"growth_mb": round(end["rss_mb"] - warm["rss_mb"], 1)}
    report |= {"python_objects_grown": end["python_objects"] - warm["python_objects"], "sizes": sizes}
    publish(report | {"seconds": round(time.perf_counter() - started)}, arguments.output)


if __name__ == "__main__":
    main()
