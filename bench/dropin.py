"""The overhead of the drop-in: the time of enabling it, and of a call for a single token.

    python -m bench.dropin

With the tests' summarizer on one thread: seconds of `enable` and `disable`, and calls with `max_new_tokens=1` with and
without lookahead, in turn, for several prompt lengths, as the ratio of medians.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from bench.command import parser_of, publish, seconds_of, use_one_thread
from bench.prompts import SUMMARIZER
from lookahead.loading.loading import load

PROMPT_LENGTHS = (16, 128, 512, 1024)


def single_token_ratios(model: PreTrainedModel, trials: int) -> dict[int, float]:
    """Median seconds of a one-token call with lookahead relative to transformers, by prompt length."""
    ratios = {}
    for length in PROMPT_LENGTHS:
        ids = torch.randint(10, 4000, (1, length), generator=torch.Generator().manual_seed(length))
        plain = partial(model.generate, ids, max_new_tokens=1, do_sample=False)
        calls = [plain, partial(plain, custom_generate=lookahead.decode)]
        assert torch.equal(*(call() for call in calls)), "lossless first: a single token differs"
        seconds: list[list[float]] = [[], []]
        for _ in range(trials):
            for call, taken in zip(calls, seconds, strict=True):
                taken.append(seconds_of(call, time.perf_counter))
        ratios[length] = round(median(seconds[1]) / median(seconds[0]), 3)
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=31)
    arguments = parser.parse_args(argv)
    use_one_thread()
    model = load(SUMMARIZER, dtype="fp32", device="cpu").model
    turns = [seconds_of(lambda: lookahead.enable(model).disable(), time.perf_counter) for _ in range(1000)]
    report: dict[str, Any] = {"switch_ms": round(median(turns) * 1e3, 4)}
    print(f"enable and disable: {report['switch_ms']} ms")
    report["single_token_ratio"] = single_token_ratios(model, arguments.trials)
    for length, ratio in report["single_token_ratio"].items():
        print(f"one token after {length:4} tokens: {ratio:.3f} x transformers' own call")
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
