"""Host time of a proposal in microseconds, by context length, on real text.

    python -m bench.propose --tokenizer DIR --text novel.txt

A text is read as a prompt up to some length, then decoded one token per step, as if the model wrote it. A proposal
includes all inputs of a target pass: candidates are found and scored, and at most 32 become a tree as in the engine,
with its ancestor masks and positions. `propose` drafts from the n-grams of the request. `mixture` also drafts from the
n-grams of an earlier text of the same length, and from recycled logits, of which every node of every tree leaves eight
successors. `append_bulk_us` is the time per prompt token, `append_us` the time of a call with one new token.
One thread is used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from bench.command import parser_of, publish, seconds_of, use_one_thread
from lookahead.config import LookaheadConfig
from lookahead.drafting.proposal import Feedback, Top
from lookahead.drafting.select import merge
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.prune import Limits
from lookahead.ngram.successors import TOP
from lookahead.proposers.ngram import Memory, NgramProposer

NODES = 32
CONTEXTS = (1_024, 4_096, 16_384, 65_536, 131_072)
WORST = ("append_bulk_us", "append_us", "bytes_per_token")  # the maximum over lengths counts
_NOTHING = np.zeros(0, np.int32)
_ROOT = np.zeros(1, np.int32)


class Successors:
    """Stand-in for a target's likeliest tokens: the next token of the text first, then other tokens of the text."""

    def __init__(self, text: IntArray) -> None:
        self._text = text
        self._rng = np.random.default_rng(0)
        self._chances = np.tile(np.array([0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01], np.float32), (NODES + 1, 1))

    def after(self, tree: TokenTree, following: int) -> Top:
        """Eight tokens after every node; `following` is one of the tokens after the root."""
        tokens = self._text[self._rng.integers(len(self._text), size=(len(tree), TOP))]
        tokens[0, self._rng.integers(TOP)] = following
        return Top(tree, tokens, self._chances[: len(tree)])


def time_proposals(
    proposer: NgramProposer, text: IntArray, length: int, steps: int, successors: Successors | None
) -> tuple[list[float], list[int]]:
    """Decode `steps` tokens after a prompt of `length`; returns the microseconds and nodes of every proposal."""
    limits = Limits(NODES, NODES, LookaheadConfig().min_probability)
    took, nodes = [], []
    proposer.start(0, text[:length])
    for at in range(length, length + steps):
        start = time.perf_counter()
        draft = merge(int(text[at - 1]), [proposer.propose(0, NODES)], limits, sources=[len(proposer.sources)])
        words, positions = draft.tree.ancestor_words(), draft.tree.depths
        took.append(1e6 * (time.perf_counter() - start))
        assert len(words) == len(positions) == len(draft.tree)
        nodes.append(len(draft.tree) - 1)
        top = successors.after(draft.tree, int(text[at])) if successors is not None else None
        proposer.observe(0, Feedback(text[at : at + 1], _ROOT, _NOTHING, top), draft.placed[0])
    proposer.finish(0)
    return took, nodes


def time_calls(call: Callable[[int], object], times: int) -> list[float]:
    """Microseconds of every call; `call` receives the number of previous calls."""
    return [1e6 * seconds_of(partial(call, i), time.perf_counter) for i in range(times)]


def measure(text: IntArray, length: int, steps: int) -> dict[str, Any]:
    minimum = LookaheadConfig().min_probability
    bulk = statistics.median(time_calls(lambda _: ChainIndex().append(text[:length]), 5)) / length
    index = ChainIndex()
    index.append(text[:length])
    single = time_calls(lambda i: index.append(text[length + i : length + i + 1]), steps)
    alone = NgramProposer(["prompt"], min_probability=minimum)
    memory = Memory()
    memory.outputs.append(text[-length:])
    mixture = NgramProposer(["prompt", "outputs", "recycled"], memory, min_probability=minimum)
    ours, nodes = time_proposals(alone, text, length, steps, None)
    mixed, mixed_nodes = time_proposals(mixture, text, length, steps, Successors(text))
    return {
        "propose": percentiles(ours),
        "mixture": percentiles(mixed),
        "nodes": statistics.median(nodes),
        "mixture_nodes": statistics.median(mixed_nodes),
        "append_bulk_us": round(bulk, 4),
        "append_us": round(statistics.median(single), 3),
        "bytes_per_token": round(index.nbytes / len(index), 1),
    }


def percentiles(took: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    values: NDArray[np.float64] = np.percentile(took, (50, 99))
    return {"p50": round(float(values[0]), 2), "p99": round(float(values[1]), 2)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="a long text file, such as a novel")
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)), help="tokens, commas between")
    parser.add_argument("--steps", type=int, default=3_000, help="tokens decoded at each length (default 3000)")
    options = parser.parse_args(argv)
    use_one_thread()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    text = np.array(tokenizer(options.text.read_text(encoding="utf-8"), verbose=False)["input_ids"], np.int32)
    lengths = [int(length) for length in options.contexts.split(",")]
    if len(text) < max(lengths) + options.steps:
        parser.error(f"the text has {len(text)} tokens, and {max(lengths) + options.steps} are needed")
    measure(text, min(lengths), options.steps)  # compiles and warms up
    results = {length: measure(text, length, options.steps) for length in lengths}
    columns = ("propose", "mixture")
    head = " ".join(f"{name + ' p50/p99':>26}" for name in columns)
    print(f"{'context':>8} {head}  append bulk/call  bytes/token")
    for length, row in results.items():
        figures = " ".join(f"{row[name]['p50']:17.2f}/{row[name]['p99']:8.2f}" for name in columns)
        print(
            f"{length:8d} {figures}  {row['append_bulk_us']:7.3f}/{row['append_us']:.2f} {row['bytes_per_token']:12.1f}"
        )
    report = {
        **{
            f"{name}_{share}_us": {length: row[name][share] for length, row in results.items()}
            for name, share in (("propose", "p50"), ("propose", "p99"), ("mixture", "p50"))
        },
        **{name: max(row[name] for row in results.values()) for name in WORST},
    }
    report |= {"nodes": NODES, "steps": options.steps, "text": options.text.name, "contexts": results}
    publish(report, options.output)


if __name__ == "__main__":
    main()
