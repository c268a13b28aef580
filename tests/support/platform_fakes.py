"""A Linux process that looks like another platform to the package, and decodes and writes files there.

`python -m tests.support.platform_fakes windows MODEL FOLDER` prints the tokens of `model.generate` and of lookahead.
Libraries of the package are not tested on that platform, since they are imported before.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock  # noqa: F401 - the libraries below the package see Linux
import llvmlite.binding as llvm
import numba  # noqa: F401
import platformdirs  # noqa: F401
import torch
import transformers
import xxhash  # noqa: F401

# Names in `os` that Windows lacks and the package uses, except names that filelock needs on Linux.
_NOT_ON_WINDOWS = (
    "O_DIRECTORY", "fchown", "getuid", "register_at_fork", "sched_getaffinity", "sysconf",
)  # fmt: skip


def windows() -> None:
    """No POSIX calls, no `/proc`, no libraries with Linux names, and open files cannot be replaced or moved."""
    _hide_linux("win32", library_error=TypeError("bad argument type for built-in operation"))
    for name in _NOT_ON_WINDOWS:
        delattr(os, name)
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    replace = os.replace

    def replace_closed(source: Any, target: Any) -> None:
        for path in filter(os.path.isfile, (source, target)):
            if os.path.realpath(path) in _open_files():
                raise PermissionError(13, "The process cannot access the file", str(path))
        replace(source, target)

    os.replace = replace_closed


def macos() -> None:
    """POSIX without `/proc`, without libraries with Linux names, and without CPU affinity."""
    _hide_linux("darwin", library_error=None)
    del os.sched_getaffinity


def unknown_cpu() -> None:
    """A CPU of an unknown architecture whose instruction sets LLVM cannot detect."""

    def fail() -> Any:
        raise RuntimeError("LLVM cannot read the features of this CPU")

    llvm.get_host_cpu_features = fail
    platform.machine = lambda: "riscv64"


FAKES: dict[str, Callable[[], None]] = {"windows": windows, "macos": macos, "unknown-cpu": unknown_cpu}


def _hide_linux(name: str, library_error: Exception | None) -> None:
    """Hide Linux, its `/proc`, and shared libraries; with `library_error`, also the process itself as a library."""
    sys.platform = name
    load, read = ctypes.CDLL, pathlib.Path.read_text

    def load_there(file: Any, *arguments: Any, **options: Any) -> Any:
        if file is None and library_error is not None:
            raise library_error
        if file is not None and str(file).endswith(".so"):
            raise FileNotFoundError(f"Could not find module '{file}'")
        return load(file, *arguments, **options)

    def read_there(path: Path, *arguments: Any, **options: Any) -> str:
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return read(path, *arguments, **options)

    ctypes.CDLL = load_there  # type: ignore[assignment,misc]
    pathlib.Path.read_text = read_there  # type: ignore[assignment,method-assign]


def _open_files() -> set[str]:
    """The files that this process has opened or mapped."""
    found = {os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return found | {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split()) > 5}


def main(name: str, model_folder: str, folder: str) -> None:
    """Decode with and without lookahead in both dtypes, and write every kind of file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    FAKES[name]()
    import lookahead
    from lookahead.decoding.diagnosis import package_facts
    from lookahead.documents.inputs import Input
    from lookahead.kernels import packed_product
    from lookahead.proposers.pool_files import TokenSource, build_pool
    from lookahead.utils.machine import machine_fingerprint, memory_bytes

    text = Path(folder) / "text.txt"
    text.write_text("the lamp and the shed and the tin " * 6, encoding="utf-8")
    pool, memory = os.path.join(folder, "pool.lkp"), os.path.join(folder, "model.lkm")
    for add in (False, True, True):
        build_pool(
            pool, TokenSource([Input(str(text))], tokenizer, lambda totals, reject: None, None, 1 << 20), adds=add
        )
    found = {}
    torch.set_num_threads(2)
    inputs = tokenizer(text.read_text("utf-8"), return_tensors="pt")
    # Without AVX, torch has no bfloat16 attention on a CPU with AMX.
    for dtype in (torch.float32, torch.bfloat16)[: 1 if name == "unknown-cpu" else 2]:
        model = model.to(dtype)
        options = {"max_new_tokens": 24, "do_sample": False}
        plain = model.generate(**inputs, **options)
        config = lookahead.LookaheadConfig(memory=memory, pool=pool)
        ours = lookahead.generate(model, tokenizer, inputs, config=config, **options)
        found[dtype] = plain[0, inputs["input_ids"].shape[1] :].tolist(), ours.token_ids[0], ours.stats.exactness
        lookahead.save_memory(model, memory)
    packs = [dtype for dtype in found if packed_product.is_supported(torch.zeros(64, 64, dtype=dtype))]
    facts = {
        "packs": [str(dtype) for dtype in packs],
        "memory": memory_bytes(),
        "fingerprint": machine_fingerprint(),
        **package_facts(),
    }
    tokens = {str(dtype): values for dtype, values in found.items()}
    print(json.dumps({"tokens": tokens, **facts, "files": sorted(os.listdir(folder))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
