"""Test and time kernels against torch, on random trees: `python -m lookahead.kernels.self_test VARIANTS`.

A kernel that reads a wrong address destroys the CUDA context of its process. So `kernel_trial` runs this
in a separate process before a kernel is used.
"""

from __future__ import annotations

import json
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from subprocess import CalledProcessError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lookahead.kernels import dispatch
from lookahead.kernels.dispatch import COMPACTION, KernelVariant, Verdict

# Largest error relative to the norm of a head's output. One slot too many or too few changes it several times as much.
_TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_SLOTS = {100: None, 9000: 64}  # slots, and slots per split: one split, and more than are merged at once
_WIDTH = 70  # nodes: two words of ancestors
_LIMITS: dict[str, Any] = {"window": 40, "chunk": 90, "softcap": 3.0}
_TIMED = [(slots, nodes) for slots in (512, 4096, 32768) for nodes in (1, 16, 64)]
_TIMED_KV_HEADS = 8
_CALLS = 20


def verdict_of(variant: KernelVariant) -> Verdict:
    """Test a kernel, and time it if it is right."""
    from lookahead.kernels import compaction
    from lookahead.kernels.tree_attention import tree_attention

    is_attention = variant.kernel != COMPACTION
    if is_attention:
        error, most = attention_error(variant, tree_attention), _TOLERANCE[variant.dtype]
    else:
        error, most = compaction_error(variant.device, compaction.compact, compaction.SlotBuffers), 0.0
    if not error <= most:  # NaN is an error too
        return Verdict(f"it differs by {error:.2g} from the reference")
    return Verdict(gains=gains_of(variant) if is_attention else ())


def attention_error(variant: KernelVariant, attend: Callable[..., Tensor]) -> float:
    """The largest error of a node in a head, relative to the norm of torch's float64 result; unused slots hold NaN."""
    options = {name: value for name, value in _LIMITS.items() if name in variant.options}
    if "sinks" in variant.options:
        options["sinks"] = torch.linspace(-1, 1, 2 * variant.groups, device=variant.device).to(variant.dtype)
    errors = []
    for slots, split in _SLOTS.items():
        inputs = _inputs(variant, 2, slots, (slots - _WIDTH, slots // 3), (_WIDTH, 9))
        got = attend(**inputs, **options, split=split).double()
        query, keys, values = (inputs.pop(name).double().nan_to_num() for name in ("query", "keys", "values"))
        want = _by_torch(query, keys, values, inputs, options)().nan_to_num()  # NaN for nodes after a row's last
        errors.append(((got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-3)).flatten())
    return float(torch.cat(errors).max())  # NaN if one is NaN


def _inputs(
    variant: KernelVariant, kv_heads: int, slots: int, lengths: Sequence[int], nodes: Sequence[int]
) -> dict[str, Any]:
    """Arguments of `tree_attention`: random numbers and trees, and NaN after the last node of each row."""
    rng, source = np.random.default_rng(1), torch.Generator(variant.device).manual_seed(0)
    rows, width, kv = len(nodes), max(nodes), (slots, kv_heads)
    shapes = {"query": (kv_heads * variant.groups, width, variant.dim)}
    shapes |= {"keys": (*kv, variant.dim), "values": (*kv, variant.value_dim)}
    inputs = {
        name: torch.empty(rows, *shape, device=variant.device, dtype=variant.dtype).normal_(generator=source)
        for name, shape in shapes.items()
    }
    depths, sees = np.zeros((rows, width), np.int32), np.zeros((rows, width, -(-width // 64) * 64), np.uint8)
    for row, (length, count) in enumerate(zip(lengths, nodes, strict=True)):
        inputs["keys"][row, length + count :] = inputs["values"][row, length + count :] = torch.nan
        sees[row, 0, 0] = 1
        for node in range(1, count):
            parent = int(rng.integers(max(0, node - 4), node))
            depths[row, node], sees[row, node] = depths[row, parent] + 1, sees[row, parent]
            sees[row, node, node] = 1
    words, sizes = np.packbits(sees, axis=-1, bitorder="little").view(np.int64), np.array((lengths, nodes), np.int32)
    tree = {"lengths": sizes[0], "nodes": sizes[1], "depths": depths, "words": words}
    return inputs | {name: torch.from_numpy(array).to(variant.device) for name, array in tree.items()}


def gains_of(
    variant: KernelVariant, sizes: Sequence[tuple[int, int]] = _TIMED, clock: Callable[[], float] = time.perf_counter
) -> tuple[tuple[int, int, float], ...]:
    """The speed of a kernel relative to torch's masked attention, for every size (slots, nodes)."""
    from lookahead.kernels.tree_attention import bind

    device, dtype, gains = variant.device, variant.dtype, []
    heads = _TIMED_KV_HEADS * variant.groups
    sinks = torch.zeros(heads, device=device, dtype=dtype) if "sinks" in variant.options else None
    for slots, nodes in sizes:
        # As if a window or a chunk covered all slots, where the kernel gains least.
        limits: dict[str, Any] = {name: slots if name in variant.options else None for name in ("window", "chunk")}
        limits["softcap"] = _LIMITS["softcap"] if "softcap" in variant.options else None
        tree = _inputs(variant, _TIMED_KV_HEADS, slots, (slots - nodes,), (nodes,))
        query, keys, values = (tree.pop(name) for name in ("query", "keys", "values"))
        kernel = bind(query, keys, values, {**limits, "sinks": sinks})
        ways = (
            partial(kernel, query, keys, values, **tree, sinks=sinks),
            _by_torch(query, keys, values, tree, {**limits, "sinks": sinks}),
        )
        kernel_s, torch_s = (_seconds(way, device, clock) for way in ways)
        gains.append((slots, nodes, torch_s / kernel_s))
    return tuple(gains)


def _by_torch(
    query: Tensor, keys: Tensor, values: Tensor, tree: dict[str, Tensor], options: dict[str, Any]
) -> Callable[[], Tensor]:
    """The fallback attention for arguments of `tree_attention`, with its mask already made."""
    key, value = keys.transpose(1, 2), values.transpose(1, 2)
    sees = tree_mask(keys.shape[1], **tree, window=options.get("window"), chunk=options.get("chunk"))
    mask = torch.zeros(sees.shape, dtype=query.dtype, device=query.device).masked_fill(~sees, -torch.inf)
    mask = mask.repeat_interleave(query.shape[1] // keys.shape[2], 1)[:, None]
    features = {name: options.get(name) for name in ("softcap", "sinks")}
    if not any(option is not None for option in options.values()):
        mask = mask[..., dispatch.unmasked(query, key, value, int(tree["lengths"].min())) :]
    return partial(dispatch.masked_attention, query, key, value, mask, **features)


def tree_mask(
    slots: int, lengths: Tensor, nodes: Tensor, depths: Tensor, words: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """bool `[rows, width, slots]`: the slots each node may see; none for nodes after a row's last.

    A node sees the committed slots and its ancestors, itself included, whose positions are less than `window` before
    its own and in the same chunk of `chunk` positions.

    Args:
        slots: Number of slots.
        lengths: See `tree_attention`.
        nodes: See `tree_attention`.
        depths: See `tree_attention`.
        words: See `tree_attention`.
        window: Positions, or None.
        chunk: Positions, or None.
    """
    rows, width = depths.shape
    device = depths.device
    node = torch.arange(width, device=device)
    slot = torch.arange(slots, device=device)
    position = lengths[:, None] + depths  # [rows, width]
    is_ancestor = (words[:, :, node // 64] >> (node % 64)) & 1 == 1  # [rows, width, width]
    behind = slot - lengths[:, None]  # [rows, slots]; the node in a slot, negative if committed
    holds_node = (behind >= 0) & (behind < width)
    index = behind.clamp(0, width - 1)
    sees = is_ancestor.gather(2, index[:, None].expand(rows, width, slots)) & holds_node[:, None]
    sees = sees | (behind < 0)[:, None]
    slot_position = torch.where(holds_node, position.gather(1, index), slot)  # [rows, slots]
    if window is not None:
        sees = sees & (slot_position[:, None] > position[:, :, None] - window)
    if chunk is not None:
        sees = sees & (slot_position[:, None] // chunk == position[:, :, None] // chunk)
    return sees & (node < nodes[:, None])[:, :, None]


def _seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of some eager calls, after a warm-up call that compiles."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock()

    work()
    return min(timeit.repeat(work, timer=now, repeat=3, number=_CALLS))


def compact(buffer: Tensor, rows: Tensor, starts: Tensor, counts: Tensor, paths: Tensor) -> None:
    """`lookahead.kernels.compaction.compact` in plain torch.

    Args:
        buffer: One buffer `[rows, capacity, …]`, which is changed.
        rows: See the kernel.
        starts: See the kernel.
        counts: See the kernel.
        paths: See the kernel.
    """
    for row, start, count, path in zip(rows.tolist(), starts.tolist(), counts.tolist(), paths, strict=True):
        buffer[row, start : start + count] = buffer[row, start + path[:count].long()].clone()


def compaction_error(device: torch.device, kernel: Callable[..., None], bind: Callable[..., Any]) -> float:
    """Number of elements in two buffers that differ from the reference, after short and after long paths."""
    rng = np.random.default_rng(0)
    buffers = [torch.from_numpy(rng.standard_normal((3, 200, size), np.float32)).to(device) for size in (64, 256)]
    wanted = [buffer.clone() for buffer in buffers]
    bound = bind(buffers)
    for counts in ((3, 12, 1), (1, 90, 40)):
        paths = np.zeros((3, max(counts)), np.int32)
        for row, count in enumerate(counts):
            paths[row, :count] = np.append(0, 1 + np.sort(rng.permutation(150)[: count - 1]))
        plan = {"rows": (2, 0, 1), "starts": (5, 30, 49), "counts": counts, "paths": paths}
        arguments = {name: torch.from_numpy(np.array(numbers, np.int32)).to(device) for name, numbers in plan.items()}
        for buffer in wanted:
            compact(buffer, **arguments)
        kernel(bound, **arguments)
    return float(sum((got != want).sum().item() for got, want in zip(buffers, wanted, strict=True)))


def main(variants: str) -> None:
    """Print the verdict on each variant of a JSON list, one per line; stops at an exception, which may lose the GPU."""
    for values in json.loads(variants):
        try:
            verdict = verdict_of(KernelVariant.from_json(values))
        except Exception as error:  # after any failure torch's own attention is used
            text = str(error)
            # Memory, a free GPU, a C compiler or Python's headers may be missing only now.
            is_lacking = "CUDA" in text or "compiler" in text or isinstance(error, CalledProcessError)
            is_lasting = "illegal" in text or not is_lacking
            print(json.dumps(Verdict(f"{type(error).__name__}: {error}", is_lasting=is_lasting)), flush=True)
            return
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
