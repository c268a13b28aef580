"""Whether a kernel can serve: the one place the engine asks. Importing it needs no triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

from lookahead.kernels.checks import shortcoming, slot_shortcoming

# Compute capabilities on which tests/test_kernels_gpu.py passed; on others the engine leaves the kernels alone.
VERIFIED: frozenset[tuple[int, int]] = frozenset()


@cache
def runs_on(device: torch.device) -> bool:
    """Whether `device` is an NVIDIA GPU the kernels were verified on, with triton at hand."""
    if device.type != "cuda" or torch.version.cuda is None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) in VERIFIED


def attention_for(query: Tensor, keys: Tensor, values: Tensor) -> Callable[..., Tensor] | None:
    """The tree attention kernel for these tensors, or None where torch's own attention serves them better.

    Args:
        query: `[rows, heads, width, dim]`.
        keys: `[rows, slots, kv_heads, dim]`.
        values: `[rows, slots, kv_heads, value_dim]`.
    """
    if query.device.type == "cpu":
        from lookahead.kernels import cpu_attention

        return cpu_attention.tree_attention if cpu_attention.pays(query, keys, values) else None
    if not runs_on(query.device) or shortcoming(query, keys, values) is not None:
        return None
    from lookahead.kernels.tree_attention import tree_attention

    return tree_attention


def compactor_for(buffers: Sequence[Tensor]) -> Callable[..., None] | None:
    """The compaction kernel bound to these KV buffers `[rows, capacity, …]`, or None where it cannot serve them.

    What is returned takes rows, starts, counts and paths, as `lookahead.kernels.compaction.compact` does.
    """
    if not buffers or not runs_on(buffers[0].device) or slot_shortcoming(buffers) is not None:
        return None
    from lookahead.kernels.compaction import SlotBuffers, compact

    return partial(compact, SlotBuffers(buffers))
