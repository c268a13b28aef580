"""Arrays at addresses: compiled functions that take many arrays find them by one record of addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload
from numpy.typing import NDArray


def array_at(address: Any, shape: Any, dtype: Any) -> NDArray[Any]:
    """The array of a shape, in order and without gaps, at an address: many arrays take long to pass one by one.

    Whoever gave the address keeps the array.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ndarray(shape, dtype, (ctypes.c_byte * size).from_address(int(address)))


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), lower


@overload(array_at, strict=False)
def _array_at(address: Any, shape: Any, dtype: Any) -> Any:
    return lambda address, shape, dtype: carray(_pointer(address), shape, dtype)  # type: ignore[call-arg]
