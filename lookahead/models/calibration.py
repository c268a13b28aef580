"""Measure what a step costs by its number of nodes, and what the machine would allow."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.drafting.cost_model import StepCost
from lookahead.drafting.tree import TokenTree
from lookahead.errors import ConfigError, UnsupportedModelError
from lookahead.models.support import support_of
from lookahead.models.target import Target, input_device
from lookahead.verification.topk import likeliest

NODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128)
PADDED_NODES = (1, 2, 4, 8, 16, 32, 64)  # what compiled steps are padded to
CONTEXTS = (256,)
_ROUNDS = 9
_WARM_UPS = 2
QUICK_NODES = (1, 2, 4, 8, 16, 32, 64)
_QUICK_CONTEXT = 64  # reading it takes longer than the sweep where it is long
_QUICK_ROUNDS = 3
QUICK_S = 3.0  # what a quick sweep is to take; of a slow model each size is taken at least once after a warm-up
LONGEST_QUICK_S = 30.0
_DEARER = 2.0  # than a plain step, what a step of a sweep is taken to be before any was measured

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Machine:
    """What a device was measured to do.

    Attributes:
        flops: Most floating-point operations a second, of a large matrix product.
        bytes_per_s: Bytes read and written a second by a copy of a buffer as large as the weights.
    """

    flops: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """One number of nodes.

    Attributes:
        nodes: Nodes of the tree, its root counted.
        seconds: Median of the rounds.
        flop: Floating-point operations of the step, by the number of parameters and the context.
        moved: Bytes it has to read and write: weights once, KV once. Of a mixture of experts all weights are
            counted, which is too many for few nodes.
        bound_s: What the machine would need at its best for either, whichever is longer.
        break_even: Tokens a step must emit to be as fast as plain decoding.
    """

    nodes: int
    seconds: float
    flop: float
    moved: float
    bound_s: float
    break_even: float

    @property
    def intensity(self) -> float:
        """Floating-point operations per byte."""
        return self.flop / self.moved

    @property
    def acceptance_needed(self) -> float:
        """Share of the drafted nodes that must be accepted to break even."""
        return max(0.0, self.break_even - 1.0) / (self.nodes - 1) if self.nodes > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one length of context was measured to cost.

    Attributes:
        context: Tokens in the cache.
        points: One per number of nodes.
    """

    context: int
    points: list[Point]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sweeps of a model on a machine."""

    machine: Machine
    sweeps: list[Sweep]

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready."""
        return {
            "machine": asdict(self.machine),
            "sweeps": [
                {
                    "context": sweep.context,
                    "points": [
                        {
                            **asdict(point),
                            "intensity": round(point.intensity, 3),
                            "acceptance_needed": round(point.acceptance_needed, 4),
                        }
                        for point in sweep.points
                    ],
                }
                for sweep in self.sweeps
            ],
        }


def calibrate(
    model: PreTrainedModel,
    cost: StepCost,
    *,
    contexts: Sequence[int] = CONTEXTS,
    nodes: Sequence[int] = NODES,
    compiles: bool = False,
    clock: Clock = time.perf_counter,
) -> Calibration:
    """Sweep the numbers of nodes for one row at some lengths of context, and teach the costs to `cost`.

    A few seconds for a small model; a step of every size is taken 9 times, in turn, and medians count.

    Args:
        model: A causal language model.
        cost: Learns what was measured.
        contexts: Tokens in the cache, each at least 1.
        nodes: Nodes of a tree, the root counted; 1 among them.
        compiles: Whether the model's passes are compiled.
        clock: Seconds.

    Raises:
        ConfigError: A context or a number of nodes is out of its range.
        UnsupportedModelError: The model cannot verify drafts.
    """
    most = max(nodes, default=0)
    if min(nodes, default=0) < 1 or 1 not in nodes:
        raise ConfigError(f"nodes must be positive and hold 1, which all others are compared with, got {list(nodes)}")
    for context in contexts:
        if context < 1:
            raise ConfigError(f"context must be at least 1 token, got {context}")
    machine = measure_machine(model, clock)
    sweeps = []
    for context in contexts:
        seconds, kv_bytes = _sweep(model, context, nodes, compiles, clock, rounds=_ROUNDS)
        cost.calibrate(nodes, seconds, rows=1, context=context + most)
        plain = seconds[nodes.index(1)]
        points = [
            _point(model, machine, context, kv_bytes, n, spent, plain) for n, spent in zip(nodes, seconds, strict=True)
        ]
        sweeps.append(Sweep(context, points))
    return Calibration(machine, sweeps)


def calibrate_quickly(
    model: PreTrainedModel, cost: StepCost, *, within_s: float = LONGEST_QUICK_S, clock: Clock = time.perf_counter
) -> bool:
    """Teach costs what few steps tell, of few sizes and over a short context, where that takes no longer than allowed.

    Every size is taken three times, or as often as fits into 3 seconds, but at least once: some 30 plain steps.

    Args:
        model: A causal language model.
        cost: Learns what was measured.
        within_s: Seconds it may take at most; what it would take is judged by a plain step.
        clock: Seconds.

    Returns:
        Whether anything was learned: not of a slow model, and not of one that cannot verify drafts.
    """
    config: Any = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or _QUICK_CONTEXT
    context = min(_QUICK_CONTEXT, positions - max(QUICK_NODES) - 2)
    if context < 1:
        return False
    try:
        seconds, _ = _sweep(model, context, QUICK_NODES, False, clock, rounds=_QUICK_ROUNDS, within_s=within_s)
    except (UnsupportedModelError, ConfigError):
        return False
    if seconds:
        cost.calibrate(QUICK_NODES, seconds, rows=1, context=context + max(QUICK_NODES))
    return bool(seconds)


def measure_machine(model: PreTrainedModel, clock: Clock = time.perf_counter) -> Machine:
    """The most the model's device does in the model's dtype, by a matrix product and by a copy."""
    device, dtype = input_device(model), model.dtype
    side = 8192 if device.type == "cuda" else 1024
    left = torch.ones(side, side, dtype=dtype, device=device)
    weights = sum(each.nbytes for each in model.parameters())
    buffer = torch.ones(min(max(weights, 1 << 24), 1 << 30), dtype=torch.uint8, device=device)
    copy = torch.empty_like(buffer)
    product_s = min(_timed(lambda: left @ left, device, clock) for _ in range(4))
    copy_s = min(_timed(lambda: copy.copy_(buffer), device, clock) for _ in range(4))
    return Machine(flops=2.0 * side**3 / product_s, bytes_per_s=2.0 * buffer.nbytes / copy_s)


def _timed(work: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Seconds of some work, the device's included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(clock() - start, 1e-9)


def _sweep(
    model: PreTrainedModel,
    context: int,
    nodes: Sequence[int],
    compiles: bool,
    clock: Clock,
    *,
    rounds: int,
    within_s: float = math.inf,
) -> tuple[list[float], float]:
    """Median seconds of a step for every number of nodes, and the bytes of KV of one token.

    No seconds where the sweep would take longer than it may.
    """
    length = context + max(nodes) + 1
    support = support_of(model, shortest=context, max_length=length)
    if support.shape == "none":
        raise UnsupportedModelError(f"{type(model).__name__} cannot verify drafts: {support.reason}")
    device = input_device(model)
    target = Target(
        model, rows=1, capacity=length, device=device, shape=support.shape, compiles=compiles, most_nodes=max(nodes)
    )
    if target.positions is not None and length > target.positions:
        raise ConfigError(f"context must leave room for {max(nodes)} nodes in {target.positions} positions")
    rng = np.random.default_rng(0)
    config: Any = model.config.get_text_config()
    prompt = rng.integers(0, config.vocab_size, context + 1).astype(np.int32)
    trees = [_tree(rng, n, config.vocab_size, is_chain=support.shape == "chains") for n in nodes]
    spent: list[list[float]] = []
    with target.serving():
        target.prefill([prompt[:2]])  # a model that turns out too slow has not read more
        plain_s = min(_timed(partial(_step, target, trees[nodes.index(1)]), device, clock) for _ in range(2))
        round_s, warm_ups = plain_s * len(nodes) * _DEARER, _WARM_UPS
        if within_s < math.inf:
            rounds, warm_ups = max(1, min(rounds, int(QUICK_S / round_s) - 1)), 1
        if round_s * (warm_ups + rounds) > within_s:
            return [], 0.0
        target.prefill([prompt])
        for _ in range(warm_ups + rounds):
            spent.append([_timed(partial(_step, target, tree), device, clock) for tree in trees])
    layers: list[Any] = [layer for layer in cast(list[Any], target.cache.layers) if layer.is_initialized]
    per_slot = [each.nbytes / each.shape[1] for layer in layers for each in (layer.keys, layer.values)]
    return [statistics.median(each) for each in zip(*spent[warm_ups:], strict=True)], sum(per_slot)


def _step(target: Target, tree: TokenTree) -> None:
    """Score a tree and read what the model says, as decoding does."""
    likeliest(target.score([tree])).cpu()


def _tree(rng: np.random.Generator, nodes: int, vocabulary: int, *, is_chain: bool) -> TokenTree:
    """A chain, or a tree whose branches have two children each."""
    parents = [max(0, node - 1) if is_chain else max(0, (node - 1) // 2) for node in range(nodes)]
    # Siblings must differ, and nothing else matters.
    tokens = (np.arange(nodes) + rng.integers(vocabulary)) % vocabulary
    return TokenTree.from_parents(tokens.astype(np.int32), parents)


def _point(
    model: PreTrainedModel,
    machine: Machine,
    context: int,
    kv_bytes: float,
    nodes: int,
    seconds: float,
    plain_s: float,
) -> Point:
    """The figures of one number of nodes."""
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    parameters = sum(each.numel() for each in model.parameters())
    weights = float(sum(each.nbytes for each in model.parameters()))
    if head is None or head.weight is not embedding.weight:
        # Of an embedding that is no output layer a step reads one line a node.
        parameters -= embedding.weight.numel()
        weights -= embedding.weight.nbytes
    heads = getattr(config, "num_attention_heads", 0)
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    attention = 4.0 * config.num_hidden_layers * width * (context + nodes)
    flop = nodes * (2.0 * parameters + attention)
    moved = weights + kv_bytes * (context + 2 * nodes)
    bound = max(flop / machine.flops, moved / machine.bytes_per_s)
    return Point(nodes, seconds, flop, moved, bound, seconds / plain_s)
