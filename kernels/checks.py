"""Checks of the kernels' arguments; errors name the argument, its allowed values and what was received."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_NODES = 256
MAX_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_DIM_STEP = 16  # elements; the compiler turns strides and sizes divisible by 16 into 16-byte asynchronous copies
_ALIGNMENT = 16  # bytes


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def shortcoming(query: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Why the attention kernel does not support these tensors, or None if it does."""
    dtype, device = query.dtype, query.device
    for name, tensor in (("query", query), ("keys", keys), ("values", values)):
        shape, steps = tensor.shape, tensor.stride()
        if len(shape) != 4:
            return f"{name} must have 4 dimensions, got shape {tuple(shape)}"
        if tensor.dtype != dtype or dtype not in DTYPES:
            return f"{name} must be bfloat16, float16 or float32, and all three alike, got {tensor.dtype}"
        if tensor.device != device:
            return f"{name} must be on the device of query, {device}, got {tensor.device}"
        if not 0 < shape[3] <= MAX_DIM or shape[3] % _DIM_STEP:
            return f"the head size of {name} must be a multiple of {_DIM_STEP} up to {MAX_DIM}, got {shape[3]}"
        if steps[3] != 1:
            return f"the head elements of {name} must be adjacent, got strides {steps}"
        for size, step in zip(shape, steps[:3], strict=False):
            if size > 1 and step % _DIM_STEP:
                return f"the strides of {name} must be multiples of {_DIM_STEP} elements, got {steps}"
        if tensor.data_ptr() % _ALIGNMENT:
            return f"{name} must start at a multiple of {_ALIGNMENT} bytes, got address {tensor.data_ptr():#x}"
    if not 0 < query.shape[2] <= MAX_NODES:
        return f"query must hold 1 to {MAX_NODES} nodes, got {query.shape[2]}"
    rows, heads, width, dim = query.shape
    _, slots, kv_heads, _ = keys.shape
    if keys.shape != (rows, slots, kv_heads, dim):
        return f"keys must be [rows {rows}, slots, kv_heads, dim {dim}] as query says, got {tuple(keys.shape)}"
    if values.shape[:3] != keys.shape[:3]:
        return f"values must agree with keys, {tuple(keys.shape)}, up to the head size, got {tuple(values.shape)}"
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        return f"the {heads} heads of query must be a multiple of the {kv_heads} heads of keys"
    if slots < width:
        return f"keys must hold at least the {width} nodes of query, got {slots} slots"
    return None


def slot_shortcoming(buffers: Sequence[Tensor]) -> str | None:
    """Why the compaction kernel does not support KV buffers `[rows, capacity, …]`, or None if it does."""
    if not buffers:
        return "buffers must hold at least one buffer, got none"
    like, device = buffers[0].shape[:2], buffers[0].device
    for index, buffer in enumerate(buffers):
        if buffer.shape[:2] != like or buffer.device != device or not buffer.is_contiguous():
            wanted = f"buffer {index} must be contiguous [{like[0]}, {like[1]}, …] on {device}"
            return f"{wanted}, got {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device}"
        size = math.prod(buffer.shape[2:]) * buffer.element_size()
        if size == 0 or size % _ALIGNMENT or buffer.data_ptr() % _ALIGNMENT:
            wanted = f"buffer {index} must start at, and its slots take, a multiple of {_ALIGNMENT} bytes"
            return f"{wanted}, got address {buffer.data_ptr():#x} and {size} bytes a slot"
    return None


def check_tree(
    query: Tensor, lengths: Tensor, nodes: Tensor, depths: Tensor, words: Tensor, sinks: Tensor | None = None
) -> None:
    """Check the tensors that describe rows and trees, and the logits of sinks, shapes and types only.

    Values are not read, which would wait for the device.
    """
    (rows, heads, width, _), device = query.shape, query.device
    check_tensor("lengths", lengths, (rows,), torch.int32, device)
    check_tensor("nodes", nodes, (rows,), torch.int32, device)
    check_tensor("depths", depths, (rows, width), torch.int32, device)
    check_tensor("words", words, (rows, width, math.ceil(width / 64)), torch.int64, device)
    if sinks is None:
        return
    wanted = f"sinks must be a contiguous floating-point tensor of shape ({heads},) on {device}"
    right = sinks.shape == (heads,) and sinks.device == device and sinks.is_contiguous()
    require(right and sinks.is_floating_point(), f"{wanted}, got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Check shape, type, device and contiguity."""
    if tensor.shape == shape and tensor.dtype == dtype and tensor.device == device and tensor.is_contiguous():
        return
    wanted = f"{name} must be a contiguous {dtype} tensor of shape {tuple(shape)} on {device}"
    got = f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"
    raise ValueError(f"{wanted}, got {got}")
