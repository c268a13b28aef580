"""The tensor kernels without a GPU: interpreted against their references, and compiled ahead of time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from lookahead.kernels.dispatch import KernelVariant
from tests.support.random_trees import random_trees

ROOT = Path(__file__).resolve().parent.parent
# Bytes a program may have. Source: CUDA C++ programming guide, technical specifications per compute capability.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
POINTERS = {"query", "keys", "values", "out", "sums", "peaks", "addresses"}
TYPES = {"lengths": "*i32", "nodes": "*i32", "depths": "*i32", "words": "*i64", "sinks": "*i32", "sums": "*fp32"}
TYPES |= {"peaks": "*fp32", "factor": "fp32", "squeeze": "fp32"}
TYPES |= {"addresses": "*i64", "sizes": "*i32", "rows": "*i32", "starts": "*i32", "counts": "*i32", "paths": "*i32"}

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreter_gap() -> str | None:
    """Why Triton's interpreter cannot run here, if it cannot."""
    if find_spec("triton") is None:
        return "triton is not installed"
    import triton

    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return f"the interpreter of triton {triton.__version__} needs NumPy before 2.4"
    return None


@pytest.mark.skipif(interpreter_gap() is not None, reason=str(interpreter_gap()))
def test_the_kernels_agree_with_their_references_in_the_interpreter(request):
    # Triton decides on import whether it interprets: a process of its own.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += ["tests/interpreted_kernels.py", "-m", request.config.option.markexpr]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout + run.stderr


class Machine(NamedTuple):
    """What the compiler made of a kernel."""

    ptx: str
    shared: int  # bytes
    stack: int  # bytes; more than 0 where registers spilled
    registers: int


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, Any]
) -> Machine:
    """Compile for a GPU that need not be there, as a launch with aligned pointers and strides does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name in POINTERS or re.match("[qkv]_", name)]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"triton {triton.__version__} brings no cuobjdump to count registers with")
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / f"{binary.metadata.hash}.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return Machine(binary.asm["ptx"], binary.metadata.shared, stack, registers)


@pytest.fixture
def cold_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


PLAIN: frozenset[str] = frozenset()
EVERYTHING = frozenset({"window", "softcap", "sinks"})
# Type, head sizes of keys and of values, query heads a KV head, options. The number of nodes is not compiled in.
VARIANTS = {
    "Llama 3": (torch.bfloat16, 128, 128, 4, PLAIN),
    "Phi-3": (torch.float16, 96, 96, 1, PLAIN),
    "head size 80, everything": (torch.float16, 80, 80, 3, EVERYTHING),
    "gpt-oss": (torch.bfloat16, 64, 64, 8, frozenset({"window", "sinks"})),
    "Gemma 2": (torch.bfloat16, 256, 256, 2, frozenset({"window", "softcap"})),
    "DeepSeek V3": (torch.bfloat16, 192, 128, 1, PLAIN),
    "float32": (torch.float32, 128, 128, 16, PLAIN),
    "float32, head size 64": (torch.float32, 64, 64, 4, PLAIN),
    "float32, everything, head size 80": (torch.float32, 80, 80, 4, EVERYTHING),
    "float32, everything, head size 256": (torch.float32, 256, 256, 4, EVERYTHING),
}


SMALLER = ("Phi-3", "DeepSeek V3", "float32", "float32, head size 64", "float32, everything, head size 80")


# By default every capability, and of the variants those that need the most memory and registers.
@needs_triton
@pytest.mark.covering(1)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize(
    "name",
    [
        "Llama 3",
        "head size 80, everything",
        "gpt-oss",
        "Gemma 2",
        "float32, everything, head size 256",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SMALLER),
    ],
)
def test_attention_compiles_without_spills_and_within_shared_memory(name, capability, cold_cache):
    from lookahead.kernels.attend import attend
    from lookahead.kernels.tree_attention import ATTEND_OPTIONS, constants

    dtype, used = VARIANTS[name][0], VARIANTS[name][-1]
    element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    shared, own = constants(KernelVariant(torch.device("cuda"), *VARIANTS[name]), capability // 10)
    own = own | {"IN_ONE": used == EVERYTHING or name == "Phi-3"}
    options = ATTEND_OPTIONS | {"num_warps": own.pop("num_warps")}
    types = TYPES | dict.fromkeys(("query", "keys", "values", "out"), f"*{element}")
    machine = compiled(attend, types, shared | own, capability, options)
    print(
        f"sm_{capability} {name}: {machine.registers} registers, {machine.shared} bytes shared, {machine.stack} stack"
    )
    # Bytes of registers that an older compiler keeps in memory, for some GPUs.
    assert machine.stack <= (0 if Version(version("triton")) >= Version("3.6") else 256), "registers spilled"
    assert machine.shared <= SHARED_MEMORY[capability]
    assert re.search(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10", machine.ptx), "no 16-byte asynchronous copy"
    if dtype != torch.float32:
        assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(capability, "mma.sync") in machine.ptx


@needs_triton
@pytest.mark.parametrize(
    "capability", [80, 90, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (89, 100, 120))]
)
def test_merging_and_compaction_compile_without_spills(capability, cold_cache):
    from lookahead.kernels.attend import merge
    from lookahead.kernels.compaction import _compact
    from lookahead.kernels.tree_attention import MERGED_AT_ONCE, OPTIONS, constants

    variant = KernelVariant(torch.device("cuda"), torch.bfloat16, 256, 256, 4, EVERYTHING)
    shared, _ = constants(variant, capability // 10)
    merging = shared | {"AT_ONCE": MERGED_AT_ONCE}
    machine = compiled(merge, TYPES | {"out": "*bf16"}, merging, capability, OPTIONS | {"num_warps": 4})
    assert machine.stack == 0
    machine = compiled(_compact, TYPES, {"BLOCK_NODES": 256, "BLOCK_WORDS": 32}, capability, OPTIONS | {"num_warps": 4})
    assert machine.stack == 0
    loads, barrier, stores = (machine.ptx.find(word) for word in ("ld.global.b32 ", "bar.sync", "st.global"))
    assert -1 < loads < barrier < stores
    assert machine.ptx.rfind("ld.global") < machine.ptx.rfind("bar.sync", 0, stores), "every load before any store"


@needs_triton
@given(
    st.integers(1, 200_000), st.integers(1, 4096), st.integers(1, 64), st.sampled_from([1, 8, 32]), st.integers(1, 400)
)
def test_splits_fill_a_gpu_in_one_wave_and_write_no_more_sums_than_they_read(
    slots: int, packed: int, rows: int, kv_heads: int, at_once: int
) -> None:
    from lookahead.kernels.tree_attention import split_for

    programs = -(-packed // 64) * kv_heads * rows
    split = split_for(slots, packed, programs, at_once)
    splits = -(-slots // split)
    assert split % 128 == 0 and split >= packed
    assert splits == 1 or programs * splits <= at_once
    finer = split // 2
    assert finer < max(128, packed) or programs * -(-slots // finer) > at_once


def test_short_contexts_are_split_finer_and_long_trees_coarser() -> None:
    tree_attention = pytest.importorskip("lookahead.kernels.tree_attention")
    h100 = 2 * 132
    assert tree_attention.split_for(1024, 4, 8, h100) == 128
    assert tree_attention.split_for(32768, 4, 8, h100) == 1024
    assert tree_attention.split_for(32768, 256, 4 * 8, h100) == 4096
    assert tree_attention.split_for(8192, 64, 64 * 8, h100) == 8192, "a large batch fills it without splits"


class Rehearsal:
    """A kernel that is compiled for the arguments of a launch, and not launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.hashes = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            self.hashes.append(self.kernel.warmup(*arguments, grid=grid, **options).metadata.hash)

        return compile_only


@pytest.fixture
def rehearsed(monkeypatch, cold_cache):
    """The launches of tree attention, compiled for sm_90 and left at that."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from lookahead.kernels import tree_attention

    class NoDriver(CudaDriver):
        def __init__(self) -> None:
            self.get_current_stream = self.get_current_device = lambda *_: 0
            self.launcher_cls = lambda *_: None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    launches = {name: Rehearsal(getattr(tree_attention, name)) for name in ("attend", "merge")}
    for name, rehearsal in launches.items():
        monkeypatch.setattr(tree_attention, name, rehearsal)
    monkeypatch.setattr(tree_attention, "_interprets", lambda: True)  # lets tensors of the CPU in
    # A property where triton is new, which would look for a GPU, and an attribute where it is old.
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", NoDriver())
    return launches


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/test_kernels_gpu.py launches for real")
def test_trees_of_all_widths_run_the_same_machine_code(rehearsed):
    from lookahead.kernels.tree_attention import tree_attention

    sizes = {"rows": 1, "slots": 3000, "kv_heads": 2, "groups": 4, "dim": 64, "value_dim": 64, "dtype": torch.float16}
    for width in (1, 16, 17, 64, 130):
        inputs = random_trees(**sizes, width=width, seed=1)
        for window in (1, 160, 1001):
            tree_attention(**inputs, window=window)
    for rehearsal in rehearsed.values():
        assert len(rehearsal.hashes) == 15 and len(set(rehearsal.hashes)) == 1
