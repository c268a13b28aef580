"""Arrays by address: compiled code takes one number at every step instead of many arrays.

Passing an array to compiled code takes longer than passing a number, and compiled code counts references to an array
wherever it is passed on. Both together took as long as a search.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

# Compiled as part of its caller, and a plain function in Python. `njit` would compile each once more to be called from
# Python, and for every literal argument: a third of the compile time.
jit_inline: Any = register_jitable(error_model="numpy", forceinline=True)


class RawArrays:
    """An object whose arrays compiled code reads by the address of `_pointers`, which never moves, while it lives."""

    __slots__ = ("_pointers", "address")

    def __init__(self, pointers: int) -> None:
        self._pointers = np.zeros(pointers, np.int64)
        self.address = int(self._pointers.ctypes.data)

    def _point_to(self, *arrays: NDArray[Any]) -> None:
        """Write the addresses of arrays to the first pointers; call it whenever an array is replaced."""
        for i, array in enumerate(arrays):
            if not array.flags.c_contiguous or not array.flags.aligned:
                raise ValueError(f"array {i} must be contiguous and aligned, got strides {array.strides}")
            self._pointers[i] = array.ctypes.data

    def __reduce__(self) -> Any:
        """Refuse copies: they would hold the addresses of the original."""
        raise TypeError(f"a {type(self).__name__} can be neither copied nor pickled")


def _pointer_to(context: Any, address: Any) -> Any:
    """An intrinsic that casts a number to a pointer."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], target.get_value_type(signature.return_type))

    return types.voidptr(types.int64), emit


_pointer: Any = intrinsic(_pointer_to)
_view: Any = numba.carray  # type: ignore[attr-defined]


def _array_at(address: Any, shape: Any, dtype: Any) -> Any:
    return _view(_pointer(address), shape, dtype)


def _interpreted_array_at(address: Any, shape: Any, dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), dtype).reshape(shape)


is_compiled = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
array_at: Any = jit_inline(_array_at) if is_compiled else _interpreted_array_at


@jit_inline
def pointers_at(address, count):
    """The pointers of a `RawArrays`, int64 `[count]`."""
    return array_at(address, (count,), np.int64)
