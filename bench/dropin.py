"""What it costs to be a drop-in: turning the switch, a call for a single token, and memory over many calls.

    python -m bench.dropin

With the tests' summarizer on one thread: seconds of `enable` and `disable`; a call with `max_new_tokens=1` with and
without lookahead, in turn, for several prompt lengths, as the ratio of medians; and how much the memory of the process
grows over many calls once it is warm.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

import lookahead
from bench.command import parser_of, publish, resident_bytes, seconds_of, use_one_thread
from bench.prompts import SUMMARIZER
from lookahead.models.loading import load

PROMPT_LENGTHS = (16, 128, 512, 1024)


def switch_seconds(model: PreTrainedModel, trials: int) -> float:
    return median(seconds_of(lambda: lookahead.enable(model).disable(), time.perf_counter) for _ in range(trials))


def single_token_ratios(model: PreTrainedModel, trials: int) -> dict[int, float]:
    """Median seconds of a one-token call with lookahead over transformers' own, by prompt length."""
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


def growth(model: PreTrainedModel, calls: int, warm_up: int) -> dict[str, float]:
    """MiB of resident memory before and after many calls of varied lengths, and live tensors."""
    generator = torch.Generator().manual_seed(0)

    def call() -> None:
        length = int(torch.randint(4, 200, (1,), generator=generator))
        ids = torch.randint(10, 4000, (1, length), generator=generator)
        with lookahead.enable(model):
            model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)

    for _ in range(warm_up):
        call()
    gc.collect()
    before, objects = resident_bytes(), len(gc.get_objects())
    for _ in range(calls):
        call()
    gc.collect()
    return {
        "calls": calls,
        "before_mib": round(before / 2**20, 1),
        "after_mib": round(resident_bytes() / 2**20, 1),
        "python_objects_grown": len(gc.get_objects()) - objects,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=31)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args(argv)
    use_one_thread()
    model = load(SUMMARIZER, dtype="fp32", device="cpu").model
    report: dict[str, Any] = {"switch_ms": round(switch_seconds(model, 1000) * 1e3, 4)}
    print(f"enable and disable: {report['switch_ms']} ms")
    report["single_token_ratio"] = single_token_ratios(model, arguments.trials)
    for length, ratio in report["single_token_ratio"].items():
        print(f"one token after {length:4} tokens: {ratio:.3f} x transformers' own call")
    report["memory"] = growth(model, arguments.calls, warm_up=300)
    print(f"memory over {arguments.calls} calls: {report['memory']}")
    publish(report, arguments.output)


if __name__ == "__main__":
    main()
