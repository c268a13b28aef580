"""Products of activations and weights on a CPU, by oneDNN where that is faster than the library that torch calls.

For float32 torch calls the BLAS it was built with, which on some makes of CPU leaves half of the registers' width
unused. oneDNN, which torch brings along for other types, makes its code for the CPU at hand, and makes it anew for
every number of tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

STEP = 16  # tokens: products are padded to multiples of so many, since code for a further number takes 1 ms to make
# Tokens from which on a product is worth the search for its code; torch itself lets oneDNN multiply bfloat16, unpadded.
FEWEST = {torch.float32: 32, torch.bfloat16: 80}
_SHARE = 0.8  # of the time: what it may take at most to be the faster one
_TRIED = (256, 512, 512)  # tokens, inputs and outputs of the product that decides
_TRIALS = 5
_met: set[tuple[object, ...]] = set()  # products that there is code for; oneDNN keeps it for the process


class DnnLinear(TorchFunctionMode):
    """Within this block `torch.nn.functional.linear` of many tokens on a CPU runs in oneDNN.

    Attributes:
        is_cold: Whether code was made for a product, which later ones like it need not wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_cold = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch."""
        if func is torch._C._nn.linear and not kwargs and _fits(*args[:2]):
            known = len(_met)
            out = _linear(*args)
            self.is_cold |= len(_met) > known
            return out
        return func(*args, **(kwargs or {}))


def pays(tokens: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies so many tokens of a type sooner than torch does, on so many threads as there are."""
    if tokens < FEWEST.get(dtype, tokens + 1):
        return False
    return _multiplies(dtype) if dtype == torch.bfloat16 else _is_faster(torch.get_num_threads())


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and comes to what torch does."""
    x, weight = _trial(dtype)
    try:
        return torch.allclose(_linear(x, weight), nn.functional.linear(x, weight), rtol=2e-2, atol=1e-2)
    except (AttributeError, RuntimeError):  # torch was built without it
        return False


@cache
def _is_faster(threads: int) -> bool:
    """Whether it multiplies float32 sooner on so many threads: measured once."""
    if not _multiplies(torch.float32):
        return False
    x, weight = _trial(torch.float32)
    return _seconds(_linear, x, weight) < _SHARE * _seconds(nn.functional.linear, x, weight)


def _trial(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations and weights of the product that decides."""
    tokens, inputs, outputs = _TRIED
    x, weight = (torch.linspace(-1, 1, rows * inputs).view(rows, inputs).sin() for rows in (tokens, outputs))
    return x.to(dtype), (weight / inputs).to(dtype)


@torch.inference_mode()
def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    """The least time a product took."""
    times = []
    for _ in range(_TRIALS):
        begin = time.perf_counter()
        multiply(x, weight)
        times.append(time.perf_counter() - begin)
    return min(times)


def _fits(x: Any, weight: Any) -> bool:
    """Whether a product is one that oneDNN is for: dense and on the CPU, no subclass that has ways of its own."""
    return (
        type(x) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and x.dtype == weight.dtype
        and x.device.type == weight.device.type == "cpu"
        and x.layout == weight.layout == torch.strided
        and x.numel() >= FEWEST.get(x.dtype, math.inf) * x.shape[-1] > 0
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by oneDNN."""
    tokens = x.numel() // x.shape[-1]
    missing = -tokens % STEP
    _met.add((tokens + missing, *weight.shape, x.dtype, bias is None))
    padded = nn.functional.pad(x.reshape(tokens, -1), (0, 0, 0, missing)) if missing else x
    out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return out[:tokens].view(*x.shape[:-1], -1) if missing else out
