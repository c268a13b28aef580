"""The identity of the machine, releases and sources for which a cached result is valid."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
import xxhash

from lookahead.utils.cpu_features import cpu_features
from lookahead.utils.sources import source_files, sources_digest

_PACKAGES = ("torch", "transformers", "numba", "llvmlite", "numpy")
# Prefixes of environment variables that choose instructions in torch's libraries and Numba, and so the bits of results.
_SETTINGS = ("ATEN_CPU", "BLIS_", "DNNL_", "MKL_", "NUMBA_CPU", "NUMBA_DISABLE", "NUMBA_OPT", "ONEDNN_", "OPENBLAS_")


def processor() -> str:
    """The name of the CPU, or its part number on ARM; Python's name if /proc/cpuinfo has neither."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        line = next(line for line in lines if line.startswith(("model name", "CPU part")))
        return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Bytes of the machine's memory; 0 if unknown, as on Windows."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


@cache
def machine_fingerprint() -> str:
    """16 hexadecimal digits for the CPU, the installed releases, and the sources of this package.

    Results cached under it are recomputed when any of these changes. Environment settings of torch's libraries count,
    the number of threads does not.
    """
    described = (
        processor(),
        sorted(cpu_features().items()),
        torch.backends.cpu.get_cpu_capability(),
        torch.__config__.show(),
        sys.version,
        [*map(_release, _PACKAGES)],
        sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)),
    )
    digest = xxhash.xxh3_64(repr(described).encode())
    digest.update(sources_digest(source_files()))
    return digest.hexdigest()


def _release(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""
