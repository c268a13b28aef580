"""Repetitive traffic: tokens per step with drafts on recorded outputs, by kind of traffic.

    python -m bench.traces traces.jsonl --record --chats mt_bench.jsonl --stories squality.jsonl --problems gsm8k.jsonl
    python -m bench.traces traces.jsonl --nodes 16,32,64

With `--record` a model first writes the outputs of the requests in `bench.trace_recording`. No model runs in the
replay: the recorded output stands for its choices, and recycled logits are not used. Consecutive requests of one prompt
are rows of one call and step together; all others are decoded in file order. Every method remembers earlier requests of
the same kind. `lookahead` is ours, from prompts and outputs. `suffix tree` is SuffixDecoding by the package
`arctic-inference`, left out if it is not installed. Both draft trees of up to `--nodes` nodes. `prompt lookup`
(transformers) and `longest suffix` (vLLM) draft chains of the same size.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bench import baselines
from bench.baselines import ChainRule
from bench.command import parser_of, publish
from bench.datastores import SuffixTrees
from bench.replay import Pair, ours, replay_batches
from bench.trace_recording import add_recording_options, record_to
from lookahead.drafting.proposal import Proposer

OURS, PEER = "lookahead", "suffix tree"


def read_traces(path: Path) -> dict[str, list[list[Pair]]]:
    """The batches of every kind, in file order."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        request = json.loads(line)
        kinds.setdefault(request["category"], []).append(request)
    return {
        kind: [
            [(np.array(each["prompt"], np.int32), np.array(each["output"], np.int32)) for each in rows]
            for _, rows in groupby(requests, key=lambda request: (request["group"], request["prompt"]))
        ]
        for kind, requests in kinds.items()
    }


def makers(nodes: int) -> dict[str, Callable[[], Proposer]]:
    """Factories of the proposer of every call, by method. Memory is kept from call to call."""
    methods: dict[str, Callable[[], Proposer]] = {OURS: ours(["prompt", "outputs"], shared=True)}
    if find_spec("arctic_inference") is not None:
        trees = SuffixTrees()
        methods[PEER] = lambda: trees
    methods["prompt lookup"] = partial(ChainRule, baselines.prompt_lookup(nodes))
    methods["longest suffix"] = partial(ChainRule, baselines.longest_suffix(length=nodes))
    return methods


def figures(traces: dict[str, list[list[Pair]]], nodes: int) -> dict[str, dict[str, float]]:
    """Tokens per step of every method by kind, their geometric mean, and the ratio of ours to SuffixDecoding."""
    rates: dict[str, dict[str, float]] = {}
    for kind, batches in traces.items():
        for name, make in makers(nodes).items():
            tally = replay_batches(make, batches, nodes)
            rates.setdefault(name, {})[kind] = tally["tokens"] / tally["steps"]
    for each in rates.values():
        each["mean"] = float(np.exp(np.mean(np.log(list(each.values())))))
    if PEER in rates:
        rates["ratio"] = {kind: rates[OURS][kind] / rates[PEER][kind] for kind in rates[OURS]}
    return {name: {kind: round(rate, 3) for kind, rate in each.items()} for name, each in rates.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=Path, help="JSON lines")
    parser.add_argument("--nodes", default="16,32,64", help="draft nodes a step, commas between (default 16,32,64)")
    add_recording_options(parser)
    options: Namespace = parser.parse_args(argv)
    if options.record:
        record_to(options.traces, options)
    traces, results = read_traces(options.traces), {}
    for nodes in map(int, options.nodes.split(",")):
        results[nodes] = figures(traces, nodes)
        print(f"{nodes} nodes", *traces, "mean", sep="\t")
        for name, rates in results[nodes].items():
            print(f"{name:15}", *(f"{rate:.3f}" for rate in rates.values()), sep="\t", flush=True)
    counted = {
        kind: {"requests": sum(map(len, batches)), "tokens": sum(len(output) for each in batches for _, output in each)}
        for kind, batches in traces.items()
    }
    publish({"traces": counted, "nodes": results}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
