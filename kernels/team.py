"""The threads that share the jobs of a call, and wait for one another without holding up a busy machine.

Threads of OpenMP wait for all others at every barrier, for milliseconds without sleeping. Where another program runs on
one of the cores, each barrier then takes as long as the turn of that program. Here a thread waits for parts that
another has begun, and for nothing else. It soon sleeps, so that the system can give its core to the one it waits for.
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
ROW = 3  # numbers of a row: the function of a job, the distance to its own numbers, and the threads at work on it

_LINE = 64  # bytes that cores exchange at a time; what different threads write stands in different lines
# Places in the memory of a team. A call is going on while the number of beginnings and ends is odd.
_IN_USE, _CALL, _INSIDE, _ASLEEP, _BORN, _TABLE, _FUNCTIONS, _MUTEX, _CONDITION = (_LINE * i for i in (*range(8), 9))
_SIZE = 12 * _LINE  # a mutex takes up to 64 bytes, a condition up to 48
_NAMES = "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait", "pthread_cond_broadcast"
_SPINS = 2000  # looks at what a thread waits for before it sleeps; some 50 microseconds
_SEVERAL = 2  # threads of the smallest team

_PAUSE: tuple[str, list[Any]] = "llvm.x86.sse2.pause", []
_YIELD: tuple[str, list[Any]] = "llvm.aarch64.hint", [ir.IntType(32)(1)]
_HINTS = {"x86_64": _PAUSE, "amd64": _PAUSE, "aarch64": _YIELD, "arm64": _YIELD}

_guard = Lock()


def team_of(threads: int) -> int:
    """The address of the team of this process, made of so many threads or more, the caller among them.

    It is 0 for one thread, and where the system has no threads of POSIX, as Windows. The memory is never freed: its
    threads sleep there until the process ends.
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
                break  # the system allows no more threads
            members.append(member)
        return address


@cache
def _team() -> tuple[int, list[ctypes.c_void_p]] | None:
    """The address of the team, and its threads but for the callers."""
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
    os.register_at_fork(after_in_child=_team.cache_clear)  # the child has none of the threads


def memory_of_team() -> int:
    """The address by which threads that share jobs wait for one another; 0 where there is none."""
    with _guard:
        team = _team()
    return team[0] if team else 0


@cache
def _member() -> ctypes.c_void_p:
    return ctypes.c_void_p(cfunc(types.void(types.int64), error_model="numpy")(_serve).address)


def _serve(team: Any) -> None:
    """What a thread of a team does for ever: it joins the calls that have use for it."""
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
    """Do the jobs of a table, one after the other, with a team; without one where it is at work for another caller."""
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
    add(team + _CALL, 1)  # nobody joins from here on; whoever has joined leaves when its parts are done
    _wait(_is_empty, team, team + _INSIDE, 0)
    _exchange(team + _IN_USE, 0)


def join(table: Any) -> None:
    """What each of several threads that others have started does with a table."""
    _do_jobs(_load(table + 16), table)


@jit_part
def _do_jobs(team, table):
    """Do parts of all jobs, each when the one before is done."""
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
    """Whether all parts of a job are taken, and nobody is at work on one."""
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
    """Wait until a condition holds, which whoever makes it hold follows by `_wake`."""
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
    """Wake those who sleep. They count themselves before they look, so none sleeps past what it waits for."""
    if _load(team + _ASLEEP):
        lock, unlock, _, wake = array_at(team + _FUNCTIONS, (4,), np.int64)
        call(lock, team + _MUTEX, 0)
        call(wake, team + _CONDITION, 0)
        call(unlock, team + _MUTEX, 0)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@to_intrinsic
def add(context: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, which no other thread changes meanwhile; returns what was there."""

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
    """The int64 at an address, and before whatever is read later."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(_pointer(builder, values[0]), "seq_cst", 8)

    return types.int64(types.int64), emit


@to_intrinsic
def _pause(context: Any) -> Any:
    """Tell the core that its thread waits; nothing on a CPU that is not named here."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        hint = _HINTS.get(platform.machine().lower())
        if hint:
            name, numbers = hint
            kind = ir.FunctionType(ir.VoidType(), [each.type for each in numbers])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), numbers)
        return target.get_dummy_value()

    return types.void(), emit


@to_intrinsic
def call(context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call a function of C at an address; one of fewer arguments takes no notice of the last."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2).as_pointer()
        builder.call(builder.inttoptr(values[0], kind), values[1:])
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit
