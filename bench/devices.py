"""What sizing drafts by measured cost is worth on devices that are not at hand: a real model, a simulated clock.

    python -m bench.devices --model DIR

The model decodes as ever, but the clock that the engine reads goes on by what each pass would cost on the device: a
curve of the nodes of its largest tree, in plain steps; and by 1% of a plain step for looking for drafts. So figures
are the same on every machine, however busy. `dear` and `half` are the curves of a small model on a CPU in fp32 and
bf16; on `wide` nodes are free up to 128, as where the weights are what a pass waits for.

For every device and configuration the seconds of all prompts over those of plain decoding are printed (memory fresh
for each prompt, what is learned of costs and hit rates kept), and the nodes and accepted tokens of the lookahead
branch. Every output must be that of plain decoding. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.command import parser_of, publish, use_one_thread
from bench.prompts import OPENINGS, SUMMARIZER, read_texts
from lookahead import LookaheadConfig
from lookahead.models.loading import load
from lookahead.models.model_state import LearnedState, use_learned
from lookahead.stats import total
from tests.support.simulated_devices import DEVICES, Cost, decode, on_device

HOST = 0.01  # plain steps that looking for drafts takes
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"proposers": ()},
    "default": {},
    "default and window 7": {"window": 7},
    "default and window auto": {"window": "auto"},
    "window 7 alone": {"proposers": ("jacobi",), "window": 7},
    "window auto alone": {"proposers": ("jacobi",)},
}


def compare(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], tokens: int, cost: Cost, options: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of every configuration over those of plain decoding, and what the branch did."""
    expected: list[list[int]] = []
    plain_s, report = 0.0, {}
    for name, sources in CONFIGS.items():
        config = LookaheadConfig(memory="request", **sources, **options)
        learned = LearnedState()
        learned.costs[LookaheadConfig().passes].warms_up(2)
        with on_device(cost, HOST), use_learned(model, learned):
            runs = [decode(model, ids, tokens, config) for ids in prompts]
        outputs = [output for output, _ in runs]
        expected = expected or outputs
        if outputs != expected:
            sys.exit(f"not lossless: {name} differs from plain decoding")
        seconds = sum(stats.decode_s for _, stats in runs)
        plain_s = plain_s or seconds
        whole = total(stats for _, stats in runs)
        report[name] = {
            "over_plain": round(seconds / plain_s, 4),
            "tokens_per_pass": round(whole.mean_acceptance_length, 3),
            "branch_drafted_per_pass": round(whole.drafted_by_source["jacobi"] / whole.target_forwards, 2),
            "branch_accepted": whole.accepted_by_source["jacobi"],
        }
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__, model=SUMMARIZER)
    parser.add_argument("--file", type=Path, default=OPENINGS, help="prompts, one a line, or JSON lines")
    parser.add_argument("--field", default="prompt", help="field of the JSON lines that holds the prompt")
    parser.add_argument("--prompts", type=int, default=40, help="how many prompts (default 40)")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens a prompt (default 160)")
    parser.add_argument("--min-probability", type=float, default=0.02, help="of the configuration (default 0.02)")
    arguments = parser.parse_args(argv)
    use_one_thread()
    model, tokenizer = load(arguments.model, dtype="fp32", device="cpu")
    texts = islice(read_texts(arguments.file, arguments.field), arguments.prompts)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    report: dict[str, Any] = {"model": Path(arguments.model).name, "prompts": len(prompts), "tokens": arguments.tokens}
    for device, cost in DEVICES.items():
        report[device] = compare(model, prompts, arguments.tokens, cost, {"min_probability": arguments.min_probability})
        for name, row in report[device].items():
            print(f"{device:5} {name:25} {row}", flush=True)
    publish(report, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
