"""Work for the threads of torch: functions that Numba compiles, called one after the other without the interpreter."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from lookahead.kernels.scalars import to_intrinsic
from lookahead.utils.addresses import array_at
from lookahead.utils.jit import cfunc

_LIBRARY = "libtorch_cpu.so"
_SIGNATURE = types.void(types.int64)
_HEAD = 2  # numbers before the table of jobs

Job = tuple[Callable[[Any], None], int, Sequence[int], object]
"""A function that Numba compiles, the number of its parts, int64 numbers for it, and what must live until it is done:
the tensors whose addresses are among the numbers."""


def run(*jobs: Job) -> None:
    """Do jobs one after the other, each on as many threads as torch is set to.

    A function receives the address of int64 numbers: one for `claim_part`, the number of parts, and those of its job.
    It works on parts from `claim_part` until there is none. Where torch has no OpenMP of GNU's interface, as
    on macOS and Windows, the calling thread works alone.
    """
    threads = min(torch.get_num_threads(), max((job[1] for job in jobs), default=1))
    held = array("q", table_of(jobs, threads))
    launcher(threads)(held.buffer_info()[0])


def table_of(jobs: Sequence[Job], threads: int) -> list[int]:
    """The numbers of jobs as int64, for one call of a `launcher`."""
    team = _launcher() if threads > 1 else None
    table, passed = [len(jobs), team[1] if team else 0], list[int]()
    for function, parts, numbers, _ in jobs:
        table += _compile(function).address, 8 * (_HEAD + 2 * len(jobs) + len(passed))
        passed += (0, parts, *numbers)
    return table + passed


def launcher(threads: int) -> Callable[[int], object]:
    """What does the jobs of a table at an address, which counts their parts, on so many threads."""
    in_turn, team = _compile(_in_turn), _launcher() if threads > 1 else None
    if team is None:
        return in_turn.ctypes  # type: ignore[no-any-return]
    return lambda address: team[0](in_turn.address, address, threads, 0)


def _in_turn(address: Any) -> None:
    """Call the functions of all jobs: behind their number and the barrier, each function and its numbers' place."""
    count, barrier = array_at(address, (_HEAD,), np.int64)
    table = array_at(address + 8 * _HEAD, (count, 2), np.int64)
    for i in range(count):
        if barrier and i:
            _call(barrier, 0)
        _call(table[i, 0], address + table[i, 1])


@cache
def _compile(function: Callable[[Any], None]) -> Any:
    """The function as one of C; not at import, for not every CPU has the instructions."""
    return cfunc(_SIGNATURE, cache=True, error_model="numpy")(function)


@cache
def _launcher() -> tuple[Callable[[int, int, int, int], None], int] | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded, and the place of its barrier; None without one."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))
        launch, barrier = library.GOMP_parallel, ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return (launch, barrier) if barrier else None


@to_intrinsic
def _call(context: Any, function: Any, address: Any) -> Any:
    """Call the function of C at an address; one without arguments takes no notice of its argument."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), [values[1]])
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@to_intrinsic
def claim_part(context: Any, address: Any) -> Any:
    """The number of the next part; no other thread gets it."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        whole = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(values[0], whole.as_pointer()), whole(1), "monotonic")

    return types.int64(types.int64), emit
