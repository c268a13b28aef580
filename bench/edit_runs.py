"""Edited files that a real model is made to write: CPU seconds of every way to know the original.

Part of `bench.edits`. The given text is dictated as in `bench.never_slower`: a hook raises the logit of the next token,
so that the model does all of its work and drafts must be right.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.baselines import IntArray
from bench.llm import of_transformers
from bench.llm_figures import CLOCKS, Run, ratio, summarize
from bench.llm_peers import timed
from bench.never_slower import ENDLESS, Case, dictating
from lookahead import LookaheadConfig
from lookahead.generation.plan import plan_request
from lookahead.hf.calls import resolve_call
from lookahead.hf.model_state import LearnedState, use_learned

GREEDY, GREEDY_WITH_FILE, NO_DRAFTS = "greedy", "greedy, file in the prompt", "no drafts"


class Given(NamedTuple):
    """A prompt, the output that is dictated behind it, and what it is expected to be; int32 `[tokens]` each."""

    prompt: IntArray
    output: IntArray
    predictions: Sequence[IntArray] = ()

    def case(self) -> Case:
        return Case(
            torch.from_numpy(np.concatenate((self.prompt, self.output)).astype(np.int64))[None], len(self.prompt)
        )


Way = Callable[[Given], Run]


def by_transformers(model: PreTrainedModel, dtype: str) -> Way:
    """Greedy decoding of transformers."""

    def run(given: Given) -> Run:
        case = given.case()
        decode = of_transformers(model, Namespace(max_new_tokens=case.new, temperature=0.0, dtype=dtype), **ENDLESS)
        with dictating(model, case, lambda: [0]):
            return decode(case.prompts)

    return run


def by_ours(model: PreTrainedModel, *, drafts: bool) -> Way:
    """Ours as it is, with hit rates and costs that are kept from edit to edit, and nothing else."""
    learned, kinds = LearnedState(), {} if drafts else {"proposers": ()}
    config = LookaheadConfig(memory="request", **kinds)

    def blocks(given: Given) -> Iterator[list[int]]:
        case = given.case()
        options = {"max_new_tokens": case.new, "do_sample": False, **ENDLESS}
        with use_learned(model, learned):
            call = resolve_call(model, case.prompts, attention_mask=torch.ones_like(case.prompts), **options)
            engine: Any = replace(plan_request(call, config), predictions=[given.predictions]).begin()
            with engine.serving(), dictating(model, case, lambda: [0]):
                for step in engine.run():
                    yield step[0].tokens.tolist()

    return lambda given: Run(**timed(blocks(given)))


def sampled(way: Way, tokens: int) -> Way:
    """A way whose cost grows evenly with the text: half of `tokens` are decoded at each end of the output.

    The mean of both ends is the time of a token, for the whole output.
    """

    def run(given: Given) -> Run:
        size = tokens // 2
        if len(given.output) <= tokens:
            return way(given)
        last = Given(np.concatenate((given.prompt, given.output[:-size])), given.output[-size:])
        runs = [way(given._replace(output=given.output[:size])), way(last)]
        left = len(given.output) - runs[0].first
        per_token = {clock: statistics.mean(each.decode(clock) / each.decoded for each in runs) for clock in CLOCKS}
        total = {clock: runs[0].prefill[clock] + per_token[clock] * left for clock in CLOCKS}
        written = [*runs[0].tokens, *given.output[size:-size].tolist(), *runs[1].tokens]
        passes = round(left * sum(each.passes for each in runs) / sum(each.decoded for each in runs))
        return Run(written, runs[0].first, passes, runs[0].prefill, total)

    return run


def measure(
    ways: Mapping[str, Way], edits: Sequence[Mapping[str, Given]], warming: Sequence[Mapping[str, Given]]
) -> dict[str, list[Run]]:
    """Every way on every edit, by name; which begins rotates. All must write what is dictated."""
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    names = list(ways)
    for at, edit in enumerate((*warming, *edits), start=-len(warming)):
        turn = at % len(names)
        for name in names[turn:] + names[:turn]:
            run = ways[name](edit[name])
            if run.tokens != edit[name].output.tolist():
                sys.exit(f"not lossless: {name} does not write the given text; nothing is reported")
            if at >= 0:
                runs[name].append(run)
        print(f"{at + 1}/{len(edits)}: {len(edit[GREEDY].output)} tokens", file=sys.stderr, flush=True)
    return runs


def figures(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """The figures of every way, over greedy decoding of the same prompt; also what useless predictions cost."""
    everywhere = range(len(runs[GREEDY]))
    found = {}
    for name, each in runs.items():
        base = GREEDY_WITH_FILE if name in (GREEDY_WITH_FILE, "prompt", "both") else GREEDY
        found[name] = {**summarize(each, runs[base], everywhere), "over": base}
        found[name]["prefill_ms"] = round(1e3 * statistics.mean(run.prefill["cpu"] for run in each), 1)
        if name == "prediction":  # a model that is to edit a file would have to read it
            whole = summarize(each, runs[GREEDY_WITH_FILE], everywhere)["end_to_end"]
            found[name]["end_to_end_over_file_in_prompt"] = whole
    pairs = list(zip(runs["none"], runs["useless"], strict=True))
    shares = {"decode": [a.decode("cpu") / b.decode("cpu") for a, b in pairs]}
    shares["end to end"] = [a.total["cpu"] / b.total["cpu"] for a, b in pairs]
    for what, each in shares.items():
        found["useless"][f"of_none, {what}"] = round(statistics.geometric_mean(each), 4)
    found["useless"]["of_none, all"] = ratio(
        *(sum(run.total["cpu"] for run in runs[name]) for name in ("none", "useless"))
    )
    return found
