"""Host time of a proposal in microseconds, by context length, on real text.

    python -m bench.propose --tokenizer DIR --text novel.txt

A text is read as a prompt up to some length, then decoded one token per step, as if the model wrote it. A proposal
includes all inputs of a target pass: candidates are found and scored, and at most 32 become a tree as in the engine,
with its ancestor masks and positions. `propose` drafts from the n-grams of the request. `mixture` also drafts from the
n-grams of an earlier text of the same length, and from recycled logits, of which every node of every tree leaves eight
successors. `append_us` is the time per prompt token. One thread is used. `step` is the CPU time of whole steps of the
engine without their pass and without reading its logits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.command import parser_of, publish, seconds_of, use_one_thread
from lookahead.config import LookaheadConfig
from lookahead.decoding.plan import plan_request
from lookahead.drafting.proposal import Feedback, Top
from lookahead.drafting.select import merge
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.engine import engine
from lookahead.model.calls import ResolvedCall
from lookahead.ngram.chains import ChainIndex
from lookahead.ngram.prune import Limits
from lookahead.ngram.successors import TOP
from lookahead.proposers.ngram import Memory, NgramProposer

NODES = 32
CONTEXTS = "1024,4096,16384,65536,131072"
_CHANCES = np.tile(np.array([0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01], np.float32), (NODES + 1, 1))
_NOTHING, _ROOT = np.zeros(0, np.int32), np.zeros(1, np.int32)


def likeliest(text: IntArray, tree: TokenTree, following: int, rng: np.random.Generator) -> Top:
    """A stand-in for a target's likeliest tokens: others of the text, and after the root the next token among them."""
    tokens = text[rng.integers(len(text), size=(len(tree), TOP))]
    tokens[0, rng.integers(TOP)] = following
    return Top(tree, tokens, _CHANCES[: len(tree)])


def time_proposals(
    proposer: NgramProposer, text: IntArray, length: int, steps: int, recycles: bool
) -> dict[str, float]:
    """Decode `steps` tokens after a prompt of `length`: microseconds of a proposal, and its median nodes."""
    limits = Limits(NODES, NODES, LookaheadConfig().min_probability)
    taken, nodes, rng = list[float](), list[int](), np.random.default_rng(0)
    proposer.start(0, text[:length])
    for at in range(length, length + steps):
        begin = time.perf_counter()
        draft = merge(int(text[at - 1]), [proposer.propose(0, NODES)], limits, sources=[len(proposer.sources)])
        words, positions = draft.tree.ancestor_words(), draft.tree.depths
        taken.append(1e6 * (time.perf_counter() - begin))
        assert len(words) == len(positions) == len(draft.tree)
        nodes.append(len(draft.tree) - 1)
        top = likeliest(text, draft.tree, int(text[at]), rng) if recycles else None
        proposer.observe(0, Feedback(text[at : at + 1], _ROOT, _NOTHING, top), draft.placed[0])
    proposer.finish(0)
    middle, slowest = np.percentile(taken, (50, 99)).round(2).tolist()
    return {"p50_us": middle, "p99_us": slowest, "nodes": median(nodes)}


def time_steps(config: LookaheadConfig, prompts: int = 180) -> dict[str, float]:
    """Microseconds of steps over a small random model without their pass: lower quartile and median."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model, rng, taken = LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes)).eval(), np.random.default_rng(0), []
    clock, read, apart = time.thread_time, engine.read_scores, [0.0]

    def aside(work: Any) -> Any:
        def timed(*args: Any) -> Any:
            begin = clock()
            result = work(*args)
            apart[0] += clock() - begin
            return result

        return timed

    with patch.object(engine, "read_scores", aside(read)):
        for _ in range(prompts):
            words = rng.integers(10, 300, (6, 8))
            ids = torch.tensor(words[rng.integers(6, size=40)].reshape(1, -1))
            options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
            call = ResolvedCall.resolve(model, ids, **options)
            decoding: Any = plan_request(call, config).begin()
            decoding._backend.score = aside(decoding._backend.score)
            with decoding.serving():
                decoding.admit(decoding.batch)
                while decoding._rows:
                    begin, apart[0] = clock(), 0.0
                    decoding.step()
                    taken.append(1e6 * (clock() - begin - apart[0]))
    quarter, middle = np.percentile(taken[len(taken) // 4 :], (25, 50)).round(1).tolist()
    return {"p25_us": quarter, "p50_us": middle}


def measure(text: IntArray, length: int, steps: int) -> dict[str, Any]:
    minimum, memory = LookaheadConfig().min_probability, Memory()
    memory.outputs.append(text[-length:])
    alone = NgramProposer(["prompt"], min_probability=minimum)
    mixture = NgramProposer(["prompt", "outputs", "recycled"], memory, min_probability=minimum)
    appends = [seconds_of(lambda: ChainIndex().append(text[:length]), time.perf_counter) for _ in range(5)]
    return {
        "propose": time_proposals(alone, text, length, steps, recycles=False),
        "mixture": time_proposals(mixture, text, length, steps, recycles=True),
        "append_us": round(1e6 * median(appends) / length, 4),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="a long text file, such as a novel")
    parser.add_argument("--contexts", default=CONTEXTS, help=f"tokens, commas between (default {CONTEXTS})")
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
    ways = {"16 nodes": {"draft": "fixed", "max_nodes": 16}, "auto": {}, "plain": {"proposers": ()}}
    torch.manual_seed(20)
    step = {name: time_steps(LookaheadConfig(memory="request", **way)) for name, way in ways.items()}
    for name, figures in {**results, **step}.items():
        print(name, figures)
    settings = {"steps": options.steps, "most_nodes": NODES, "text": options.text.name}
    publish({**settings, "contexts": results, "step": step}, options.output)


if __name__ == "__main__":
    main()
