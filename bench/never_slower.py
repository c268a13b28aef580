"""Never slower: lookahead compared to its own plain decoding, on text with nothing to copy.

    python -m bench.never_slower --prompts squality_dev.jsonl --field document

The text of a batch is given: a real story (a novel continuation), or its words shuffled. A hook raises the logit of the
given next token, so that the model does all of its work. Plain decoding (`proposers=()`) and lookahead take steps in
turn, in one process on one thread, so that a busy machine slows both. The engine that is set up first may be a few
percent faster or slower because of its memory placement. So batches come in pairs with the order reversed, and the
geometric mean of a pair counts. `--control` measures plain decoding against itself, which shows the accuracy of the
figures. Seconds are the steps with prefill and all host work, in wall time and in CPU time, which a busy machine
disturbs less.

The gate comes first: both, and in fp32 `model.generate`, must write the given text, or nothing is timed.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.command import make_engine, parser_of, publish, use_one_thread
from bench.llm_figures import CLOCKS
from bench.llm_peers import read_clocks
from bench.prompts import SUMMARIZER, read_texts
from lookahead import LookaheadConfig
from lookahead.loading.loading import load
from lookahead.stats import DecodingStats, total

TEXTS = ("shuffled", "novel")
ENDLESS = {"eos_token_id": None, "pad_token_id": 0}
_RAISE = 1e4  # far above any logit of a model, and still finite


class Case(NamedTuple):
    """One batch: int64 `[rows, prompt + new]`. The first `prompt` tokens are read, the others written."""

    script: torch.Tensor
    prompt: int

    @property
    def prompts(self) -> torch.Tensor:
        return self.script[:, : self.prompt]

    @property
    def new(self) -> int:
        return self.script.shape[1] - self.prompt


class Decoded(NamedTuple):
    """The seconds of an engine by clock, and its stats."""

    seconds: dict[str, float]
    stats: DecodingStats


def make_cases(texts: list[list[int]], kind: str, batch_size: int, count: int, prompt: int, new: int) -> Iterator[Case]:
    """Cut the texts into batches. Every row is from a different text and position."""
    length = prompt + new
    pieces = [text[i : i + length] for i in range(0, 64 * length, length) for text in texts if len(text) >= i + length]
    if len(pieces) < count * batch_size:
        sys.exit(f"the texts give {len(pieces)} pieces of {length} tokens; {count * batch_size} are needed")
    rng = np.random.default_rng(0)
    for first in range(0, count * batch_size, batch_size):
        rows = np.array(pieces[first : first + batch_size])
        if kind == "shuffled":
            rows = rng.permuted(rows, axis=1)
        yield Case(torch.from_numpy(rows), prompt)


@contextmanager
def dictating(model: PreTrainedModel, case: Case, rows: Callable[[], list[int]]) -> Iterator[None]:
    """Let a model write the given text; `rows()` returns the rows of the batch in a pass."""
    following = torch.nn.functional.pad(case.script[:, 1:], (0, 1))

    def hook(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        logits, positions = output.logits, options["position_ids"]
        positions = positions.expand(logits.shape[0], -1)[:, -logits.shape[1] :].clamp(max=following.shape[1] - 1)
        told = following[torch.tensor(rows())[:, None], positions]
        logits.scatter_(2, told[:, :, None], _RAISE)

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def run_in_turn(model: PreTrainedModel, case: Case, *configs: LookaheadConfig | None) -> list[Decoded]:
    """Step engines in turn to their ends."""
    options = {"max_new_tokens": case.new, **ENDLESS}
    engines = [make_engine(model, case.prompts, config, **options) for config in configs]
    loops = {i: engine.run() for i, engine in enumerate(engines)}
    outputs = [[list[int]() for _ in case.script] for _ in engines]
    spent = [dict.fromkeys(CLOCKS, 0.0) for _ in engines]
    now = [0]
    with engines[0].serving(), dictating(model, case, lambda: [row.index for row in engines[now[0]]._rows]):
        while loops:
            for i in list(loops):
                now[0], begin = i, read_clocks()
                steps = next(loops[i], None)
                for clock, at in read_clocks().items():
                    spent[i][clock] += at - begin[clock]
                if steps is None:
                    del loops[i]
                for step in steps or ():
                    outputs[i][step.row].extend(step.tokens.tolist())
    if any(output != case.script[:, case.prompt :].tolist() for output in outputs):
        sys.exit("not lossless: the given text was not written; nothing is reported")
    return [Decoded(seconds, total(engine.stats)) for seconds, engine in zip(spent, engines, strict=True)]


def measure(model: PreTrainedModel, cases: list[Case], config: LookaheadConfig | None) -> dict[str, Any]:
    """Seconds of plain decoding over seconds of lookahead, for all batches but the first, which warms up."""
    plain = LookaheadConfig(proposers=())
    run_in_turn(model, cases[0], plain, config)
    runs = list[tuple[Decoded, Decoded]]()
    for i, case in enumerate(cases[1:]):
        order = (plain, config) if i % 2 else (config, plain)
        first, second = run_in_turn(model, case, *order)
        runs.append((first, second) if i % 2 else (second, first))
    pairs = {
        clock: pair_means([theirs.seconds[clock] / ours.seconds[clock] for theirs, ours in runs]) for clock in CLOCKS
    }
    stats = total([ours.stats for _, ours in runs])
    figures = {"speedup": statistics.median(pairs["wall"]), "cpu_speedup": statistics.median(pairs["cpu"])}
    figures |= {"lowest": min(pairs["wall"]), "highest": max(pairs["wall"])}
    figures["drafted_per_pass"] = stats.drafted_tokens / stats.target_forwards
    figures["accepted_per_pass"] = stats.accepted_tokens / stats.target_forwards
    plain_s = sum(theirs.seconds["wall"] for theirs, _ in runs)
    figures["plain_ms_per_token"] = 1e3 * plain_s / sum(case.new for case in cases[1:])
    return {name: round(figure, 4) for name, figure in figures.items()}


def pair_means(ratios: list[float]) -> list[float]:
    """The geometric means of consecutive pairs of ratios."""
    return [math.sqrt(a * b) for a, b in zip(ratios[::2], ratios[1::2], strict=True)]


def main() -> None:
    parser = parser_of(__doc__, model=SUMMARIZER)
    parser.add_argument("--prompts", type=Path, required=True, help="a .jsonl file, or a text file of one text a line")
    parser.add_argument("--field", default="text", help="the field of each JSON line")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--texts", default=",".join(TEXTS), help="of shuffled and novel")
    parser.add_argument("--pairs", type=int, default=6, help="timed pairs of batches of a case; one more warms up")
    parser.add_argument("--control", action="store_true", help="plain decoding in place of lookahead")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--proposers", help="as in LookaheadConfig, commas between; the default when left out")
    arguments = parser.parse_args()
    use_one_thread()
    config = LookaheadConfig(proposers=arguments.proposers.split(",")) if arguments.proposers else None
    config = LookaheadConfig(proposers=()) if arguments.control else config
    results = {}
    for dtype in arguments.dtypes.split(","):
        model, tokenizer = load(arguments.model, dtype=dtype, device="cpu")
        texts = [text.strip() for text in read_texts(arguments.prompts, arguments.field)]
        tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for kind in arguments.texts.split(","):
            for batch_size in map(int, arguments.batch_sizes.split(",")):
                size = (batch_size, 2 * arguments.pairs + 1, arguments.prompt_tokens, arguments.max_new_tokens)
                cases = list(make_cases(tokens, kind, *size))
                for case in cases[: dtype == "fp32"]:
                    with dictating(model, case, partial(list, range(len(case.script)))):
                        written = model.generate(case.prompts, max_new_tokens=case.new, do_sample=False, **ENDLESS)
                    if written.tolist() != case.script.tolist():
                        sys.exit("not lossless: model.generate does not write the given text; nothing is timed")
                name = f"{kind} {dtype} batch {batch_size}"
                results[name] = measure(model, cases, config)
                print(f"{name:26} {results[name]}", flush=True)
    worst = min(results, key=lambda name: results[name]["speedup"])
    print(f"worst: {worst}, {results[worst]['speedup']:.3f}x of plain decoding")
    setting = {"model": arguments.model, "device": "cpu", "threads": 1}
    setting |= {"pairs": arguments.pairs, "is_control": arguments.control}
    publish({"worst": results[worst]["speedup"], "worst_case": worst, **setting, "cases": results}, arguments.output)


if __name__ == "__main__":
    main()
