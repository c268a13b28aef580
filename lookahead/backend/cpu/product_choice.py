"""The fastest product on this CPU, measured once per machine and kept in the cache folder.

The choice decides the order of sums, so every process must make the same one.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from time import perf_counter, thread_time
from timeit import timeit
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lookahead.backend.cpu.product_bits import Layout, lay_out
from lookahead.kernels import packed_product
from lookahead.kernels.jobs import torch_on_one_thread
from lookahead.utils.kept_values import kept, kept_file
from lookahead.utils.machine import machine_fingerprint

# Of float32; a weight as stored needs no copy.
LAYOUTS = {"packed": Layout(block=512), "stored": Layout(block=512, is_stored=True), "onednn": Layout(rows=16)}
_OURS = "packed", "stored"
_TRIED = (2048, 2048)  # inputs and outputs of the measured products
_CACHES = 1 << 26  # bytes read before a product by the weight as it is, so that all weights come from memory
_AS_IT_IS = "torch", "stored"  # the same weight, which no other product reads
_FEW_ROWS = (4, 16)  # rows of the measured products
_ANSWER = {1: 32, 8: 32, 64: 4}  # products of a layer by rows: 64 passes, half with drafts, and a prompt
_TRIALS = 3
_GAIN = 0.95  # largest time relative to torch that counts as faster
_OTHERS = 1.5  # handicap of other backends against our kernel, which does whole layers and passes in one call


@cache
def measured_backends(dtype: torch.dtype, rows: tuple[int, ...] = _FEW_ROWS, gain: float = _GAIN) -> tuple[str, ...]:
    """The backends that multiply faster than torch, "packed" and "stored", our kernel, and "onednn", best first.

    Measured once per `machine_fingerprint`. If the cache folder is not writable, every process measures, and the last
    bits of float32 may differ between processes.
    """
    case = f"{dtype}, rows {rows}, gain {gain}"
    return kept(kept_file("products", machine_fingerprint()), case, _known_backends, lambda: measure(dtype, rows, gain))


def _known_backends(names: Any) -> tuple[str, ...]:
    """The backends in a file, without those of other releases."""
    return tuple(name for name in names if name in LAYOUTS)


def bfloat16_gain() -> float:
    """The speed of this CPU in bfloat16 relative to float32, measured once like `measured_backends`.

    The products are those of a layer for a short answer: passes over one node and over eight, and a prompt.
    """

    def measure_gain() -> float:
        single, half = (_seconds(dtype, tuple(_ANSWER)) for dtype in (torch.float32, torch.bfloat16))
        passes = _ANSWER.values()
        least = [min(sum(map(operator.mul, value, passes)) for value in taken.values()) for taken in (single, half)]
        return float(least[0] / least[1])

    return kept(kept_file("products", machine_fingerprint()), "gain of bfloat16", _known_gain, measure_gain)


def _known_gain(gain: Any) -> float:
    if not 0 < gain < math.inf:
        raise ValueError(f"a gain must be above 0, got {gain}")
    return float(gain)


def measure(dtype: torch.dtype, rows: tuple[int, ...] = _FEW_ROWS, gain: float = _GAIN) -> tuple[str, ...]:
    """The backends that take less than `gain` of torch's time for these numbers of rows, best first.

    Our kernel comes first unless another is much faster, because it also saves time around the products.
    """
    seconds = {name: sum(taken) for name, taken in _seconds(dtype, rows).items()}
    ranks = {
        name: spent * (1 if name in LAYOUTS and LAYOUTS[name].block else _OTHERS) for name, spent in seconds.items()
    }
    return tuple(name for name in sorted(ranks, key=ranks.__getitem__) if seconds[name] < gain * seconds["torch"])


def _seconds(dtype: torch.dtype, rows: tuple[int, ...]) -> dict[str, list[float]]:
    """The minimum seconds of a product for each number of rows, by backend, including "torch".

    The products run on one thread, and its CPU time counts, so that other load matters less: several threads wait for
    one another, most of all if another program uses a core.
    """
    inputs, outputs = _TRIED
    with torch_on_one_thread(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x, weight = (
            torch.linspace(-1, 1, n * inputs, dtype=torch.float32, device="cpu").view(n, inputs).sin()
            for n in (max(rows), outputs)
        )
        x, weight = x.to(dtype), (weight / inputs).to(dtype)
        products: dict[str, Callable[[Tensor, None], Tensor]] = {"torch": lambda x, _: linear(x, weight)}
        for name in LAYOUTS if packed_product.is_supported(weight) else ["onednn"]:
            with suppress(AttributeError, RuntimeError):  # torch was built without oneDNN
                packed = lay_out(weight, LAYOUTS[name]).product
                if torch.allclose(packed(x, None), linear(x, weight), rtol=0.02, atol=1e-3):
                    products[name] = packed
        others = torch.ones(_CACHES // 4, dtype=torch.float32, device="cpu")
        # On Windows the clock of a thread is too coarse.
        clock = thread_time if os.name == "posix" and torch.get_num_threads() == 1 else perf_counter
        seconds = {name: list[float]() for name in products}
        for count in rows:
            calls = [(partial(product, x[:count], None), name in _AS_IT_IS) for name, product in products.items()]
            taken = list[list[float]]()
            for _ in range(_TRIALS):  # interleaved, because other load may come and go
                taken.append([timeit(call, others.sum if is_read else "", clock, 1) for call, is_read in calls])
            for name, times in zip(products, zip(*taken, strict=True), strict=True):
                seconds[name].append(min(times))
    return seconds
