"""Arrays by where they lie: what compiled code is handed at every step, in place of the arrays themselves.

To receive an array takes compiled code longer than to receive a number, and it counts references to an array wherever
that is passed on. A search is short, and the two together took as long.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

# Part of the compiled code that calls it, and a plain function elsewhere. With `njit` each would be compiled once more
# to be called from Python, and for every literal it is called with: that made up a third of what compiling took.
jit_inline: Any = register_jitable(error_model="numpy", forceinline=True)


class Placed:
    """Something whose arrays compiled code reads where they lie, as long as it lives.

    Attributes:
        address: Where its `places` lie: an int64 array that stays where it is.
    """

    __slots__ = ("_places", "address")

    def __init__(self, places: int) -> None:
        self._places = np.zeros(places, np.int64)
        self.address = int(self._places.ctypes.data)

    def _place(self, *arrays: NDArray[Any]) -> None:
        """Note where arrays lie, the first places; to be called whenever one is replaced.

        Raises:
            ValueError: One has gaps, or stands askew in memory.
        """
        for i, array in enumerate(arrays):
            if not array.flags.c_contiguous or not array.flags.aligned:
                raise ValueError(f"array {i} must be contiguous and aligned, got strides {array.strides}")
            self._places[i] = array.ctypes.data

    def __reduce__(self) -> Any:
        """Refuse to be copied: the copy would tell the places of the original."""
        raise TypeError(f"a {type(self).__name__} can be neither copied nor pickled")


def _pointer_to(context: Any, address: Any) -> Any:
    """The pointer that a number is."""

    def emit(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], target.get_value_type(signature.return_type))

    return types.voidptr(types.int64), emit


_pointer: Any = intrinsic(_pointer_to)
_view: Any = numba.carray  # type: ignore[attr-defined]


def _array_at(address: Any, shape: Any, dtype: Any) -> Any:
    """The array that lies at an address."""
    return _view(_pointer(address), shape, dtype)


def _interpreted_array_at(address: Any, shape: Any, dtype: Any) -> Any:
    """The same where nothing is compiled."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(int(address)), dtype).reshape(shape)


is_compiled = not numba.config.DISABLE_JIT  # type: ignore[attr-defined]
array_at: Any = jit_inline(_array_at) if is_compiled else _interpreted_array_at


@jit_inline
def places_at(address, count):
    """The places that a `Placed` tells, int64 `[count]`."""
    return array_at(address, (count,), np.int64)
