"""Self-test each kernel variant on the GPU against the reference, on random trees, before its first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels import reference

_log = logging.getLogger(__name__)
# Largest error relative to the norm of a head's output. One slot too many or too few changes it several times more.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_SLOTS = {100: None, 9000: 64}  # and the slots of a split: one split, and more than are merged at once
_WIDTH = 70  # nodes: two words of ancestors
_ROWS = 2
_outcomes: dict[tuple[Any, Any], bool] = {}
_LIMITS: dict[str, Any] = {"window": 40, "chunk": 90, "softcap": 3.0}


class KernelVariant(NamedTuple):
    """What a kernel is compiled for: sizes, query heads per KV head, and which options of `tree_attention` are used."""

    device: torch.device
    dtype: torch.dtype
    dim: int
    value_dim: int
    groups: int
    options: frozenset[str]

    def __str__(self) -> str:
        sizes = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim} and {self.value_dim}"
        options = f" with {', '.join(sorted(self.options))}" if self.options else ""
        layout = f"head size {sizes}, {self.groups} heads a KV head"
        return f"tree attention of {self.dtype}, {layout}{options} on {self.device}"


def attention_is_right(variant: KernelVariant, attend: Callable[..., Tensor]) -> bool:
    """Whether a tree attention kernel agrees with `reference.tree_attention`; unused slots hold NaN.

    A kernel that differs or fails is logged, and is not called for this variant. A variant is tested once. While a CUDA
    graph is recorded no test can run, and an untested variant is not used.
    """
    error = partial(_attention_error, variant, attend)
    return _test_once(attend, variant, variant.device, error, _TOLERANCE[variant.dtype])


def compaction_is_right(device: torch.device, compact: Callable[..., None], bind: Callable[..., Any]) -> bool:
    """Whether a compaction kernel leaves the bytes that `reference.compact` leaves; tested as above."""
    error = partial(_compaction_error, device, compact, bind)
    return _test_once(compact, f"compaction on {device}", device, error, 0.0)


def tests_run() -> int:
    """How many self-tests have run; the first of a variant compiles it, which takes seconds."""
    return len(_outcomes)


def _test_once(kernel: object, what: object, device: torch.device, error_of: Callable[[], float], most: float) -> bool:
    """Whether a kernel has run with an error of at most `most`; the first call tests it, and logs a line if not."""
    key = what, kernel
    if key not in _outcomes and not _is_recording(device):
        problem = None
        try:
            error = error_of()
            if not error <= most:  # NaN is an error too
                problem = f"it differs by {error:.2g} from the reference"
        except Exception as failure:  # for any failure torch's own attention is used
            problem = f"{type(failure).__name__}: {failure}"
        if problem is not None:
            _log.warning("the kernel for %s is not used: %s", what, problem)
        _outcomes[key] = problem is None
    return _outcomes.get(key, False)


def _is_recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _attention_error(variant: KernelVariant, attend: Callable[..., Tensor]) -> float:
    """The largest error of a node in a head, relative to the norm of the reference."""
    options = {name: value for name, value in _LIMITS.items() if name in variant.options}
    if "sinks" in variant.options:
        options["sinks"] = torch.linspace(-1, 1, 2 * variant.groups, device=variant.device).to(variant.dtype)
    errors = []
    for slots, split in _SLOTS.items():
        inputs = _random_trees(variant, slots)
        got, want = attend(**inputs, **options, split=split).double(), reference.tree_attention(**inputs, **options)
        errors.append(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-3)).flatten())
    return float(torch.cat(errors).max())  # NaN if one is NaN


def _random_trees(variant: KernelVariant, slots: int) -> dict[str, Any]:
    """Arguments of `tree_attention`: a row that ends with the last slot, and a shorter one that NaN follows."""
    rng = np.random.default_rng(0)
    heads = 2 * variant.groups
    nodes = np.array([_WIDTH, 9], np.int32)
    lengths = np.array([slots - _WIDTH, slots // 3], np.int32)
    depths, sees = np.zeros((_ROWS, _WIDTH), np.int32), np.zeros((_ROWS, _WIDTH, 128), np.uint8)
    for row, count in enumerate(nodes):
        sees[row, 0, 0] = 1
        for node in range(1, count):
            parent = int(rng.integers(max(0, node - 4), node))
            depths[row, node], sees[row, node] = depths[row, parent] + 1, sees[row, parent]
            sees[row, node, node] = 1
    words = np.packbits(sees, axis=-1, bitorder="little").view(np.int64)
    shapes = {
        "query": (heads, _WIDTH, variant.dim),
        "keys": (slots, 2, variant.dim),
        "values": (slots, 2, variant.value_dim),
    }
    drawn = {name: rng.standard_normal((_ROWS, *shape), np.float32) for name, shape in shapes.items()}
    for row, end in enumerate(lengths + nodes):
        drawn["keys"][row, end:] = drawn["values"][row, end:] = np.nan
    states = {name: torch.from_numpy(each).to(variant.device, variant.dtype) for name, each in drawn.items()}
    tree = {"lengths": lengths, "nodes": nodes, "depths": depths, "words": np.ascontiguousarray(words)}
    return states | {name: torch.from_numpy(each).to(variant.device) for name, each in tree.items()}


def _compaction_error(device: torch.device, compact: Callable[..., None], bind: Callable[..., Any]) -> float:
    """Elements of two buffers that differ from the reference, after short and after long paths."""
    rng = np.random.default_rng(0)
    buffers = [torch.from_numpy(rng.standard_normal((3, 200, size), np.float32)).to(device) for size in (64, 256)]
    wanted = [buffer.clone() for buffer in buffers]
    bound = bind(buffers)
    for counts in ((3, 12, 1), (1, 90, 40)):
        paths = np.zeros((3, max(counts)), np.int32)
        for row, count in enumerate(counts):
            paths[row, :count] = np.append(0, 1 + np.sort(rng.permutation(150)[: count - 1]))
        plan = {"rows": (2, 0, 1), "starts": (5, 30, 49), "counts": counts, "paths": paths}
        arguments = {name: torch.from_numpy(np.array(each, np.int32)).to(device) for name, each in plan.items()}
        for buffer in wanted:
            reference.compact(buffer, **arguments)
        compact(bound, **arguments)
    return float(sum((got != want).sum().item() for got, want in zip(buffers, wanted, strict=True)))
