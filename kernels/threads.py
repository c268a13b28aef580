"""Parts of a kernel's work on the threads that torch computes with: other threads would wait for a core behind them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from lookahead.kernels.microkernel import jit_part

_LIBRARY = "libtorch_cpu.so"
_SIGNATURE = types.void(types.int64)


def run(function: Callable[[Any], None], parts: int, tensors: list[Tensor], *sizes: int) -> None:
    """Let a function that Numba compiles work on all parts, on as many threads as torch is set to.

    Where torch has no OpenMP of GNU's interface, as on macOS and Windows, the calling thread works alone.

    Args:
        function: Works on parts that it is given by `take`, until it is given none. It receives the address of int64
            numbers: one for `take`, the number of parts, the addresses of the tensors, and the sizes.
        parts: How many parts there are.
        tensors: Contiguous, on the CPU.
        sizes: Other numbers that the function needs.
    """
    numbers = array("q", [0, parts, *[each.data_ptr() for each in tensors], *sizes])
    address, _ = numbers.buffer_info()
    compiled, threads = _compile(function), min(torch.get_num_threads(), parts)
    launch = _launcher() if threads > 1 else None
    if launch is not None:
        launch(compiled.address, address, threads, 0)
    else:
        compiled.ctypes(address)


@cache
def _compile(function: Callable[[Any], None]) -> Any:
    """The function as one of C; not at import, for not every CPU has the instructions."""
    return numba.cfunc(_SIGNATURE, cache=True, error_model="numpy")(function)


@cache
def _launcher() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded; None where there is none."""
    try:
        launch = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return launch


@intrinsic
def _take(context: Any, address: Any) -> Any:
    """The number of the next part; no other thread gets it."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        whole = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(values[0], whole.as_pointer()), whole(1), "monotonic")

    return types.int64(types.int64), emit


@intrinsic
def _as_pointer(context: Any, address: Any) -> Any:
    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


take: Any = _take
_pointer: Any = _as_pointer
_view: Any = vars(numba)["carray"]


@jit_part
def array_at(address, shape, dtype):
    """The array at an address."""
    return _view(_pointer(address), shape, dtype)
