"""Tokens per pass of each source of drafts on a real model, alone and in combination.

    python -m bench.ablation --model DIR --prompts spec_bench.jsonl --stories squality_dev.jsonl --nodes 31
    python -m bench.ablation --model DIR --prompts spec_bench.jsonl --memory shared --sources "prompt,prompt+recycled"

Every prompt is decoded with at most `--nodes` draft nodes per step and without a cost model, so that the figures do not
depend on the machine. `window W N G` is the lookahead branch with these sizes. `heads DIR` are trained heads.

With `--memory shared` each combination remembers the previous prompts; with `request` it remembers none, and with a
memory file the content of the file. "Before loops" counts the tokens up to the place where 16 tokens of an output
repeat, since loops flatter n-grams. In fp32 a token that differs from `model.generate` ends the run.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import chain, product
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from bench.command import make_engine, parser_of, publish, setting_of, use_one_thread
from bench.llm import add_prompt_options, read_prompts, sampling
from bench.llm_figures import Prompt
from bench.prompts import loop_start
from lookahead import Heads, LookaheadConfig
from lookahead.decoding.assembly import ProposerState
from lookahead.loading.loading import DEFAULT_MODEL, load
from lookahead.model.model_state import LearnedState, use_learned

SOURCES = "prompt,recycled,prompt+outputs+recycled,prompt+outputs+recycled+window 5 3 5,window 7 5 7,window 15 5 15"


class Decoded(NamedTuple):
    """One output."""

    category: str  # of its prompt
    tokens: list[int]
    steps: list[int]  # tokens of each pass; the first is the prefill
    drafted: int  # draft nodes of all passes

    def rate(self, end: int | None = None) -> tuple[int, int]:
        """Tokens up to `end` and the passes that began before it, without the prefill."""
        limit = len(self.tokens) if end is None else end
        begin, passes = self.steps[0], 0
        for step in self.steps[1:]:
            if begin >= limit:
                break
            begin += step
            passes += 1
        return max(0, min(limit, begin) - self.steps[0]), passes


def config_of(name: str, nodes: int, memory: Any) -> LookaheadConfig:
    """The configuration of sources joined by `+`."""
    sources = name.split("+")
    options: dict[str, Any] = {
        "proposers": [Heads(source[6:]) if source.startswith("heads ") else source for source in sources]
    }
    for at, source in enumerate(sources):
        if source.startswith("window "):
            options["proposers"][at], options["window"] = "jacobi", tuple(map(int, source.split()[1:]))
    if memory not in ("request", "shared") and "recycled" not in sources:
        memory = "shared"
    return LookaheadConfig(draft="fixed", max_nodes=nodes, min_probability=0.0, memory=memory, **options)


def decode(model: PreTrainedModel, prompt: Prompt, options: Namespace, config: LookaheadConfig) -> Decoded:
    """Decode one prompt, and record the tokens of each pass."""
    engine = make_engine(model, prompt.ids, config, **sampling(options))
    steps = [output.tokens.tolist() for output in chain.from_iterable(engine.run())]
    tokens = list(chain.from_iterable(steps))
    return Decoded(prompt.category, tokens, [len(step) for step in steps], engine.stats[0].drafted_tokens)


def decode_all(
    model: PreTrainedModel, prompts: Sequence[Prompt], options: Namespace, config: LookaheadConfig
) -> list[Decoded]:
    """Decode prompts one after the other, each with a fresh read of the memory file if the configuration has one."""
    learned, outputs = LearnedState(), []
    for prompt in prompts:
        learned.of(ProposerState, ProposerState).files.clear()  # the file is read again
        with use_learned(model, learned):
            outputs.append(decode(model, prompt, options, config))
    return outputs


def figures(outputs: Sequence[Decoded]) -> dict[str, Any]:
    """Tokens per pass: total, before loops and by category; and draft nodes per pass."""

    def rate(counts: Sequence[tuple[int, int]]) -> float:
        return round(sum(tokens for tokens, _ in counts) / max(1, sum(passes for _, passes in counts)), 3)

    categories = dict.fromkeys(output.category for output in outputs)
    passes = sum(output.rate()[1] for output in outputs)
    return {
        "tokens_per_pass": rate([output.rate() for output in outputs]),
        "before_loops": rate([output.rate(loop_start(output.tokens)) for output in outputs]),
        "drafted_per_pass": round(sum(output.drafted for output in outputs) / max(1, passes), 2),
        **{name: rate([each.rate() for each in outputs if each.category == name]) for name in categories},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, model=DEFAULT_MODEL, dtype="fp32")
    add_prompt_options(parser, per_category=1)
    parser.add_argument("--nodes", default="31", help="most draft nodes a step, commas between (default 31)")
    parser.add_argument("--memory", default="request", help="request, shared, or a memory file (default request)")
    parser.add_argument("--sources", default=SOURCES, help=f"combinations (default {SOURCES})")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample, from the same seed for every source")
    options = parser.parse_args(argv)
    use_one_thread()
    model, tokenizer = load(options.model, dtype=options.dtype, device="cpu")
    prompts, _ = read_prompts(tokenizer, options)
    plain = LookaheadConfig(proposers=())
    expected = [decode(model, each, options, plain).tokens for each in prompts]
    results: dict[str, Any] = {}
    budgets = list(map(int, options.nodes.split(",")))
    for name, nodes in product(options.sources.split(","), budgets):
        outputs = decode_all(model, prompts, options, config_of(name, nodes, options.memory))
        differing = [i for i, output in enumerate(outputs) if output.tokens != expected[i]]
        if differing and options.dtype == "fp32":
            print(f"outputs of {name} differ from those without drafts: {differing}")
            return 1
        key = name if len(budgets) == 1 else f"{name} @ {nodes}"
        results[key] = figures(outputs) | {"identical": len(prompts) - len(differing)}
        print(key, results[key], flush=True)
    setting = setting_of(options, "max_new_tokens", "memory", "temperature", "per_category", "offset")
    publish({**setting, "prompts": len(prompts), "nodes": budgets, "sources": results}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
