"""The instructions of this CPU, by which kernels are chosen."""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm


@cache
def cpu_features() -> dict[str, bool]:
    """The instructions by LLVM's names; none where LLVM cannot read them, as on some ARM systems.

    A kernel that needs an instruction which is not named here does not serve.
    """
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}
