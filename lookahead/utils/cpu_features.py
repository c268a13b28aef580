"""The instruction sets that Numba compiles for, by which kernels are chosen."""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from numba.core import config


@cache
def cpu_features() -> dict[str, bool]:
    """The instruction sets by LLVM name; empty if LLVM cannot detect them, as on some ARM systems.

    A kernel is used only if all instruction sets that it needs are listed here. They are those of this CPU, unless
    `NUMBA_CPU_FEATURES` or the generic `NUMBA_CPU_NAME` say otherwise.
    """
    settings: Any = config
    if settings.CPU_FEATURES is not None:
        return {flag[1:]: flag[0] == "+" for flag in settings.CPU_FEATURES.split(",") if flag}
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}
