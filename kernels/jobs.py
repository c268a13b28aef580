"""Jobs for the threads of a call: functions compiled by Numba that run one after the other, outside the interpreter."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types

from lookahead.kernels.scalars import jit_part
from lookahead.kernels.team import HEAD, ROW, add, join, lead, memory_of_team, team_of
from lookahead.utils.addresses import array_at
from lookahead.utils.jit import cfunc, njit

Job = tuple[Callable[[Any], None], int, Sequence[int], object]
"""A function for Numba to compile, the number of its parts, its int64 numbers, and objects to keep alive until it is
done, such as the tensors whose addresses are among the numbers."""


def run(*jobs: Job) -> None:
    """Run jobs one after the other, each on as many threads as torch is set to.

    A function receives the address of int64 numbers: one for `claim_part`, the number of parts, and those of its job.
    It works on parts from `claim_part` until there are none.

    Torch's own threads are used if it has OpenMP with GNU's interface: they spin for milliseconds after an operator of
    torch, and would compete with further threads for cores.
    """
    threads = min(torch.get_num_threads(), max((job[1] for job in jobs), default=1))
    table, launch, memory = array("q", table_of(jobs)), None, 0
    if threads > 1:
        launch, memory = _torch_launcher(), memory_of_team()
    address, table[2] = table.buffer_info()[0], memory
    if launch is None or not memory:
        leader()(team_of(threads) if threads > 1 else 0, address, threads)
    else:
        launch(_compile(join).address, address, threads, 0)


def lead_jobs(jobs: Sequence[Job], threads: int) -> None:
    """Run jobs one after the other on our own threads, within a longer call."""
    table = array("q", table_of(jobs))
    leader()(team_of(threads) if threads > 1 else 0, table.buffer_info()[0], threads)


def table_of(jobs: Sequence[Job]) -> list[int]:
    """The int64 numbers of jobs, for one call of the `leader`."""
    table, passed = [len(jobs), 0, 0], list[int]()
    for function, parts, numbers, _ in jobs:
        table += _compile(function).address, 8 * (HEAD + ROW * len(jobs) + len(passed)), 0
        passed += (0, parts, *numbers)
    return table + passed


@njit()
def lay_out(affine, tokens, slot, address, numbers):
    """Write the numbers of jobs, from their base and their factors of tokens, of the first slot and of an address."""
    for at in range(numbers.size):
        numbers[at] = affine[0, at] + tokens * affine[1, at] + slot * affine[2, at] + address * affine[3, at]


@cache
def leader() -> Callable[[int, int, int], None]:
    """A function that runs the jobs of a table on a number of threads of our own.

    It takes the address from `team_of`, the address of the table, which counts claimed parts, and the number of
    threads. It is for long calls without an operator of torch shortly before.
    """
    kind = types.void(types.int64, types.int64, types.int64)
    return cfunc(kind, error_model="numpy")(lead).ctypes  # type: ignore[no-any-return]


@cache
def _compile(function: Callable[[Any], None]) -> Any:
    """Compile a job function to a C function; not at import, since some CPUs lack the instructions."""
    return cfunc(types.void(types.int64), error_model="numpy")(function)


@cache
def _torch_library() -> Any:
    """Torch's operator library, through which its OpenMP is found; None if there is no library of this name."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


@cache
def _torch_launcher() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded, or None."""
    launch = getattr(_torch_library(), "GOMP_parallel", None)
    if launch is not None:
        launch.argtypes, launch.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return launch


@contextmanager
def torch_on_one_thread() -> Iterator[None]:
    """Restrict torch's operators to this thread until the block ends, if torch has OpenMP.

    Threads of torch, once woken, keep cores busy for milliseconds.
    """
    with torch_on_threads(1):
        yield


@contextmanager
def torch_on_threads(most: int) -> Iterator[None]:
    """Restrict calls of this thread to at most `most` threads until the block ends, if torch has OpenMP.

    Other threads of the process are not affected.
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
    """The index of the next part, which no other thread gets."""
    return add(address, 1)


@jit_part
def _work(address, work, kind):
    """Do parts until there are none."""
    parts = array_at(address, (2,), np.int64)[1]
    part = claim_part(address)
    while part < parts:
        work(address + 16, part, kind)
        part = claim_part(address)


def by_parts(work: Any) -> dict[torch.dtype, Callable[[Any], None]]:
    """Job functions by the dtype of a model, which call `work` for every part.

    It takes the address of the numbers of the job, the part, and 0 for bfloat16 or 0.0 for float32.
    """

    def on_halves(address: Any) -> None:
        _work(address, work, 0)

    def on_floats(address: Any) -> None:
        _work(address, work, 0.0)

    return {torch.bfloat16: on_halves, torch.float32: on_floats}
