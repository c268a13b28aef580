"""Arrays by address: a compiled function that takes many arrays receives one record of their addresses."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload
from numpy.typing import NDArray


class KeepsAddresses:
    """Base class of objects that keep addresses of arrays for compiled functions.

    A copy with the addresses of the original would access the memory of the original, even after it is freed. So every
    copy (shallow, deep or from a pickle) has its own arrays, and `_readdress` stores their addresses. A class without
    `_readdress` cannot be copied.
    """

    __slots__ = ()

    def _readdress(self) -> None:
        """Store the addresses of the object's current arrays."""
        raise TypeError(f"{type(self).__name__} keeps addresses of memory that it does not own, and cannot be copied")

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self)._readdress is KeepsAddresses._readdress:
            self._readdress()
        return super().__reduce_ex__(protocol)

    def __setstate__(self, state: Any) -> None:
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        for name, value in {**(attributes or {}), **slots}.items():
            # Arrays that another process shares are read-only.
            setattr(self, name, np.require(value, requirements="W") if isinstance(value, np.ndarray) else value)
        self._readdress()


def addresses_of(arrays: Iterable[NDArray[Any]]) -> list[int]:
    """The addresses of arrays; ValueError unless all are writable, aligned and in C order, as `array_at` requires.

    A class that keeps an address derives from `KeepsAddresses`.
    """
    addresses = []
    for array in arrays:
        if not array.flags.carray:
            raise ValueError("an array that is used by its address must be writable, aligned and in C order")
        addresses.append(int(array.ctypes.data))
    return addresses


def array_at(address: Any, shape: Any, dtype: Any) -> NDArray[Any]:
    """The contiguous C-order array at an address. Passing many arrays one by one would be slow.

    The owner of the array must keep it alive.
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
