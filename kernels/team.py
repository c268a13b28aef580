"""Threads that share the jobs of a call, and wait for one another without holding up a busy machine.

OpenMP threads wait for all others at every barrier, and spin for milliseconds. If another program runs on one of the
cores, each barrier then takes as long as that program's time slice. Here a thread waits only for parts that another has
begun. It soon sleeps, so that the system can give its core to the thread it waits for.
"""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lookahead.kernels.scalars import jit_part, to_intrinsic
from lookahead.utils.addresses import array_at
from lookahead.utils.jit import cfunc

HEAD = 3  # numbers before the rows of a table: jobs, threads that may share them, and the memory of the team
ROW = 3  # numbers of a row: the function of a job, the offset of its own numbers, and the threads working on it

_LINE = 64  # size of a cache line in bytes; numbers that different threads write are in different lines
# Offsets in the memory of a team. A call is running while the count of beginnings and ends is odd.
_IN_USE, _CALL, _INSIDE, _ASLEEP, _BORN, _TABLE, _FUNCTIONS, _MUTEX, _CONDITION = (_LINE * i for i in (*range(8), 9))
_SIZE = 12 * _LINE  # a mutex takes up to 64 bytes, a condition up to 48
_NAMES = "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"
_SPINS = 2000  # checks of a condition before a thread sleeps; about 50 microseconds
_SEVERAL = 2  # threads of the smallest team

_PAUSE: tuple[str, list[Any]] = "llvm.x86.sse2.pause", []
_YIELD: tuple[str, list[Any]] = "llvm.aarch64.hint", [ir.IntType(32)(1)]
_HINTS = {"x86_64": _PAUSE, "amd64": _PAUSE, "aarch64": _YIELD, "arm64": _YIELD}

_guard = Lock()


def team_of(threads: int) -> int:
    """The address of this process's team of at least `threads` threads, including the caller.

    0 for one thread, and on systems without POSIX threads, such as Windows. The memory is never freed: its threads
    sleep there until the process ends.
    """
    if threads < _SEVERAL:
        return 0
    with _guard:
        team = _team()
        if team is None:
            return 0
        address, members = team
        while len(members) < threads - 1:
            member = ctypes.c_void_p()
            if ctypes.CDLL(None).pthread_create(ctypes.byref(member), None, _member(), ctypes.c_void_p(address)):
                break  # thread limit of the system
            members.append(member)
        return address


@cache
def _team() -> tuple[int, list[ctypes.c_void_p]] | None:
    """The address of the team, and its threads except callers."""
    try:
        system = ctypes.CDLL(None)
        functions = [ctypes.cast(getattr(system, name), ctypes.c_void_p).value or 0 for name in _NAMES]
        system.calloc.restype, system.calloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
        address = -(-system.calloc(1, _SIZE + _LINE) // _LINE) * _LINE
        system.pthread_mutex_init(ctypes.c_void_p(address + _MUTEX), None)
        system.pthread_cond_init(ctypes.c_void_p(address + _CONDITION), None)
    except (AttributeError, OSError, TypeError):
        return None
    ctypes.memmove(address + _FUNCTIONS, (ctypes.c_int64 * len(functions))(*functions), 8 * len(functions))
    return address, []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_team.cache_clear)  # the child has no such threads


def memory_of_team() -> int:
    """The address at which threads that share jobs wait for one another, or 0."""
    with _guard:
        team = _team()
    return team[0] if team else 0


@cache
def _member() -> ctypes.c_void_p:
    return ctypes.c_void_p(cfunc(types.void(types.int64), error_model="numpy")(_serve).address)


def _serve(team: Any) -> None:
    """The loop of a team thread: it joins calls that need it."""
    number, seen = add(team + _BORN, 1) + 1, 0
    while True:
        _wait(_has_begun, team, team + _CALL, seen)
        add(team + _INSIDE, 1)
        seen = _load(team + _CALL)
        if seen & 1:
            table = _load(team + _TABLE)
            if number < _load(table + 8):
                _do_jobs(team, table)
        add(team + _INSIDE, -1)
        _wake(team)


def lead(team: Any, table: Any, threads: Any) -> None:
    """Run the jobs of a table one after the other with a team, or alone if the team serves another caller."""
    if not team or _exchange(team + _IN_USE, 1):
        for at in range(_load(table)):
            function, place, _ = array_at(table + 8 * (HEAD + ROW * at), (ROW,), np.int64)
            call(function, table + place, 0)
        return
    array_at(table, (HEAD,), np.int64)[1] = threads
    array_at(team + _TABLE, (1,), np.int64)[0] = table
    add(team + _CALL, 1)
    _wake(team)
    _do_jobs(team, table)
    add(team + _CALL, 1)  # no thread joins from here on; those inside leave when their parts are done
    _wait(_is_empty, team, team + _INSIDE, 0)
    _exchange(team + _IN_USE, 0)


def join(table: Any) -> None:
    """The entry point of each thread that an external launcher starts for a table."""
    _do_jobs(_load(table + 16), table)


@jit_part
def _do_jobs(team, table):
    """Work on parts of all jobs, each after the previous job is done."""
    row = table + 8 * HEAD
    for at in range(_load(table)):
        if at:
            _wait(_is_done, team, row, table)
            row += 8 * ROW
        numbers = table + _load(row + 8)
        if _load(numbers) < _load(numbers + 8):
            add(row + 16, 1)
            call(_load(row), numbers, 0)
            add(row + 16, -1)
            _wake(team)


@jit_part
def _is_done(row, table):
    """Whether all parts of a job are claimed, and no thread works on one."""
    numbers = table + _load(row + 8)
    return _load(numbers) >= _load(numbers + 8) and _load(row + 16) == 0


@jit_part
def _has_begun(calls, seen):
    now = _load(calls)
    return now != seen and now & 1


@jit_part
def _is_empty(inside, _):
    return _load(inside) == 0


@jit_part
def _wait(condition, team, place, number):
    """Wait until a condition holds; whoever makes it hold then calls `_wake`."""
    for _ in range(_SPINS):
        if condition(place, number):
            return
        _pause()
    lock, unlock, sleep, _ = array_at(team + _FUNCTIONS, (4,), np.int64)
    add(team + _ASLEEP, 1)
    call(lock, team + _MUTEX, 0)
    while not condition(place, number):
        call(sleep, team + _CONDITION, team + _MUTEX)
    call(unlock, team + _MUTEX, 0)
    add(team + _ASLEEP, -1)


@jit_part
def _wake(team):
    """Wake sleeping threads. They register before their last check, so none misses its condition."""
    if _load(team + _ASLEEP):
        lock, unlock, _, wake = array_at(team + _FUNCTIONS, (4,), np.int64)
        call(lock, team + _MUTEX, 0)
        call(wake, team + _CONDITION, 0)
        call(unlock, team + _MUTEX, 0)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@to_intrinsic
def add(context: Any, address: Any, number: Any) -> Any:
    """Atomically add to the int64 at an address; returns the previous value."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@to_intrinsic
def _exchange(context: Any, address: Any, number: Any) -> Any:
    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.atomic_rmw("xchg", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@to_intrinsic
def _load(context: Any, address: Any) -> Any:
    """Atomically load the int64 at an address, before any later read."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(builder, values[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@to_intrinsic
def _pause(context: Any) -> Any:
    """Hint to the core that its thread is waiting; a no-op on unlisted CPUs."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        hint = _HINTS.get(platform.machine().lower())
        if hint:
            name, numbers = hint
            kind = ir.FunctionType(ir.VoidType(), [number.type for number in numbers])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), numbers)
        return target.get_dummy_value()

    return types.void(), emit


@to_intrinsic
def call(context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a C function at an address; a function of one argument ignores the second."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), values[1:])
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit
