"""Edited files written by a real model: CPU seconds of every way to provide the original.

Part of `bench.edits`. A logits processor dictates the text to both transformers and ours. The model does all of its
work, ours learns from the model's own logits, and drafts must match the text.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.baselines import IntArray
from bench.command import make_engine
from bench.llm import of_transformers
from bench.llm_figures import CLOCKS, GREEDY, Run, ratio, summarize
from bench.llm_peers import timed
from bench.never_slower import ENDLESS
from lookahead import LookaheadConfig
from lookahead.model.model_state import LearnedState, use_learned

GREEDY_WITH_FILE, NO_DRAFTS = "greedy, file in the prompt", "no drafts"
_RAISE = 1e4  # far above any logit of a model, and still finite


class Given(NamedTuple):
    """A prompt, its dictated output, and the prediction of the output; int32 `[tokens]` each."""

    prompt: IntArray
    output: IntArray
    predictions: Sequence[IntArray] = ()

    @property
    def ids(self) -> torch.Tensor:
        return torch.from_numpy(self.prompt.astype(np.int64))[None]

    def options(self) -> dict[str, Any]:
        """Options of `model.generate`."""
        return {"max_new_tokens": len(self.output), "logits_processor": [self._dictate], **ENDLESS}

    def _dictate(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, int(self.output[ids.shape[1] - len(self.prompt)])] = _RAISE
        return scores


Way = Callable[[Given], Run]


def by_transformers(model: PreTrainedModel) -> Way:
    """Greedy decoding of transformers."""

    def run(given: Given) -> Run:
        options = given.options()
        limit = Namespace(max_new_tokens=options.pop("max_new_tokens"), temperature=0.0)
        return of_transformers(model, limit, **options)(given.ids)

    return run


def by_ours(model: PreTrainedModel, **options: Any) -> Way:
    """Ours, with only hit rates and costs kept from edit to edit; `options` are options of its config."""
    learned, config = LearnedState(), LookaheadConfig(memory="request", **options)

    def blocks(given: Given) -> Iterator[list[int]]:
        with use_learned(model, learned):
            engine = make_engine(model, given.ids, config, [given.predictions], **given.options())
            with engine.serving():  # as `lookahead.decode` does
                for step in engine.run():
                    yield step[0].tokens.tolist()

    return lambda given: Run(**timed(blocks(given)))


def sampled(way: Way, tokens: int) -> Way:
    """Sample a way whose cost per token grows linearly: decode half of `tokens` at each end of the output.

    The mean of both ends is the time per token of the whole output.
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
    """Run every way on every edit, in rotating order; returns runs by name. All must write the dictated text."""
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
    """The figures of every way, over greedy decoding of the same prompt, and the cost of useless predictions."""
    everywhere, found = range(len(runs[GREEDY])), {}
    for name, each in runs.items():
        base = GREEDY_WITH_FILE if name in (GREEDY_WITH_FILE, "prompt", "both") else GREEDY
        found[name] = {**summarize(each, runs[base], everywhere), "over": base}
        found[name]["prefill_ms"] = round(1e3 * statistics.mean(run.prefill["cpu"] for run in each), 1)
    # Without a prediction, a model that edits a file must read it.
    whole = summarize(runs["prediction"], runs[GREEDY_WITH_FILE], everywhere)["end_to_end"]
    found["prediction"]["end_to_end_over_file_in_prompt"] = whole
    without, beside = runs["none"], runs["useless"]
    for what, seconds in (("decode", Run.decode), ("end to end", lambda run, clock: run.total[clock])):
        found["useless"][f"of_none, {what}"] = ratio(
            *(sum(seconds(run, "cpu") for run in each) for each in (without, beside))
        )
    return found
