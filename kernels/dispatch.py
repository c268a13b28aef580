"""Choice of kernels and the inputs they accept, and torch's attention as the fallback. Needs no triton to import."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

MAX_NODES = 256
MAX_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Below it most variants spill registers, and some need more shared memory than there is.
_LEAST_CAPABILITY = (8, 0)
_DIM_STEP = 16  # elements; the compiler turns strides and sizes divisible by 16 into 16-byte asynchronous copies
_ALIGNMENT = 16  # bytes
COMPACTION = "compaction"
# Unmasked slots from which the extra launches of a merge pay for flash attention, and how many times the masked slots,
# whose scores are multiplied in float32, they must be. Estimated, not measured on a GPU.
_LEAST_PREFIX, _LEAST_SHARE = 1024, 16


class KernelVariant(NamedTuple):
    """The key of a compiled kernel: sizes, query heads per KV head, and the options of `tree_attention` in use.

    Compaction depends only on the device.
    """

    device: torch.device
    dtype: torch.dtype = torch.int32
    dim: int = 0
    value_dim: int = 0
    groups: int = 0
    options: frozenset[str] = frozenset()
    kernel: str = "tree attention"

    @property
    def name(self) -> str:
        """The variant without its device."""
        if self.kernel == COMPACTION:
            return self.kernel
        sizes = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim} and {self.value_dim}"
        options = f" with {', '.join(sorted(self.options))}" if self.options else ""
        return f"{self.kernel} of {self.dtype}, head size {sizes}, {self.groups} heads a KV head{options}"

    def to_json(self) -> list[Any]:
        """Values for `from_json`."""
        return [str(self.device), str(self.dtype).removeprefix("torch."), *self[2:5], sorted(self.options), self.kernel]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> KernelVariant:
        """The variant of `to_json`."""
        device, dtype, dim, value_dim, groups, options, kernel = values
        return cls(torch.device(device), getattr(torch, dtype), dim, value_dim, groups, frozenset(options), kernel)


class Verdict(NamedTuple):
    """The result of a variant's self-test."""

    problem: str = ""  # why it must not be used; empty if it may
    gains: tuple[tuple[int, int, float], ...] = ()  # slots, nodes, and speed relative to torch's attention
    is_lasting: bool = True  # whether a repeated test on this machine would find the same

    def is_faster(self, slots: int, nodes: int) -> bool:
        """Whether the kernel was at least as fast as torch at the most similar measured size."""
        if not self.gains:
            return True
        nearest = min(self.gains, key=lambda timed: abs(math.log2(slots / timed[0])) + abs(math.log2(nodes / timed[1])))
        return nearest[2] >= 1.0


wanted: dict[KernelVariant, None] = {}
"""Variants that passes requested and that are not tested yet: `kernel_trial` tests them after the pass."""
verdicts: dict[KernelVariant, Verdict] = {}
served: set[KernelVariant] = set()
"""Variants that this process has used: the first use of one loads its machine code."""


@cache
def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels run on `device`."""
    return not unserved_device(device)


def unserved_device(device: torch.device) -> str:
    """Why Triton's kernels do not run on a device, or an empty string."""
    if device.type != "cuda" or torch.version.cuda is None:
        name = "ROCm" if device.type == "cuda" else device.type
        return f"they are for NVIDIA GPUs; torch's attention serves on {name}"
    try:
        import_module("triton")
    except Exception:  # a broken installation may raise anything
        return "Triton cannot be imported; torch's attention serves"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0; torch's attention serves"
    return ""


def attention_for(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    options: Mapping[str, Any],
    later: frozenset[str] = frozenset(),
) -> Callable[..., Tensor] | None:
    """The tree attention kernel for tensors of this form, or None if torch's own attention should be used.

    It takes tensors as `lookahead.kernels.tree_attention` does, with these shapes and strides, without checking them.
    Untested kernels are added to `wanted`, and are not used until they are tested. One that its test found slower than
    torch's attention at the most similar size is not used.

    Args:
        query: `[rows, heads, width, dim]`.
        keys: `[rows, slots, kv_heads, dim]`.
        values: `[rows, slots, kv_heads, value_dim]`.
        options: "scaling", "window", "chunk", "softcap" and "sinks" of the call; None or absent if unused.
        later: Options that later calls will have; their variant is tested along with this one.
    """
    if not (runs_on(query.device) and is_supported(query, keys, values)):
        return None
    from lookahead.kernels.tree_attention import bind

    variant = variant_of(query, keys, values, options)
    longer = variant._replace(options=variant.options | later)
    compaction = KernelVariant(query.device, kernel=COMPACTION)
    wanted.update(dict.fromkeys(kernel for kernel in (variant, longer, compaction) if kernel not in verdicts))
    verdict = verdicts.get(variant)
    if verdict is None or verdict.problem or not verdict.is_faster(keys.shape[1], query.shape[2]):
        return None
    served.add(variant)
    return bind(query, keys, values, options)


def unserved_attention(query: Tensor, keys: Tensor, values: Tensor, options: Mapping[str, Any]) -> str:
    """Why `attention_for` returned None for these arguments."""
    if reason := unserved_device(query.device):
        return reason
    variant = variant_of(query, keys, values, options)
    if not is_supported(query, keys, values):
        return f"{variant.name} of this form is not supported"
    verdict = verdicts.get(variant)
    if verdict is None:
        return f"{variant.name} is not tested yet"
    slower = f"torch's attention was faster for {query.shape[2]} nodes and {keys.shape[1]} slots"
    return f"{variant.name}: {verdict.problem or slower}"


def variant_of(query: Tensor, keys: Tensor, values: Tensor, options: Mapping[str, Any]) -> KernelVariant:
    """The variant of tree attention for arguments of `attention_for`."""
    features = frozenset(name for name in ("softcap", "window", "chunk", "sinks") if options.get(name) is not None)
    sizes = keys.shape[3], values.shape[3], query.shape[1] // keys.shape[2]
    return KernelVariant(query.device, query.dtype, *sizes, features)


def compactor_for(buffers: Sequence[Tensor]) -> Callable[..., None] | None:
    """`lookahead.kernels.compaction.compact` bound to these KV buffers `[rows, capacity, …]`; None if unsupported."""
    if not buffers or not runs_on(buffers[0].device):
        return None
    variant = KernelVariant(buffers[0].device, kernel=COMPACTION)
    verdict = verdicts.get(variant)
    if verdict is None:
        wanted[variant] = None
    if verdict is None or verdict.problem or not takes_slots(buffers):
        return None
    from lookahead.kernels.compaction import SlotBuffers, compact

    return partial(compact, SlotBuffers(buffers))


def takes_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention of an NVIDIA GPU accepts these `[rows, heads or kv_heads, …, dim]`, without a mask."""
    if query.device.type != "cuda" or torch.version.cuda is None:
        return False
    # Not as causal: with fewer queries than keys, torch would answer for a mask aligned to the first key.
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1]))


def unmasked(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> int:
    """How many first slots `masked_attention` needs no mask for if all queries see the first `prefix`: `prefix` or 0.

    Queries, keys and values are as there. Always 0 except for half precision on an NVIDIA GPU.
    """
    pays = prefix >= max(_LEAST_PREFIX, _LEAST_SHARE * (key.shape[2] - prefix))
    return prefix if pays and query.shape[3] % 8 == 0 and takes_flash(query, key, value) else 0


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by torch, with query heads that share a KV head packed into query rows.

    Args:
        query: `[rows, heads, width, dim]`.
        key: `[rows, kv_heads, slots, dim]`.
        value: `[rows, kv_heads, slots, value_dim]`.
        mask: Added to the scores, `[rows, 1, width * groups, slots]`; None if every query sees every slot. May
            cover only the last slots if every query sees the slots before them, `softcap` and `sinks` are None, and
            `unmasked` allows it.
        scaling: Factor of the scores, above 0; `dim ** -0.5` if None.
        softcap: Scores become `softcap * tanh(scores / softcap)`; above 0, or None.
        sinks: `[heads]`; a logit per head that only takes part in the softmax, or None.

    Returns:
        `[rows, width, heads, value_dim]`, contiguous, in the dtype of `value`.
    """
    rows, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    packed = query.view(rows, kv_heads, groups, width, dim).transpose(2, 3).reshape(rows, kv_heads, width * groups, dim)
    if mask is not None and mask.shape[3] < key.shape[2]:
        out = _behind_prefix(packed, key, value, mask, dim**-0.5 if scaling is None else scaling)
    elif softcap is None and sinks is None:
        out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    else:  # as in Gemma 2 and gpt-oss, which SDPA does not support
        scores = packed @ key.transpose(2, 3) * (scaling or dim**-0.5)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores + mask
        if sinks is not None:
            shares = sinks.to(scores.dtype).view(1, kv_heads, 1, groups).expand(rows, -1, width, -1)
            scores = torch.cat([scores, shares.reshape(rows, kv_heads, width * groups, 1)], -1)
        weights = torch.softmax(scores, -1, dtype=torch.float32)[..., : key.shape[2]]
        out = weights.to(value.dtype) @ value
    out = out.view(rows, kv_heads, width, groups, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(rows, width, heads, -1).contiguous()


def takes_parts(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `causal_in_parts` accepts these tensors: float32 on a CPU, where a mask is slower."""
    is_single = query.device.type == "cpu" and query.dtype == key.dtype == value.dtype == torch.float32
    return is_single and query.shape[3] == value.shape[3]


def causal_in_parts(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """Attention of the last tokens of a text to all of it, by flash attention of a CPU without a mask.

    The tokens attend to all earlier tokens, and causally to themselves, so that no product is wasted. The two parts are
    merged by the logarithms of their sums of weights, as in `_behind_prefix`.

    Args:
        query: `[rows, heads, width, dim]`.
        key: `[rows, kv_heads, slots, dim]`; the last `width` slots hold the tokens, after at least one earlier slot.
        value: `[rows, kv_heads, slots, dim]`.
        scaling: Factor of the scores, above 0; `dim ** -0.5` if None.

    Returns:
        `[rows, width, heads, dim]`, contiguous.
    """
    (rows, heads, width, dim), kv_heads = query.shape, key.shape[1]
    start, groups = key.shape[2] - width, heads // kv_heads
    grouped = query.reshape(rows * kv_heads, groups, width, dim)
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attend(slots: slice, is_causal: bool) -> tuple[Tensor, Tensor]:
        shared = (states[:, :, slots].flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for states in (key, value))
        out, log_sum = flash(grouped, *shared, is_causal=is_causal, scale=scaling)
        return out, log_sum

    (before, log_before), (own, log_own) = attend(slice(start), False), attend(slice(start, None), True)
    out = torch.lerp(before, own, torch.sigmoid(log_own - log_before)[..., None])
    return out.view(rows, heads, width, dim).transpose(1, 2).contiguous()


def _behind_prefix(packed: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Attention of packed queries that see all slots before the masked ones.

    Flash attention processes the unmasked slots in one pass. The logarithm of its sum of weights is one more score in
    the softmax over the other slots, with its output as the value.
    Source: Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes", §3.1.
    """
    start = key.shape[2] - mask.shape[3]
    aten: Any = torch.ops.aten
    is_cpu = packed.device.type == "cpu"
    flash = aten._scaled_dot_product_flash_attention_for_cpu if is_cpu else aten._scaled_dot_product_flash_attention
    before, log_sum, *_ = flash(packed, key[:, :, :start], value[:, :, :start], scale=scaling)
    scores = packed.float() @ key[:, :, start:].transpose(2, 3).float()
    weights = torch.softmax(torch.cat([torch.add(mask, scores, alpha=scaling), log_sum[..., None]], -1), -1)
    out = weights[..., :-1] @ value[:, :, start:].float()
    return torch.addcmul(out, weights[..., -1:], before).to(value.dtype)


def is_supported(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the attention kernel supports tensors of the shapes in `attention_for`."""
    (rows, heads, width, dim), (_, slots, kv_heads, _) = query.shape, values.shape
    return (
        all(states.dtype == query.dtype and states.device == query.device for states in (keys, values))
        and query.dtype in DTYPES
        and all(map(_is_aligned, (query, keys, values)))
        and keys.shape == (rows, slots, kv_heads, dim)
        and heads % kv_heads == 0
        and width <= min(MAX_NODES, slots)
    )


def _is_aligned(tensor: Tensor) -> bool:
    """Whether heads have a supported size, and all start where the kernel can copy 16 bytes at once."""
    size, steps = tensor.shape[3], tensor.stride()
    return (
        size <= MAX_DIM
        and size % _DIM_STEP == 0
        and steps[3] == 1
        and not any(step % _DIM_STEP for count, step in zip(tensor.shape, steps[:3], strict=False) if count > 1)
        and tensor.data_ptr() % _ALIGNMENT == 0
    )


def takes_slots(buffers: Sequence[Tensor]) -> bool:
    """Whether the compaction kernel supports KV buffers `[rows, capacity, …]`."""
    like = buffers[0].shape[:2], buffers[0].device
    sizes = [math.prod(buffer.shape[2:]) * buffer.element_size() for buffer in buffers]
    return all(
        (buffer.shape[:2], buffer.device) == like
        and buffer.is_contiguous()
        and size > 0
        and size % _ALIGNMENT == buffer.data_ptr() % _ALIGNMENT == 0
        for buffer, size in zip(buffers, sizes, strict=True)
    )
