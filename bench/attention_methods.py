"""The ways to attend over a token tree that `bench.kernel` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bench.cpu_attention import packed_attention
from lookahead.kernels import reference

Layer = tuple[Tensor, Tensor, Tensor]  # query, keys and values as the kernel takes them
Step = Callable[[], tuple[Tensor, ...]]
Attend = Callable[[Sequence[Layer]], tuple[Tensor, ...]]  # what every layer attends to, as the kernel gives it


def methods(
    tree: dict[str, Tensor], slots: int, heads: int, kv_heads: int, split: int | None, device: torch.device
) -> dict[str, Callable[[], Attend]]:
    """What makes each of them, by name; made is what a step makes once and its layers share."""
    sees = reference.tree_mask(slots, *tree.values(), None, None)
    is_gpu = device.type == "cuda"
    return {
        "kernel": partial(_kernel if is_gpu else _reference, tree, split),
        "sdpa": partial(_sdpa, sees, heads // kv_heads),
        "flex": partial(_flex, sees, is_inside=False, is_compiled=is_gpu),
        "flex, mask inside": partial(_flex, sees, is_inside=True, is_compiled=is_gpu),
    }


def _kernel(tree: dict[str, Tensor], split: int | None) -> Attend:
    """The kernel of this package."""
    from lookahead.kernels.tree_attention import tree_attention

    return lambda layers: tuple(tree_attention(*layer, **tree, split=split) for layer in layers)


def _reference(tree: dict[str, Tensor], split: int | None) -> Attend:
    """What stands in for it on a CPU."""
    return lambda layers: tuple(reference.tree_attention(*layer, **tree, dtype=torch.float32) for layer in layers)


def _sdpa(sees: Tensor, groups: int) -> Attend:
    """SDPA with a dense mask, the query heads of a KV head packed into rows."""
    blocked = torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, float("-inf"))
    masks: dict[torch.dtype, Tensor] = {}

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if query.dtype not in masks:
            masks[query.dtype] = blocked.to(query.dtype).repeat_interleave(groups, 1)[:, None]
        return packed_attention(query, keys, values, masks[query.dtype])

    return lambda layers: tuple(attend(*layer) for layer in layers)


def _flex(sees: Tensor, *, is_inside: bool, is_compiled: bool) -> Attend:
    """FlexAttention; its block mask is made beforehand, or anew whenever layers attend."""
    rows, width, slots = sees.shape

    def visible(row: Tensor, head: Tensor, node: Tensor, slot: Tensor) -> Tensor:
        return sees[row, node, slot]

    compiled: Any = partial(torch.compile, dynamic=False) if is_compiled else lambda each: each
    make, attend = compiled(create_block_mask), compiled(flex_attention)

    def make_mask() -> BlockMask:
        mask: BlockMask = make(visible, rows, None, width, slots, device=str(sees.device))
        return mask

    ready = None if is_inside else make_mask()

    def run(layers: Sequence[Layer]) -> tuple[Tensor, ...]:
        mask = make_mask() if ready is None else ready
        outputs = []
        for query, keys, values in layers:
            kv = (keys.transpose(1, 2), values.transpose(1, 2))
            outputs.append(attend(query, *kv, block_mask=mask, enable_gqa=True).transpose(1, 2))
        return tuple(outputs)

    return run
