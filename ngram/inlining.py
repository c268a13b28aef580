"""Compilation of the functions of a search."""

from typing import Any

from numba.extending import register_jitable

# Compiled as part of its caller, and a plain function in Python. `njit` would also compile each for calls from Python,
# and for every literal argument: a third of the compile time.
jit_inline: Any = register_jitable(error_model="numpy", forceinline=True)
