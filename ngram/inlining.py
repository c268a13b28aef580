"""How the functions of a search are compiled, and how they find their arrays."""

import ctypes
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic, overload, register_jitable
from numpy.typing import NDArray

# Compiled as part of its caller, and a plain function in Python. `njit` would compile each once more to be called from
# Python, and for every literal argument: a third of the compile time.
jit_inline: Any = register_jitable(error_model="numpy", forceinline=True)


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
