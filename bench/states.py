"""Models with recurrent layers, at real sizes with random weights: passes over trees, and whole outputs.

    python -m bench.states --family qwen3_5-0.8b --dtype fp32

A pass over a tree is ours; `generate` decodes the same tokens plainly. The drafts of "edits" are right with probability
0.9 per token and calibrated, like copies of code in an edit: 8 tokens per pass at 16 nodes. The drafts of "wrong" are
never right but promise as much. `draft="auto"` sizes them. The ways run in turn on every prompt, and all must write the
tokens of `generate`. Seconds are CPU time without the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedModel, Qwen3_5TextConfig

from bench.command import in_turn, make_engine, parser_of, publish, seconds_of, setting_of, stay_on_cores, timer_of
from lookahead import LookaheadConfig
from lookahead.backend.choice import backend_for
from lookahead.drafting.proposal import Proposal
from lookahead.drafting.tree import TokenTree
from lookahead.model.model_state import LearnedState, use_learned
from tests.support.adversarial_proposers import Scripted

_QWEN = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
FAMILIES: dict[str, Any] = {
    "qwen3_5-0.8b": partial(
        Qwen3_5TextConfig,
        **{**_QWEN, "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16},
    ),
    "lfm2-350m": partial(
        Lfm2Config,
        **{"vocab_size": 65_536, "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    ),
}
TREES = ((1, 0), (4, 3), (8, 3), (8, 7), (16, 6), (16, 15))  # nodes, and depth
_RIGHT = 0.9  # probability of a right token: 8 tokens per pass at 16 nodes
_PROMPT = 64  # tokens
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tree_of(nodes: int, depth: int) -> TokenTree:
    """A tree of `nodes` nodes: a chain of length `depth`, with branches at its nodes in turn."""
    parents = [*range(-1, depth), *(node % max(depth, 1) for node in range(nodes - depth - 1))]
    return TokenTree.from_parents(np.arange(nodes) + 7, np.maximum(parents, 0))


def pass_ms(model: PreTrainedModel, prompt: torch.Tensor, trials: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds of passes after a prompt, measured in turn."""
    backend, taken = backend_for(model, rows=1, capacity=512), dict[tuple[int, int], list[float]]()
    with backend.serving():
        backend.read([prompt[0].numpy().astype(np.int32)])
        backend.commit(0, np.zeros(1, np.int32))
        for trial in range(trials + 1):
            for shape in TREES:
                seconds = seconds_of(partial(backend.score, [tree_of(*shape)]), clock)
                taken.setdefault(shape, []).extend([seconds] if trial else [])
    return {f"{nodes} of depth {depth}": 1e3 * statistics.median(taken[nodes, depth]) for nodes, depth in TREES}


def scripted(answer: Sequence[int], vocabulary: int, right: float) -> Scripted:
    """Drafts whose tokens are right with probability `right`, each promised with 0.9."""

    def offer(row: int, text: list[int], most: int) -> Proposal:
        rng = np.random.default_rng(len(text))
        wanted = np.array(answer[len(text) : len(text) + most], np.int32)
        is_right = rng.random(len(wanted)) < right
        tokens = np.concatenate([text[-1:], np.where(is_right, wanted, (wanted + 1) % vocabulary)]).astype(np.int32)
        parents = np.maximum(np.arange(len(tokens)) - 1, 0).astype(np.int32)
        return Proposal(tokens, parents, np.full(len(tokens), _RIGHT, np.float32))

    return Scripted(offer)


def decode_ms(
    model: PreTrainedModel, prompt: torch.Tensor, answer: torch.Tensor, right: float | None, clock: Callable[[], float]
) -> tuple[float, float]:
    """Milliseconds per token after the prompt, and tokens per pass; of `generate` if `right` is None."""
    causal_lm: Any = model
    ends, new = [0.0], answer.shape[1] - prompt.shape[1]
    if right is None:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        causal_lm.generate(prompt, **options, stopping_criteria=[lambda *_: bool(ends.append(clock()))])
        return 1e3 * (ends[-1] - ends[1]) / (new - 1), 1.0
    made = scripted(answer[0].tolist(), model.config.vocab_size, right)
    config = LookaheadConfig(proposers=(lambda _: made,))
    engine = make_engine(model, prompt, config, max_new_tokens=new, min_new_tokens=new)
    got = list[int]()
    with engine.serving():
        for outputs in engine.run():
            ends.append(clock())
            got += [token for output in outputs for token in output.tokens.tolist()]
    assert got == answer[0, prompt.shape[1] :].tolist(), "lossless first: a token differs"
    return 1e3 * (ends[-1] - ends[1]) / (new - 1), len(got) / len(ends[1:])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, dtype="fp32", core=True, threads=True)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5-0.8b")
    parser.add_argument("--prompts", type=int, default=5, help="of random tokens (default 5)")
    parser.add_argument("--new", type=int, default=96, help="tokens of an output (default 96)")
    arguments = parser.parse_args(argv)
    stay_on_cores(arguments.core, arguments.threads)
    clock = timer_of(arguments.threads)
    torch.manual_seed(0)
    config = FAMILIES[arguments.family](tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[arguments.dtype]).eval()
    model.generation_config.pad_token_id = 0
    prompts = torch.randint(3, config.vocab_size, (arguments.prompts, _PROMPT))
    passes = pass_ms(model, prompts[:1], 9, clock)
    for name, ms in passes.items():
        print(f"{name}: {ms:.1f} ms, {ms / passes['1 of depth 0']:.2f}x of one node")
    ways: dict[str, float | None] = {"generate": None, "edits": _RIGHT, "wrong": 0.0}
    learned = {name: LearnedState() for name in ways}  # separate, so that ways do not share drafting budgets
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for at, prompt in enumerate(prompts.split(1)):
        options: dict[str, int | bool] = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new}
        answer = model.generate(prompt, **options, do_sample=False)
        for name in in_turn(list(ways), at):
            with use_learned(model, learned[name]):
                taken[name].append(decode_ms(model, prompt, answer, ways[name], clock))
        print(at, {name: f"{each[-1][0]:.0f} ms, {each[-1][1]:.1f} a pass" for name, each in taken.items()})
    means = {name: tuple(np.mean(each, 0).round(2).tolist()) for name, each in taken.items()}
    arguments.model = f"{arguments.family}, random weights"
    report = {
        "pass_ms": {name: round(ms, 1) for name, ms in passes.items()},
        "ms_per_token": {name: ms for name, (ms, _) in means.items()},
        "tokens_per_pass": {name: tokens for name, (_, tokens) in means.items()},
        "speedup": {name: round(means["generate"][0] / ms, 2) for name, (ms, _) in means.items()},
    }
    publish({**setting_of(arguments, "prompts"), **report}, arguments.output)


if __name__ == "__main__":
    main()
