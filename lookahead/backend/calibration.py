"""Quick measurements: the cost of a step by its number of nodes, and the speed of a device."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lookahead.backend.choice import backend_for, records_graphs
from lookahead.backend.protocol import Backend, BitPolicy
from lookahead.backend.self_check import keeps_solo_bits
from lookahead.backend.support import support_of
from lookahead.drafting.cost_model import StepCost
from lookahead.drafting.tree import TokenTree
from lookahead.kernels.topk import likeliest
from lookahead.model.calls import kind_of
from lookahead.model.facts import input_device, position_limit

NODES = (1, 2, 4, 8, 16, 32, 64)  # of the steps of a sweep
_CONTEXT = 64  # tokens; a longer prefill would take longer than the sweep
_ROUNDS = 3
QUICK_S = 3.0  # target of a quick sweep; a slow model takes longer: one warm-up and one round
LONGEST_QUICK_S = 30.0
_STEP_TO_PLAIN = 2.0  # assumed mean time of a step of a sweep, in steps of one node


@dataclass(frozen=True, slots=True)
class Machine:
    """Speed of a device."""

    flops: float  # per second, in a large matrix product
    bytes_per_s: float  # read and written by a copy of a buffer of the size of the weights


def calibrate_quickly(model: PreTrainedModel, cost: StepCost) -> bool:
    """Measure a few sizes over a short context; returns False if that would take longer than 30 seconds.

    Every size is measured up to three times within 3 seconds, and at least once: about 30 plain steps in all. Also
    returns False if the model cannot verify drafts, or if the machine is so busy that a step of `n` nodes took longer
    than `n` steps of one node, which would turn drafting off for good.
    """
    context = min(_CONTEXT, (position_limit(model) or sys.maxsize) - max(NODES) - 1)
    if context < 1 or kind_of(model).has_encoder:
        return False
    seconds = _sweep(model, context)
    if not seconds or any(spent > n * seconds[0] for n, spent in zip(NODES[1:], seconds[1:], strict=True)):
        return False
    cost.calibrate(NODES, seconds, rows=1, context=context + max(NODES))
    return True


def _sweep(model: PreTrainedModel, context: int) -> list[float]:
    """Median seconds of a step for every one of `NODES`; none if the model cannot verify drafts, or is too slow."""
    length = context + max(NODES) + 1
    shape = support_of(model, shortest=context, max_length=length).shape
    if shape == "none":
        return []
    device, captures = input_device(model), records_graphs(model)
    backend = backend_for(model, rows=1, capacity=length, shape=shape, most_nodes=max(NODES), captures=captures)
    policy = BitPolicy.SOLO if shape == "trees" and keeps_solo_bits(model) else BitPolicy.ROUNDED
    rng = np.random.default_rng(0)
    config: Any = model.config.get_text_config()
    prompt = rng.integers(0, config.vocab_size, context + 1).astype(np.int32)
    root, trees, children = np.zeros(1, np.int32), [], 2 if shape == "trees" else 1
    for n in NODES:
        tokens = (np.arange(n, dtype=np.int32) + rng.integers(config.vocab_size)) % config.vocab_size  # siblings differ
        # Recurrent layers run once per depth. Their trees are two chains, as deep as drafts are.
        parents = np.arange(n) - 2 if backend.cache.states else (np.arange(n) - 1) // children
        trees.append(TokenTree.from_parents(tokens, parents.clip(0)))
    spent: list[list[float]] = []
    with backend.serving():
        backend.read([prompt[:2]])  # enough to refuse a model that is too slow
        backend.cache.commit(0, root)
        plain_s = min(timed(partial(_step, backend, trees[0], policy), device) for _ in range(2))
        round_s, warm_ups = plain_s * len(NODES) * _STEP_TO_PLAIN, backend.warm_ups if captures else 1
        rounds = max(1, min(_ROUNDS, int(QUICK_S / round_s) - 1))
        if round_s * (warm_ups + rounds) > LONGEST_QUICK_S:
            return []
        backend.read([prompt])
        backend.cache.commit(0, root)
        for _ in range(warm_ups + rounds):
            spent.append([timed(partial(_step, backend, tree, policy), device) for tree in trees])
    return [statistics.median(times) for times in zip(*spent[warm_ups:], strict=True)]


def _step(backend: Backend, tree: TokenTree, policy: BitPolicy) -> None:
    """Score a tree and read the argmax, as decoding does."""
    likeliest(backend.score([tree], policy)).cpu()


def measure_machine(device: torch.device, dtype: torch.dtype, weights: int) -> Machine:
    """Measure a device by a matrix product in `dtype`, and by a copy of `weights` bytes (16 MiB to 1 GiB)."""
    side = 8192 if device.type == "cuda" else 1024
    left = torch.ones(side, side, dtype=dtype, device=device)
    buffer = torch.ones(min(max(weights, 1 << 24), 1 << 30), dtype=torch.uint8, device=device)
    copy = torch.empty_like(buffer)
    copy_s = min(timed(lambda: copy.copy_(buffer), device) for _ in range(4))
    product_s = timed(lambda: left @ left, device)
    if product_s < 1.0:  # on some CPUs a half-precision product takes seconds, and one is enough
        product_s = min(timed(lambda: left @ left, device) for _ in range(3))
    return Machine(flops=2.0 * side**3 / product_s, bytes_per_s=2.0 * buffer.nbytes / copy_s)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of some work, with the device synchronized."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(perf_counter() - start, 1e-9)
