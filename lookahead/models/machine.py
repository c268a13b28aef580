"""The speed of a device: measured, or as its properties say."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lookahead.drafting.cost_model import NODE_COST
from lookahead.models.target import input_device

# FLOPs a clock of one multiprocessor, by compute capability: dense products of half precision, added in float32.
# GeForce cards of 8.6, 8.9 and 12.0 have half the rate of professional ones, and stand for both.
# Source: NVIDIA's white papers on the architectures (V100, Turing, A100, GA102, Ada, H100, Blackwell), tables of SMs.
_FLOPS_A_CLOCK = {
    (7, 0): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 9): 512, (9, 0): 4096,
    (10, 0): 8192, (10, 3): 8192, (12, 0): 512, (12, 1): 512,
}  # fmt: skip

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Machine:
    """Speed of a device."""

    flops: float  # a second in a large matrix product
    bytes_per_s: float  # read and written by a copy of a buffer as large as the weights


def measure_machine(model: PreTrainedModel, clock: Clock = time.perf_counter) -> Machine:
    """Measure the model's device in the model's dtype by a matrix product and a copy."""
    device, dtype = input_device(model), model.dtype
    side = 8192 if device.type == "cuda" else 1024
    left = torch.ones(side, side, dtype=dtype, device=device)
    weights = sum(each.nbytes for each in model.parameters())
    buffer = torch.ones(min(max(weights, 1 << 24), 1 << 30), dtype=torch.uint8, device=device)
    copy = torch.empty_like(buffer)
    product_s = min(timed(lambda: left @ left, device, clock) for _ in range(4))
    copy_s = min(timed(lambda: copy.copy_(buffer), device, clock) for _ in range(4))
    return Machine(flops=2.0 * side**3 / product_s, bytes_per_s=2.0 * buffer.nbytes / copy_s)


def timed(work: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Seconds of some work, with the device synchronized."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(clock() - start, 1e-9)


def rated_machine(device: torch.device) -> Machine | None:
    """The peak speed of a GPU in half precision, from its clocks; None where it is not known."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    rated = torch.cuda.get_device_properties(device)
    flops = _FLOPS_A_CLOCK.get((rated.major, rated.minor))
    memory_khz, bits = (getattr(rated, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    khz = getattr(rated, "clock_rate", 0)  # not in every version of torch
    if flops is None or not khz * memory_khz * bits:
        return None
    return Machine(1e3 * khz * rated.multi_processor_count * flops, 2e3 * memory_khz * bits / 8)  # double data rate


def node_cost(model: PreTrainedModel) -> float:
    """First guess of the cost of one more node of a tree, as a share of a step of one node.

    On a GPU a step of one node takes as long as its weights are read, and each further node as long as two operations
    a weight: on an H100 0.3% of a step in half precision. Overhead of launches makes the share smaller. For other
    devices and types, packed weights, and mixtures of experts, whose nodes read experts of their own, `NODE_COST`.
    """
    machine = rated_machine(input_device(model))
    is_half = model.dtype in (torch.bfloat16, torch.float16) and not getattr(model, "is_quantized", False)
    if machine is None or not is_half or any("experts" in name for name, _ in model.named_modules()):
        return NODE_COST
    return machine.bytes_per_s / machine.flops  # 2 operations for 2 bytes
