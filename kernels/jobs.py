"""Work for the threads of a call: functions that Numba compiles, one after the other without the interpreter."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numba import types

from lookahead.kernels.scalars import jit_part
from lookahead.kernels.team import HEAD, ROW, add, join, lead, memory_of_team, team_of
from lookahead.utils.jit import cfunc

Job = tuple[Callable[[Any], None], int, Sequence[int], object]
"""A function that Numba compiles, the number of its parts, int64 numbers for it, and what must live until it is done:
the tensors whose addresses are among the numbers."""


def run(*jobs: Job) -> None:
    """Do jobs one after the other, each on as many threads as torch is set to.

    A function receives the address of int64 numbers: one for `claim_part`, the number of parts, and those of its job.
    It works on parts from `claim_part` until there is none.

    The threads are those of torch, if it has OpenMP of GNU's interface: they do not sleep for milliseconds behind an
    operator of torch, and threads of our own beside them would have no core.
    """
    threads = min(torch.get_num_threads(), max((job[1] for job in jobs), default=1))
    held, launch, memory = array("q", table_of(jobs)), None, 0
    if threads > 1:
        launch, memory = _torch_launcher(), memory_of_team()
    address, held[2] = held.buffer_info()[0], memory
    if launch is None or not memory:
        leader()(team_of(threads) if threads > 1 else 0, address, threads)
    else:
        launch(_compile(join).address, address, threads, 0)


def table_of(jobs: Sequence[Job]) -> list[int]:
    """The numbers of jobs as int64, for one call of the `leader`."""
    table, passed = [len(jobs), 0, 0], list[int]()
    for function, parts, numbers, _ in jobs:
        table += _compile(function).address, 8 * (HEAD + ROW * len(jobs) + len(passed)), 0
        passed += (0, parts, *numbers)
    return table + passed


@cache
def leader() -> Callable[[int, int, int], None]:
    """What does the jobs of a table, which counts their parts, on so many threads of our own.

    It takes the address of a `team_of` threads, that of the table, and the number of threads. It is for calls so long
    that no operator of torch runs shortly before.
    """
    kind = types.void(types.int64, types.int64, types.int64)
    return cfunc(kind, error_model="numpy")(lead).ctypes  # type: ignore[no-any-return]


@cache
def _compile(function: Callable[[Any], None]) -> Any:
    """The function as one of C; not at import, for not every CPU has the instructions."""
    return cfunc(types.void(types.int64), error_model="numpy")(function)


@cache
def _torch_library() -> Any:
    """The library of torch's operators, by which its OpenMP is found; None where torch has none of this name."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


@cache
def _torch_launcher() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded; None without one."""
    launch = getattr(_torch_library(), "GOMP_parallel", None)
    if launch is not None:
        launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return launch


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Let torch's operators use no other thread than this one until the block ends, where torch has OpenMP.

    Threads of torch, once woken, keep cores busy for milliseconds.
    """
    with torch_on_threads(1):
        yield


@contextmanager
def torch_on_threads(most: int) -> Iterator[None]:
    """Let what this thread calls use at most so many threads until the block ends, where torch has OpenMP.

    What other threads of the process call is not touched.
    """
    threads, library = torch.get_num_threads(), _torch_library()
    setters = [getattr(library, name, None) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")]
    if threads <= most or setters[0] is None:
        yield
        return
    before = [setter(most) if setter else 0 for setter in setters]
    try:
        yield
    finally:
        setters[0](threads)
        if setters[1]:
            setters[1](before[1])


@jit_part
def claim_part(address):
    """The number of the next part; no other thread gets it."""
    return add(address, 1)
