"""The instruction sets of this CPU, by which kernels are chosen."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm


@cache
def cpu_features() -> dict[str, bool]:
    """The instruction sets by LLVM name; empty if LLVM cannot detect them, as on some ARM systems.

    A kernel is used only if all instruction sets that it needs are listed here.
    """
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}
