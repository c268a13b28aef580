"""Which kernels run: the only module the engine asks. Importing it needs no triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lookahead.kernels.checks import shortcoming, slot_shortcoming
from lookahead.kernels.self_test import COMPACTION, KernelVariant, Verdict

NO_OPTIONS: Mapping[str, Any] = {}
wanted: dict[KernelVariant, None] = {}
"""Variants that passes asked for and that were not tested: `lookahead.models.kernel_trial` does it after the pass."""
verdicts: dict[KernelVariant, Verdict] = {}
served: set[KernelVariant] = set()
"""Variants that this process has used: the first use of one loads its machine code."""


@cache
def runs_on(device: torch.device) -> bool:
    """Whether `device` is an NVIDIA GPU and triton is installed."""
    return device.type == "cuda" and torch.version.cuda is not None and find_spec("triton") is not None


def attention_for(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    options: Mapping[str, Any] = NO_OPTIONS,
    is_eager: bool = False,
    later: frozenset[str] = frozenset(),
) -> Callable[..., Tensor] | None:
    """The tree attention kernel for tensors like these, or None where torch's own attention is used.

    It takes query, keys and values with the shapes and strides given here, and lengths, nodes, depths, words and sinks
    as `lookahead.kernels.tree_attention.tree_attention` does, and checks nothing.

    On a GPU kernels that were not tested are noted in `wanted`, and do not serve until they were. An eager pass takes
    the kernel only where the test found that it is no slower than torch's attention.

    Args:
        query: `[rows, heads, width, dim]`.
        keys: `[rows, slots, kv_heads, dim]`.
        values: `[rows, slots, kv_heads, value_dim]`.
        options: "scaling", "window", "chunk", "softcap" and "sinks" of the call; unused ones are None or left out.
        is_eager: Whether the host launches every kernel by itself, with no graph or compiled code.
        later: Options that later calls will have, so that their variant is tested with this one.
    """
    bound: dict[str, Any] = {name: options.get(name) for name in ("scaling", "softcap", "window", "chunk")}
    if query.device.type == "cpu":
        from lookahead.kernels import cpu_attention

        return partial(cpu_attention.tree_attention, **bound) if cpu_attention.pays(query, keys, values) else None
    if not runs_on(query.device) or shortcoming(query, keys, values) is not None:
        return None
    from lookahead.kernels.tree_attention import bind

    groups, has_sinks = query.shape[1] // keys.shape[2], options.get("sinks") is not None
    given = {name for name in ("softcap", "window", "chunk") if bound[name] is not None}
    given |= {"sinks"} if has_sinks else set()
    variant = KernelVariant(query.device, query.dtype, keys.shape[3], values.shape[3], groups, frozenset(given))
    longer, compaction = (
        variant._replace(options=variant.options | later),
        KernelVariant(query.device, kernel=COMPACTION),
    )
    wanted.update(dict.fromkeys(each for each in (variant, longer, compaction) if each not in verdicts))
    verdict = verdicts.get(variant)
    if verdict is None or verdict.problem:
        return None
    if is_eager and not verdict.is_faster(keys.shape[1], query.shape[2]):
        return None
    served.add(variant)
    return bind(query, keys, values, **bound, has_sinks=has_sinks)


def compactor_for(buffers: Sequence[Tensor]) -> Callable[..., None] | None:
    """The compaction kernel bound to these KV buffers `[rows, capacity, …]`, or None if unsupported.

    It takes rows, starts, counts and paths, as `lookahead.kernels.compaction.compact` does.
    """
    if not buffers or not runs_on(buffers[0].device):
        return None
    variant = KernelVariant(buffers[0].device, kernel=COMPACTION)
    verdict = verdicts.get(variant)
    if verdict is None:
        wanted[variant] = None
    if verdict is None or verdict.problem or slot_shortcoming(buffers) is not None:
        return None
    from lookahead.kernels.compaction import SlotBuffers, compact

    return partial(compact, SlotBuffers(buffers))
