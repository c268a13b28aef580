"""Real edits: how fast a file is written again of which the most is known, as the original or only as a prediction.

    python -m bench.edits --replay --half held-out
    python -m bench.edits --replay --half dev --limit 200 --nodes 16,64
    python -m bench.edits --dtype bf16 --half held-out

An edit is a commit of a history (`bench.history`): its subject is the instruction, and the output is the file as it was
afterwards. `prompt` has the file before in the prompt, `prediction` only as what the output is expected to be, `both`
has both, `none` neither, and `useless` expects another file. Commits are split by their hashes: `dev` is there to
choose by, `held-out` to confirm.

A model is made to write the edited file: every way in turn on every edit, on one core, beside greedy decoding of
transformers and ours without drafts. The gate comes first: all must write the given text, or no figure is printed.
Seconds are the processor's. Of plain decoding `--plain-tokens` are decoded, half of them at each end of the output,
and their mean is the time of a token; `none` and `useless` write the first `--useless-tokens` alone. Speedups are over
greedy decoding of the same prompt; `of_none` is the time without a prediction over that with a useless one.

With `--replay` no model runs and the recorded output is its choice: tokens a step by draft nodes, beside transformers'
prompt lookup, the longest suffix (vLLM) and the first occurrence (SAM decoding), which have the file in the prompt and
draft chains as long. Memory is fresh for each edit and hit rates are learned from the first on; `promised` and
`accepted` say what drafts were worth after the first 2,000 tokens.
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
from lookahead.hf.loading import DEFAULT_MODEL, load

WAYS = {
    "prompt": (True, None),
    "prediction": (False, "before"),
    "both": (True, "before"),
    "none": (False, None),
    "useless": (False, "other"),
}
"""Whether the file before stands in the prompt, and what the output is expected to be."""


class Task(NamedTuple):
    """The token ids of an edit, int32 `[tokens]` each."""

    short: IntArray  # the prompt without the file
    long: IntArray  # with it
    after: IntArray
    before: IntArray
    other: IntArray  # the file before of another edit

    def pair(self, way: str) -> Pair:
        """Prompt, output, and what is expected."""
        has_file, expected = WAYS[way]
        pair = self.long if has_file else self.short, self.after
        return pair if expected is None else (*pair, getattr(self, expected))


def read_tasks(edits: Sequence[Edit], tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Task]:
    """The tasks of the first edits, each with the file of the next edit of another file as the useless one."""

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
    """Figures of every method at so many draft nodes a step."""
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
    """Figures of every way on a real model; the beginning of another task warms up."""
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
