"""Shared parts of CPU kernels: the exponential function, and numbers of tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from lookahead.utils.addresses import array_at
from lookahead.utils.jit import njit

# Compiled only into its callers, without an entry point for Python.
jit_part: Any = register_jitable(error_model="numpy")
to_intrinsic: Any = intrinsic

_F = np.float32
_LOG2E = _F(1.4426950408889634)
# ln 2 in two parts: multiples of the first are exact, so that the rest of x keeps all its bits.
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-2.12194440e-4)
_SERIES = tuple(map(_F, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)))
_SMALLEST = _F(-87.0)  # below it the result is not a normal float32
_LARGEST = _F(89.0)  # its exponential exceeds float32


@cache
def bits_of(number: float) -> int:
    """The bits of a float32, as one of a job's integers."""
    return int(np.float32(number).view(np.int32))


def widen(number: Any) -> Any:
    """A tensor element as float32; a bfloat16 is held as int16 or uint16."""


def narrow(number: Any, like: Any) -> Any:
    """A float32 as an element of a tensor that holds `like`; rounded to the nearest bfloat16, ties to even."""


@overload(widen, strict=False)
def _widen_as(number: Any) -> Any:
    if number in (types.int16, types.uint16):
        return lambda number: np.int32(np.int32(number) << np.int32(16)).view(np.float32)
    return lambda number: number


@overload(narrow, strict=False)
def _narrow_as(number: Any, like: Any) -> Any:
    if like != types.uint16:
        return lambda number, like: number

    def narrow(number: Any, like: Any) -> Any:
        bits = np.float32(number).view(np.int32)
        nearest = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
        return np.uint16(nearest if number == number else np.int32(0x7FC0))

    return narrow


def numbers_at(address: Any, size: Any, kind: Any) -> Any:
    """The array at an address: bfloat16 if `kind` is an integer, else float32."""


@overload(numbers_at, strict=False)
def _typed_numbers_at(address: Any, size: Any, kind: Any) -> Any:
    dtype = np.uint16 if isinstance(kind, types.Integer) else np.float32
    return lambda address, size, kind: array_at(address, (size,), dtype)


@to_intrinsic
def fma(context: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of float32, rounded once."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), emit


@jit_part
def scaled(number, power):
    """A number times a power of 2, in two factors: the power alone may not be a normal float32."""
    first = np.int32(np.int32(power) >> np.int32(1))
    second = np.int32(np.int32(power) - first)
    number *= np.int32((first + np.int32(127)) << np.int32(23)).view(np.float32)
    return number * np.int32((second + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def _exp_parts(x):
    """An exponent of 2, and the factor on that power."""
    whole = np.floor(x * _LOG2E + _F(0.5))
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    series = _SERIES[0]
    for i in range(1, 6):
        series = series * rest + _SERIES[i]
    return whole, series * rest * rest + rest + _F(1.0)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def exp(x):
    """The exponential of a float32, with a relative error of 1e-7; 0 below the normal float32 range, NaN for NaN.

    A compiler can vectorize this code, unlike a call of libm.

    Source: Moshier 1989, "Methods and Programs for Mathematical Functions", the polynomial of Cephes' expf.
    """
    whole, series = _exp_parts(_LARGEST if x > _LARGEST else x)
    return _F(0.0) if x < _SMALLEST else scaled(series, whole)


@njit(fastmath={"contract", "nsz"}, error_model="numpy")
def exp_of_negative(x):
    """`exp` for arguments of at most 0, with half as many operations."""
    whole, series = _exp_parts(x)
    scaled = series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return _F(0.0) if x < _SMALLEST else scaled
