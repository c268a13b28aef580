"""Products of activations and weights in float32 on a CPU, by oneDNN where it is faster than the BLAS of torch.

For float32 torch calls the BLAS it was built with, which uses half of the registers' width on some CPUs. oneDNN, which
torch includes for other types, generates code for the CPU it runs on, separately for every number of tokens.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

STEP = 16  # products are padded to multiples of so many tokens: code for each further number takes 1 ms to generate
FEWEST = 32  # tokens from which on a product is worth looking up its code
_SHARE = 0.8  # most time relative to torch to count as faster
_TRIED = (256, 512, 512)  # tokens, inputs and outputs of the measured product
_TRIALS = 5


class DnnLinear(TorchFunctionMode):
    """Within this block `torch.nn.functional.linear` of many tokens on a CPU runs in oneDNN."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C._nn.linear and not kwargs and _fits(*args[:2]):
            return _linear(*args)
        return func(*args, **(kwargs or {}))


def pays(tokens: int, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies so many tokens faster than torch, with torch's number of threads.

    In half precision torch uses oneDNN itself, and padding would change the last bits.
    """
    return tokens >= FEWEST and dtype == torch.float32 and _is_faster(torch.get_num_threads())


@cache
def _is_faster(threads: int) -> bool:
    """Whether oneDNN exists, is right, and is faster with so many threads; measured once."""
    tokens, inputs, outputs = _TRIED
    x, weight = (torch.linspace(-1, 1, rows * inputs).view(rows, inputs).sin() for rows in (tokens, outputs))
    weight /= inputs
    try:
        is_right = torch.allclose(_linear(x, weight), nn.functional.linear(x, weight), rtol=1e-4, atol=1e-5)
    except (AttributeError, RuntimeError):  # torch was built without oneDNN
        return False
    return is_right and _seconds(_linear, x, weight) < _SHARE * _seconds(nn.functional.linear, x, weight)


@torch.inference_mode()
def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    """The shortest time of a product."""
    return min(timeit.repeat(lambda: multiply(x, weight), number=1, repeat=_TRIALS))


def _fits(x: Any, weight: Any) -> bool:
    """Whether oneDNN supports a product: dense float32 on the CPU, no tensor subclass."""
    return (
        type(x) is Tensor
        and type(weight) in (nn.Parameter, Tensor)
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.layout == weight.layout == torch.strided
        and x.numel() >= FEWEST * x.shape[-1] > 0
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by oneDNN."""
    tokens = x.numel() // x.shape[-1]
    missing = -tokens % STEP
    padded = nn.functional.pad(x.reshape(tokens, -1), (0, 0, 0, missing)) if missing else x
    out: Tensor = torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")
    return out[:tokens].view(*x.shape[:-1], -1) if missing else out
