"""Which product is faster than torch's on this CPU: measured once for a machine, and kept in the cache folder.

The choice decides in which order a product adds, so every process must make the same one.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from time import perf_counter, thread_time
from timeit import timeit

import torch
import xxhash
from platformdirs import user_cache_path
from torch import Tensor
from torch.nn.functional import linear

from lookahead.backend.cpu.product_bits import Layout, lay_out
from lookahead.kernels import packed_product
from lookahead.kernels.jobs import torch_on_one_thread
from lookahead.utils.atomic import read_json, write_atomically
from lookahead.utils.locks import locked

LAYOUTS = {"packed": Layout(block=512), "onednn": Layout(rows=16)}  # of float32
_TRIED = (2048, 2048)  # inputs and outputs of the measured products
_CACHES = 1 << 26  # bytes that are read before each of them, so that weights come from memory
_FEW_ROWS = (4, 16)  # of those products
_TRIALS = 5
_GAIN = 0.95  # most time relative to torch to count as faster
_OTHERS = 1.5  # their time relative to the kernel of this package, which does whole layers and passes in one call

_log = logging.getLogger(__name__)


@cache
def measured_backends(dtype: torch.dtype, rows: tuple[int, ...] = _FEW_ROWS, gain: float = _GAIN) -> tuple[str, ...]:
    """The backends that multiply by a packed weight faster than torch, "packed" and "onednn", fastest first.

    It is measured once for a CPU, torch's version and the kernels. Where the cache folder cannot be written, every
    process measures, and the last bits of float32 may differ from one process to the next.
    """
    case = f"{dtype}, rows {rows}, gain {gain}"
    path = user_cache_path("lookahead", appauthor=False) / "products" / f"{_machine()}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            known = _read(path)
            if case not in known:
                known[case] = measure(dtype, rows, gain)
                write_atomically(path, json.dumps({"choices": known}, indent=1))
            return known[case]
    except OSError as error:
        _log.info("which products are faster is not kept: %s", error)
        return measure(dtype, rows, gain)


def _read(path: Path) -> dict[str, tuple[str, ...]]:
    """The choices of a file by case; none where there is no such file, or it holds something else."""
    try:
        return {
            str(case): tuple(name for name in names if name in LAYOUTS)
            for case, names in read_json(path)["choices"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def processor() -> str:
    """The name of the CPU, or the number of an ARM one; as Python knows it where Linux does not tell."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        found = next(line for line in lines if line.startswith(("model name", "CPU part")))
        return found.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _machine() -> str:
    """16 hexadecimal digits for the CPU, torch and the kernels."""
    sources = sorted(Path(str(packed_product.__file__)).parent.glob("*.py"))
    digest = xxhash.xxh3_64(f"{processor()} {torch.__version__} {torch.backends.cpu.get_cpu_capability()}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def measure(dtype: torch.dtype, rows: tuple[int, ...] = _FEW_ROWS, gain: float = _GAIN) -> tuple[str, ...]:
    """The backends by their time in products of some numbers of rows, those that take less than `gain` of torch's.

    The kernel of this package comes first unless another is much faster: around it, passes take less time too. One
    thread multiplies, and its own time counts, whatever else the machine does: several wait for one another, most of
    all where another program has a core.
    """
    inputs, outputs = _TRIED
    with torch_on_one_thread(), torch.inference_mode(), torch.autocast("cpu", enabled=False):
        x, weight = (
            torch.linspace(-1, 1, n * inputs, dtype=torch.float32, device="cpu").view(n, inputs).sin()
            for n in (max(rows), outputs)
        )
        x, weight = x.to(dtype), (weight / inputs).to(dtype)
        products: dict[str, Callable[[Tensor, None], Tensor]] = {"torch": lambda x, _: linear(x, weight)}
        for name in LAYOUTS if packed_product.is_supported(weight) else ["onednn"]:
            with suppress(AttributeError, RuntimeError):  # torch was built without oneDNN
                packed = lay_out(weight, LAYOUTS[name]).product
                if torch.allclose(packed(x, None), linear(x, weight), rtol=0.02, atol=1e-3):
                    products[name] = packed
        others = torch.ones(_CACHES // 4, dtype=torch.float32, device="cpu")
        # On Windows the clock of a thread is too coarse.
        clock = thread_time if os.name == "posix" and torch.get_num_threads() == 1 else perf_counter
        seconds = dict.fromkeys(products, 0.0)
        for count in rows:
            # The products take turns: a process that comes and goes would slow one of them down.
            taken = [
                [
                    timeit(partial(each, x[:count], None), others.sum, timer=clock, number=1)
                    for each in products.values()
                ]
                for _ in range(_TRIALS)
            ]
            for name, times in zip(products, zip(*taken, strict=True), strict=True):
                seconds[name] += min(times)
    ranks = {name: spent * (1 if name == "packed" else _OTHERS) for name, spent in seconds.items()}
    return tuple(name for name in sorted(ranks, key=ranks.__getitem__) if seconds[name] < gain * seconds["torch"])
