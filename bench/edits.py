"""Real edits: the speed of rewriting a file whose original is in the prompt or given as a prediction.

    python -m bench.edits --replay --half held-out
    python -m bench.edits --replay --half dev --limit 200 --nodes 16,64
    python -m bench.edits --dtype bf16 --half held-out

An edit is a commit of a repository (`bench.history`). The instruction is the subject of the commit, and the output is
the edited file. `prompt` has the original file in the prompt, `prediction` has it as a prediction of the output, `both`
has both, `none` has neither, and `useless` predicts another file. Commits are split by their hashes into `dev`, for
choosing settings, and `held-out`, for confirming them.

A model is made to write the edited file in every way in turn, on one core, along with greedy decoding of transformers
and ours without drafts. The gate comes first: all must write the given text, or no figure is printed. Seconds are CPU
time. Plain decoding decodes `--plain-tokens`, half of them at each end of the output; their mean is the time per token.
`none` and `useless` write only the first `--useless-tokens`. Speedups are over greedy decoding of the same prompt.
`of_none` is the time without a prediction over the time with a useless one.

With `--replay` no model runs; the recorded output stands for the model's choices. Figures are tokens per step by draft
nodes, along with transformers' prompt lookup, the longest suffix (vLLM) and the first occurrence (SAM decoding), which
have the file in the prompt and draft chains of the same size. Memory is fresh for each edit. Hit rates are learned from
the first edit on. `promised` and `accepted` count drafted tokens after the first 2,000 tokens.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench import baselines
from bench.baselines import ChainRule, IntArray
from bench.command import parser_of, publish, setting_of, stay_on_cores
from bench.edit_runs import GREEDY_WITH_FILE, NO_DRAFTS, Given, by_ours, by_transformers, measure, sampled
from bench.edit_runs import figures as figures_of_runs
from bench.history import HALVES, Edit, read_edits
from bench.llm import as_chat
from bench.llm_figures import GREEDY
from bench.replay import Pair, ours, replay
from lookahead.drafting.proposal import Proposer
from lookahead.loading.loading import DEFAULT_MODEL, load

WAYS = {
    "prompt": (True, None),
    "prediction": (False, "before"),
    "both": (True, "before"),
    "none": (False, None),
    "useless": (False, "other"),
}
"""For each way, whether the original file is in the prompt, and the prediction of the output."""


class Task(NamedTuple):
    """The token ids of an edit, int32 `[tokens]` each."""

    short: IntArray  # the prompt without the file
    long: IntArray  # the prompt with the file
    after: IntArray
    before: IntArray
    other: IntArray  # the original file of another edit

    def pair(self, way: str) -> Pair:
        """Prompt, output, and prediction."""
        has_file, expected = WAYS[way]
        pair = self.long if has_file else self.short, self.after
        return pair if expected is None else (*pair, getattr(self, expected))


def read_tasks(edits: Sequence[Edit], tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Task]:
    """The tasks of the first edits. The useless prediction is the file of the next edit of another file."""

    def ids(text: str) -> IntArray:
        return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)

    tasks = []
    for at, edit in enumerate(islice(edits, limit)):
        other = next(each for each in (*edits[at + 1 :], *edits[:at]) if each.path != edit.path)
        order = f"{edit.instruction}\n\nWrite the whole file {edit.path} with this change."
        prompts = (order, f"{order} The file before:\n\n{edit.before}")
        short, long = (as_chat(prompt, tokenizer)[0].numpy().astype(np.int32) for prompt in prompts)
        tasks.append(Task(short, long, *map(ids, (edit.after, edit.before, other.before))))
    return tasks


def replayed(tasks: Sequence[Task], nodes: int) -> dict[str, dict[str, float]]:
    """Figures of every method with `nodes` draft nodes per step."""
    rules: dict[str, Callable[[int], baselines.Draft]] = {
        "prompt lookup": baselines.prompt_lookup,
        "longest suffix": lambda length: baselines.longest_suffix(length=length),
        "first occurrence": baselines.first_occurrence,
    }
    methods: dict[str, tuple[str, Callable[[], Proposer]]] = {
        name: ("prompt", partial(ChainRule, rule(nodes))) for name, rule in rules.items()
    }
    methods |= {way: (way, ours(["prompt", "prediction"], shared=False)) for way in WAYS}
    found = {}
    for name, (way, make) in methods.items():
        tally = replay(make, [task.pair(way) for task in tasks], nodes)
        found[name] = figures(tally)
        print(f"{nodes:4d} nodes, {name:17}" + "".join(f" {what} {each:10.3f}" for what, each in found[name].items()),
              flush=True)  # fmt: skip
    return found


def figures(tally: Counter[str]) -> dict[str, float]:
    per_step = {f"{what}_per_step": round(tally[what] / max(1, tally["steps"]), 3) for what in ("tokens", "drafted")}
    return {**per_step, "promised": round(tally["promised"], 1), "accepted": tally["accepted"]}


def dictated(tasks: Sequence[Task], warming: Task, model: PreTrainedModel, arguments: Namespace) -> dict[str, Any]:
    """Figures of every way on a real model. The beginning of the task `warming` warms up."""
    plain, few = (partial(sampled, tokens=arguments.plain_tokens), arguments.useless_tokens)
    greedy = plain(by_transformers(model))
    ways = {GREEDY: greedy, GREEDY_WITH_FILE: greedy, NO_DRAFTS: plain(by_ours(model, proposers=()))}
    ways |= {way: by_ours(model) for way in WAYS}

    def given(task: Task, most: int | None = None) -> dict[str, Given]:
        task = task._replace(after=task.after[:most])
        each = {name: Given(task.long if name == GREEDY_WITH_FILE else task.short, task.after) for name in ways}
        for way in WAYS:
            prompt, output, *predictions = task.pair(way)
            each[way] = Given(prompt, output[:few] if way in ("none", "useless") else output, predictions)
        return each

    found = figures_of_runs(measure(ways, [given(task) for task in tasks], [given(warming, few)]))
    for name, each in found.items():
        print(name, each)
    return {**setting_of(arguments, "plain_tokens", "useless_tokens"), "ways": found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32", core=True)
    parser.add_argument("--replay", action="store_true", help="run no model")
    parser.add_argument("--half", choices=HALVES, default="dev", help="which commits (default dev)")
    parser.add_argument("--limit", type=int, help="how many edits (default 5; all of a replay)")
    parser.add_argument("--nodes", default="16,64", help="draft nodes a step of a replay (default 16,64)")
    parser.add_argument("--plain-tokens", type=int, default=64, help="of plain decoding (default 64)")
    parser.add_argument("--useless-tokens", type=int, default=256, help="without the original (default 256)")
    parser.add_argument("--repository", type=Path, default=Path(), help="whose history (default: the folder's)")
    parser.add_argument("--revision", default="HEAD", help="its newest commit (default HEAD)")
    arguments = parser.parse_args(argv)
    stay_on_cores(arguments.core)
    edits = read_edits(arguments.repository, arguments.half, arguments.revision)
    if len(edits) < 2:
        sys.exit(f"{arguments.repository.absolute()}: {len(edits)} edits in the half {arguments.half!r}, 2 are needed")
    model, tokenizer = load(arguments.model, dtype=arguments.dtype, device="cpu")
    if arguments.replay:
        tasks = read_tasks(edits, tokenizer, arguments.limit)
        found = {"nodes": {nodes: replayed(tasks, nodes) for nodes in map(int, arguments.nodes.split(","))}}
    else:
        *tasks, warming = read_tasks(edits, tokenizer, (arguments.limit or 5) + 1)
        found = dictated(tasks, warming, model, arguments)
    result: dict[str, Any] = {"half": arguments.half, "edits": len(tasks), "tokens": sum(len(t.after) for t in tasks)}
    result |= found
    publish(result, arguments.output)


if __name__ == "__main__":
    main()
