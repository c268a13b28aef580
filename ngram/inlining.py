"""How the functions of a search are compiled."""

from typing import Any

from numba.extending import register_jitable

# Compiled as part of its caller, and a plain function in Python. `njit` would compile each once more to be called from
# Python, and for every literal argument: a third of the compile time.
jit_inline: Any = register_jitable(error_model="numpy", forceinline=True)
