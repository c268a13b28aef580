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

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.command import make_engine, parser_of, publish, use_one_thread
from bench.llm_peers import read_clocks
from bench.prompts import SUMMARIZER, read_texts
from lookahead import LookaheadConfig
from lookahead.loading.loading import load
from lookahead.stats import DecodingStats, total

PLAIN = LookaheadConfig(proposers=())
ENDLESS = {"eos_token_id": None, "pad_token_id": 0}
_RAISE = 1e4  # far above any logit of a model, and still finite


def make_scripts(texts: list[list[int]], kind: str, rows: int, count: int, length: int) -> list[torch.Tensor]:
    """Cut the texts into batches, int64 `[rows, length]`. Every row is from a different text and position."""
    pieces = [text[i : i + length] for i in range(0, 64 * length, length) for text in texts if len(text) >= i + length]
    if len(pieces) < count * rows:
        sys.exit(f"the texts give {len(pieces)} pieces of {length} tokens; {count * rows} are needed")
    rng = np.random.default_rng(0)
    batches = [np.array(pieces[first : first + rows]) for first in range(0, count * rows, rows)]
    return [torch.from_numpy(rng.permuted(batch, axis=1) if kind == "shuffled" else batch) for batch in batches]


@contextmanager
def dictating(model: PreTrainedModel, script: torch.Tensor, rows: Callable[[], list[int]]) -> Iterator[None]:
    """Let a model write the given text; `rows()` returns the rows of the batch in a pass."""
    following = torch.nn.functional.pad(script[:, 1:], (0, 1))

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


def run_in_turn(
    model: PreTrainedModel, script: torch.Tensor, prompt: int, configs: list[LookaheadConfig | None]
) -> list[tuple[dict[str, float], DecodingStats]]:
    """Step engines in turn to their ends, after `prompt` tokens; returns the seconds by clock and the stats of each."""
    options = {"max_new_tokens": script.shape[1] - prompt, **ENDLESS}
    engines = [make_engine(model, script[:, :prompt], config, **options) for config in configs]
    loops = {i: engine.run() for i, engine in enumerate(engines)}
    outputs = [[list[int]() for _ in script] for _ in engines]
    spent = [dict.fromkeys(read_clocks(), 0.0) for _ in engines]
    now = [0]
    with engines[0].serving(), dictating(model, script, lambda: [row.index for row in engines[now[0]]._rows]):
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
    if any(output != script[:, prompt:].tolist() for output in outputs):
        sys.exit("not lossless: the given text was not written; nothing is reported")
    return [(seconds, total(engine.stats)) for seconds, engine in zip(spent, engines, strict=True)]


def measure(
    model: PreTrainedModel, scripts: list[torch.Tensor], prompt: int, config: LookaheadConfig | None
) -> dict[str, float]:
    """Seconds of plain decoding over seconds of lookahead, for all batches but the first, which warms up."""
    configs = [PLAIN, config]
    run_in_turn(model, scripts[0], prompt, configs)
    runs = []
    for i, script in enumerate(scripts[1:]):
        order = 1 if i % 2 else -1
        runs.append(run_in_turn(model, script, prompt, configs[::order])[::order])
    ratios = {clock: [plain[0][clock] / ours[0][clock] for plain, ours in runs] for clock in read_clocks()}
    pairs = {
        clock: list(map(geometric_mean, zip(each[::2], each[1::2], strict=True))) for clock, each in ratios.items()
    }
    stats, new = total(ours[1] for _, ours in runs), scripts[0].shape[1] - prompt
    figures = {
        "speedup": median(pairs["wall"]),
        "cpu_speedup": median(pairs["cpu"]),
        "lowest": min(pairs["wall"]),
        "highest": max(pairs["wall"]),
        "drafted_per_pass": stats.drafted_tokens / stats.target_forwards,
        "accepted_per_pass": stats.accepted_tokens / stats.target_forwards,
        "plain_ms_per_token": 1e3 * sum(plain[0]["wall"] for plain, _ in runs) / (new * len(runs)),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def main() -> None:
    parser = parser_of(__doc__, model=SUMMARIZER)
    parser.add_argument("--prompts", type=Path, required=True, help="a .jsonl file, or a text file of one text a line")
    parser.add_argument("--field", default="text", help="the field of each JSON line")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--texts", default="shuffled,novel", help="of shuffled and novel")
    parser.add_argument("--pairs", type=int, default=6, help="timed pairs of batches; one more batch warms up")
    parser.add_argument("--control", action="store_true", help="plain decoding in place of lookahead")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--proposers", help="as in LookaheadConfig, commas between; the default when left out")
    arguments = parser.parse_args()
    use_one_thread()
    config = LookaheadConfig(proposers=arguments.proposers.split(",")) if arguments.proposers else None
    config, prompt, results = PLAIN if arguments.control else config, arguments.prompt_tokens, {}
    for dtype in arguments.dtypes.split(","):
        model, tokenizer = load(arguments.model, dtype=dtype, device="cpu")
        texts = [text.strip() for text in read_texts(arguments.prompts, arguments.field)]
        tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for kind, rows in product(arguments.texts.split(","), map(int, arguments.batch_sizes.split(","))):
            length = prompt + arguments.max_new_tokens
            first, *_ = scripts = make_scripts(tokens, kind, rows, 2 * arguments.pairs + 1, length)
            with dictating(model, first, partial(list, range(rows))):
                options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, **ENDLESS}
                written = model.generate(first[:, :prompt], **options) if dtype == "fp32" else first
            if not torch.equal(written, first):
                sys.exit("not lossless: model.generate does not write the given text; nothing is timed")
            name = f"{kind} {dtype} batch {rows}"
            results[name] = measure(model, scripts, prompt, config)
            print(f"{name:26} {results[name]}", flush=True)
    worst = min(results, key=lambda name: results[name]["speedup"])
    print(f"worst: {worst}, {results[worst]['speedup']:.3f}x of plain decoding")
    setting = {"model": arguments.model, "device": "cpu", "threads": 1}
    setting |= {"pairs": arguments.pairs, "is_control": arguments.control}
    publish({"worst": results[worst]["speedup"], "worst_case": worst, **setting, "cases": results}, arguments.output)


if __name__ == "__main__":
    main()
