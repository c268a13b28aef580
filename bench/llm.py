"""A real language model, every method in turn on every prompt: speed, tokens per pass, and differences in tokens.

    python -m bench.llm --model DIR --prompts spec_bench.jsonl --stories squality_dev.jsonl --dtype fp32
    python -m bench.llm --model DIR --prompts spec_bench.jsonl --dtype bf16 --peer vllm:/path/to/venv/bin/python

Prompts are chat messages by category, in the format of Spec-Bench; its eight MT-bench categories count as one, "chat".
Methods run in turn on every prompt, in rotating order, on one core or on `--threads`. Each of ours has its own memory:
a "warm" method has learned from the previous prompts, never from the same one. "Cold" is a fresh process per prompt.
`fixed NODES` drafts as many nodes in every step.
Seconds are CPU time and wall time; figures use wall time with several threads, else CPU time. Decode seconds begin at
the first token, end-to-end seconds with the call. Tokens per pass do not count the prefill. "Without loops" excludes,
for every method, prompts with an output that repeats 16 of its own tokens.

The gate comes before any figure. In fp32, and in bf16 if the stats say that every pass kept its bits, a token of ours
that differs from `model.generate` ends the run, greedy or sampled. Otherwise in bf16 the first difference of every
output is counted, with the gap between the two likeliest logits of greedy decoding there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from bench import llm_figures
from bench.command import clock_of, in_turn, make_engine, parser_of, publish, setting_of, stay_on_cores
from bench.llm_figures import CLOCKS, CONFIGS, GREEDY, LOOKUPS, OURS, Prompt, Run
from bench.llm_peers import peer_of, read_clocks, run_peer, timed
from bench.prompts import as_chat, begin_of, loops
from lookahead import Heads, LookaheadConfig
from lookahead.loading.loading import DEFAULT_MODEL, load
from lookahead.model.model_state import LearnedState, use_learned
from tests.support.pass_recorder import counted_passes

CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
STORIES = "stories"
SUMMARIZE = "Summarize the following story.\n\n"
NAMES = ", ".join((GREEDY, *LOOKUPS, *CONFIGS, "fixed NODES", "heads DIR", "memory FILE"))
DEFAULT_METHODS = (GREEDY, *LOOKUPS, OURS, "prompt alone", "recycled alone", "window")

Method = Callable[[torch.Tensor], Run]


class FirstToken(StoppingCriteria):
    """Never stops; reads the clocks at the first token."""

    def __init__(self) -> None:
        self.length = 0
        self.at: dict[str, float] = {}

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.at:
            self.length, self.at = input_ids.shape[1], read_clocks()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `model.generate` that all methods share. Sampling uses the same seed."""
    if not arguments.temperature:
        return {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}
    torch.manual_seed(0)
    return {"max_new_tokens": arguments.max_new_tokens, "do_sample": True, "temperature": arguments.temperature}


def of_transformers(model: PreTrainedModel, arguments: argparse.Namespace, **options: Any) -> Method:
    """`model.generate` with the options of a method."""

    def run(ids: torch.Tensor) -> Run:
        first, shared = FirstToken(), sampling(arguments)
        with counted_passes(model) as passes:
            begin = read_clocks()
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), stopping_criteria=StoppingCriteriaList([first]),
                return_dict_in_generate=True, **shared, **options,
            )  # fmt: skip
            end = read_clocks()
        gaps: list[float] = []
        if options.get("output_logits"):
            top = torch.cat(out.logits).topk(2).values
            gaps = (top[:, 0] - top[:, 1]).tolist()
        tokens = out.sequences[0, ids.shape[1] :].tolist()
        prefilled = first.length - ids.shape[1]
        prefill, total = ({clock: at[clock] - begin[clock] for clock in CLOCKS} for at in (first.at, end))
        return Run(tokens, prefilled, len(passes) - 1, prefill, total, gaps)

    return run


def of_ours(model: PreTrainedModel, arguments: argparse.Namespace, config: LookaheadConfig) -> Method:
    """Decoding with lookahead and a separate memory."""
    learned, exactness = LearnedState(), [""]

    def blocks(ids: torch.Tensor) -> Iterator[list[int]]:
        with use_learned(model, learned):
            engine = make_engine(model, ids, config, **sampling(arguments))
            with engine.serving():  # as `lookahead.decode` does
                for step in engine.run():
                    yield step[0].tokens.tolist()
                exactness[0] = engine.stats[0].exactness

    return lambda ids: Run(**timed(blocks(ids)), is_bitwise=exactness[0] == "bitwise")


def make_methods(model: PreTrainedModel, arguments: argparse.Namespace) -> dict[str, Method]:
    """The chosen methods by name; greedy decoding is always the first."""
    options = {"output_logits": True} if arguments.dtype != "fp32" else {}
    methods = {GREEDY: of_transformers(model, arguments, **options)}
    for name in dict.fromkeys(arguments.methods.split(",")):
        if name in LOOKUPS:
            methods[name] = of_transformers(model, arguments, prompt_lookup_num_tokens=LOOKUPS[name])
        elif name != GREEDY:
            kind, _, file = name.partition(" ")
            chosen = CONFIGS.get(name, {"memory": {"memory": file}}.get(kind))
            if kind == "heads":
                chosen = {"proposers": ("prompt", "outputs", "recycled", Heads(file))}
            elif kind == "fixed" and file.isdecimal():
                chosen = {"draft": "fixed", "max_nodes": int(file), "min_probability": 0.0}
            if chosen is None:
                sys.exit(f"--methods: {name!r} is none of {NAMES}")
            methods[name] = of_ours(model, arguments, LookaheadConfig(**chosen))
    return methods


def add_prompt_options(
    parser: argparse.ArgumentParser, *, per_category: int, stories: str = "JSON lines with a document to summarize each"
) -> None:
    """Add the options of `read_prompts`, with a default of `--per-category` and the help of `--stories`."""
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a category, as in Spec-Bench")
    parser.add_argument(
        "--field", default="turns", help="field of the text, of turns, the first of which counts, or of token ids"
    )
    parser.add_argument("--stories", type=Path, help=stories)
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a story that are read (default 1000)")
    parser.add_argument("--per-category", type=int, default=per_category)
    parser.add_argument("--offset", type=int, default=0, help="prompts of each category to leave out")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.set_defaults(warmup=0)


def read_prompts(
    tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace
) -> tuple[list[Prompt], list[Prompt]]:
    """The prompts to measure, and additional ones of each category for warm-up."""
    lines = map(json.loads, arguments.prompts.read_text(encoding="utf-8").splitlines())
    by_category: dict[str, list[Any]] = {}
    for line in lines:
        turn = line[arguments.field]
        is_turns = isinstance(turn, list) and isinstance(turn[0], str)
        by_category.setdefault(line["category"], []).append(turn[0] if is_turns else turn)
    chats = zip_longest(*(by_category.pop(name) for name in CHAT if name in by_category))
    texts = {"chat": [text for text in chain.from_iterable(chats) if text is not None], **by_category}
    if arguments.stories:
        stories = [json.loads(line)["document"] for line in arguments.stories.read_text(encoding="utf-8").splitlines()]
        texts[STORIES] = [SUMMARIZE + begin_of(story.strip(), tokenizer, arguments.longest) for story in stories]
    first, count = arguments.offset, arguments.per_category
    measured, warming = [], []
    for category, each in texts.items():
        if not each:
            continue
        if len(each) < first + count + 1:
            sys.exit(f"--offset {first} and --per-category {count} need {first + count + 1} prompts of {category!r}, "
                     f"there are {len(each)}")  # fmt: skip
        prompts = [Prompt(category, as_chat(text, tokenizer)) for text in each[first : first + count + 1]]
        measured += prompts[:count]
        warming += prompts[count:]
    return measured, warming[: arguments.warmup]


def run_in_turn(methods: Mapping[str, Method], prompts: Sequence[Prompt]) -> dict[str, list[Run]]:
    """Run every method on every prompt, in rotating order."""
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for i, prompt in enumerate(prompts):
        for name in in_turn(list(methods), i):
            runs[name].append(methods[name](prompt.ids))
        greedy = runs[GREEDY][-1]
        print(f"{i + 1}/{len(prompts)} {prompt.category}: {prompt.ids.shape[1]} tokens of prompt, "
              f"{len(greedy.tokens)} of output", file=sys.stderr, flush=True)  # fmt: skip
    return runs


def run_cold(prompts: Sequence[Prompt], arguments: argparse.Namespace) -> list[Run]:
    """Ours on each prompt in a fresh process, which has only decoded 4 greedy tokens before."""
    command = [sys.executable, "-m", "bench.llm", *arguments.given, "--cold-worker"]
    runs = []
    for prompt in prompts:
        done = subprocess.run(command, input=json.dumps(prompt.ids[0].tolist()), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"a fresh process failed:\n{done.stderr}")
        runs.append(Run(**json.loads(done.stdout.splitlines()[-1])))
    return runs


def setting(
    prompts: Sequence[Prompt], runs: Mapping[str, Sequence[Run]], arguments: argparse.Namespace
) -> dict[str, Any]:
    lengths = [prompt.ids.shape[1] for prompt in prompts]
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    return {
        **setting_of(arguments, "offset", "max_new_tokens", "temperature"),
        "prompts": len(prompts),
        "categories": {each: sum(prompt.category == each for prompt in prompts) for each in categories},
        "prompt_tokens": {"min": min(lengths), "median": statistics.median(lengths), "max": max(lengths)},
        "new_tokens": sum(len(run.tokens) for run in runs[GREEDY]),
        "looping": [i for i in range(len(prompts)) if any(loops(each[i].tokens) for each in runs.values())],
    }


def job_of(model: PreTrainedModel, prompts: Sequence[Prompt], arguments: argparse.Namespace) -> dict[str, Any]:
    """The job for other engines."""
    ends = model.generation_config.eos_token_id
    return {
        "model": model.name_or_path,
        "prompts": [prompt.ids[0].tolist() for prompt in prompts],
        "ends": [] if ends is None else [ends] if isinstance(ends, int) else ends,
        **{name: getattr(arguments, name) for name in ("dtype", "max_new_tokens", "temperature", "threads")},
    }


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32", core=True, threads=True, quantize=True)
    add_prompt_options(parser, per_category=2)
    parser.add_argument("--warmup", type=int, default=2, help="prompts beside those measured, to warm up with")
    parser.add_argument("--cold", type=int, default=1, help="prompts of each category for fresh processes")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample, every method from the same seed")
    parser.add_argument("--methods", default=",".join(DEFAULT_METHODS), help=f"of {NAMES}, with commas between them")
    parser.add_argument("--peer", action="append", default=[], type=peer_of, help="NAME:PROGRAM, NAME:PROGRAM:MODEL")
    parser.add_argument("--cold-worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for path in (arguments.prompts, arguments.stories):
        if path is not None and not path.is_file():
            parser.error(f"no such file: {path}")
    arguments.given = list(argv)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    stay_on_cores(arguments.core, arguments.threads)
    clock = clock_of(arguments.threads)
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu", quantize=arguments.quantize)
    if arguments.cold_worker:
        ids = torch.tensor([json.load(sys.stdin)])
        model.generate(ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), max_new_tokens=4, do_sample=False)
        return print(json.dumps(asdict(of_ours(model, arguments, LookaheadConfig())(ids))))
    prompts, warming = read_prompts(tokenizer, arguments)
    methods = make_methods(model, arguments)
    for prompt in warming:
        for run in methods.values():
            run(prompt.ids)
    runs = run_in_turn(methods, prompts)
    for name in (name for name in runs if name not in (GREEDY, *LOOKUPS)):
        llm_figures.check_lossless(runs[name], runs[GREEDY], arguments.dtype, repr(name))
    categories = [prompt.category for prompt in prompts]
    places = [i for i, category in enumerate(categories) if categories[:i].count(category) < arguments.cold]
    cold = run_cold([prompts[i] for i in places], arguments) if OURS in methods else []
    for peer in arguments.peer:
        found = run_peer(peer, job_of(model, prompts, arguments))
        runs |= {name: [Run(**run) for run in each] for name, each in found.items()}
    result = {**setting(prompts, runs, arguments), "methods": llm_figures.figures_of(runs, prompts, clock)}
    result |= llm_figures.headline(result["methods"], clock)
    if cold:
        result["cold"] = llm_figures.cold_figures(cold, runs, places, arguments.dtype, clock)
    llm_figures.print_table(result, clock)
    publish(result, arguments.output)


if __name__ == "__main__":
    main()
