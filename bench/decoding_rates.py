"""Tokens per second of whole outputs, for transformers and lookahead, with free outputs and with dictated ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from bench.command import make_engine
from bench.gpu_steps import Replays, summary
from bench.prompts import agreed
from lookahead import LookaheadConfig
from lookahead.decoding import assembly
from lookahead.drafting.tree import IntArray, TokenTree
from lookahead.engine.engine import Engine
from lookahead.stats import total

PLAIN = LookaheadConfig(proposers=())
DRAFTS = LookaheadConfig(memory="request")
GATE_DRAFTS = LookaheadConfig(memory="request", draft="fixed", max_nodes=15)
EAGERLY = patch.object(assembly, "records_graphs", lambda _: False)
GATE_TOKENS = 48
_RAISE = 1e4  # far above any logit of a model, and still finite in half precision


class Trace(NamedTuple):
    """A recorded prompt and its output, in tokens."""

    prompt: list[int]
    output: list[int]


@contextmanager
def dictating(engine: Engine, trace: Trace, device: torch.device) -> Iterator[None]:
    """Let an engine of one row, not started yet, write the output of a trace within the block.

    The logit of the recorded next token is raised on the device, after the pass and outside the recorded graph. The
    token ids are copied to the device before the pass, so that the host does not wait. The logits of a node at depth d
    are raised for the token d + 1 places after the root, for any token of the node.
    """
    backend: Any = engine._backend
    script = np.array([*trace.prompt, *trace.output], np.int64)
    read, score = backend.read, backend.score

    def following(places: IntArray) -> Tensor:
        told = script[np.minimum(places + 1, len(script) - 1)]
        return torch.from_numpy(told)[None, :, None].to(device)

    def dictated_read(prompts: Sequence[IntArray], *args: Any, **options: Any) -> Tensor:
        told = following(np.array([len(prompts[0]) - 1]))
        logits: Tensor = read(prompts, *args, **options)
        return logits.scatter_(2, told, _RAISE)

    def dictated_score(trees: Sequence[TokenTree], *args: Any) -> Tensor:
        told = following(backend.cache.slots.lengths[0] + trees[0].depths)
        logits: Tensor = score(trees, *args)
        return logits.scatter_(2, told, _RAISE)

    backend.read, backend.score = dictated_read, dictated_score
    try:
        yield
    finally:
        del backend.read, backend.score  # they hold the backend, and with it the memory of its KV


class Step(NamedTuple):
    """One step of an engine."""

    seconds: float  # wall time
    tokens: int  # emitted
    is_replayed: bool  # its pass was a graph replay
    is_cold: bool  # it ran before a graph was recorded and checked


class Output(NamedTuple):
    """The output of an engine, its steps without the prefill, and the time of its newest graph alone, if any."""

    tokens: list[int]
    steps: list[Step]
    graph_s: float | None = None


class Ticks(BaseStreamer):
    """Times of all tokens. transformers calls it with the prompt, and then with each token once it is on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def generate(model: PreTrainedModel, ids: torch.Tensor, new: int) -> tuple[list[int], float]:
    """New tokens of greedy `model.generate`, and its tokens per second from the first to the last token."""
    ticks = Ticks()
    whole = model.generate(ids, max_new_tokens=new, do_sample=False, streamer=ticks)
    return whole[0, ids.shape[1] :].tolist(), (new - 1) / (ticks.times[-1] - ticks.times[1])


def run(engine: Engine, device: torch.device, *, by_hand: bool = False) -> Output:
    """Decode to the end. Every step ends with its tokens on the host, so wall time measures it."""
    backend: Any = engine._backend
    graphs = getattr(backend, "_graphs", None)
    replays = Replays(backend, device, by_hand=by_hand) if graphs is not None else None
    tokens: list[int] = []
    steps: list[Step] = []
    loop = engine.run()
    with engine.serving():
        tokens += next(loop)[0].tokens.tolist()
        while True:
            before = replays.count if replays else 0
            begin = time.perf_counter()
            step_outputs = next(loop, None)
            seconds = time.perf_counter() - begin
            if step_outputs is None:
                return Output(tokens, steps, replays.alone_s() if replays and replays.count else None)
            new = step_outputs[0].tokens.tolist()
            steps.append(Step(seconds, len(new), replays is not None and replays.count > before, backend.is_cold))
            tokens += new


def tokens_per_s(steps: list[Step]) -> float:
    """Tokens per second of the steps after their graph was checked; of all steps if there are none."""
    kept = [step for step in steps if not step.is_cold] or steps
    return sum(step.tokens for step in kept) / sum(step.seconds for step in kept)


def check_lossless(model: PreTrainedModel, device: torch.device) -> None:
    """The gate: recorded passes give the same tokens as eager passes, and in fp32 as `model.generate`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, 40), generator=generator).to(device)

    def tokens_of(config: LookaheadConfig, *, by_hand: bool = False) -> list[int]:
        return run(make_engine(model, ids, config, max_new_tokens=GATE_TOKENS), device, by_hand=by_hand).tokens

    recorded = tokens_of(PLAIN)
    expected = {"the same passes run by hand": tokens_of(PLAIN, by_hand=True)}
    if model.dtype == torch.float32:
        expected["model.generate"] = generate(model, ids, GATE_TOKENS)[0]
        with EAGERLY:
            expected["passes that are not recorded"] = tokens_of(PLAIN)
        expected["passes over drafts"] = tokens_of(GATE_DRAFTS)
    for name, tokens in expected.items():
        if tokens != recorded:
            same = agreed(tokens, recorded)
            sys.exit(f"not lossless: recorded passes part from {name} after {same} tokens; nothing is timed")


def compare_plain(
    model: PreTrainedModel, prompt: IntArray, new: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Measure plain decoding after a prompt: transformers, ours eager and ours with graphs, in turn."""
    ids = torch.from_numpy(prompt).long()[None].to(device)
    rates: dict[str, list[float]] = {"transformers": [], "eager": [], "graphs": []}
    host: list[float] = []
    same: list[int] = []
    for number in range(rounds + 1):
        expected, theirs = generate(model, ids, new)
        with EAGERLY:
            engine = make_engine(model, ids, PLAIN, max_new_tokens=new)
        eager = run(engine, device).steps
        output = run(make_engine(model, ids, PLAIN, max_new_tokens=new), device)
        graphs = output.steps
        if output.graph_s is None:
            sys.exit("no step was replayed from a graph; the log says why, or --max-new-tokens is too low")
        if number == 0:
            continue
        for way, figure in zip(rates, (theirs, tokens_per_s(eager), tokens_per_s(graphs)), strict=True):
            rates[way].append(figure)
        same.append(agreed(output.tokens, expected))
        host += [step.seconds - output.graph_s for step in graphs if step.is_replayed and not step.is_cold]
    return _compare(rates, "graphs") | {"host_us": summary(host, 1e6), "same_tokens": min(same)}


def compare_dictated(model: PreTrainedModel, traces: list[Trace], rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure recorded texts in turn: transformers (not dictated), ours plain, and ours with drafts."""
    rates: dict[str, list[float]] = {"transformers": [], "plain": [], "drafts": []}
    lengths = []
    for number in range(rounds + 1):
        seconds, tokens = 0.0, 0
        steps: dict[str, list[Step]] = {"plain": [], "drafts": []}
        stats = []
        for trace in traces:
            ids, new = torch.tensor([trace.prompt], device=device), len(trace.output)
            seconds += (new - 1) / generate(model, ids, new)[1]
            tokens += new - 1
            for name, config in {"plain": PLAIN, "drafts": DRAFTS}.items():
                engine = make_engine(model, ids, config, max_new_tokens=new)
                with dictating(engine, trace, device):
                    output = run(engine, device)
                if output.tokens != trace.output:
                    sys.exit(f"not lossless: {name}: the recorded text was not written; nothing is reported")
                steps[name] += output.steps
            stats += engine.stats  # the drafts'
        if number == 0:
            continue
        for way, figure in zip(rates, (tokens / seconds, *map(tokens_per_s, steps.values())), strict=True):
            rates[way].append(figure)
        lengths.append(total(stats).mean_acceptance_length)
    return _compare(rates, "drafts") | {"mean_acceptance_length": round(median(lengths), 4)}


def _compare(rates: dict[str, list[float]], ours: str) -> dict[str, Any]:
    """The rates, and the ratio of `ours` to transformers in the same round."""
    ratios = [mine / theirs for mine, theirs in zip(rates[ours], rates["transformers"], strict=True)]
    return {"tokens_per_s": {name: summary(each, 1) for name, each in rates.items()}, "speedup": summary(ratios, 1)}
