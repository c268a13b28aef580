"""Other platforms, as far as Linux can play them: their tokens, their files and their missing calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from lookahead.documents.byte_sources import opened
from lookahead.errors import ConfigError
from lookahead.kernels import block_product, large_pages
from lookahead.loading.quantized import resolve_quantize
from lookahead.utils import cpu_features

ROOT = Path(__file__).resolve().parent.parent


def run_on(name: str, model: Path, folder: Path, **environment: str) -> dict[str, Any]:
    """What a process that looks like another platform decodes and writes."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.support.platform_fakes", name, str(model), str(folder)]
    settings = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder.parent / "cache"), **environment}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(found: dict[str, Any]) -> None:
    """In float32, and where bits are promised, the tokens are those of `model.generate`; all files are written."""
    for dtype, (plain, ours, exactness) in found["tokens"].items():
        assert ours == plain or (exactness == "rounding" and dtype == "torch.bfloat16"), dtype
    assert {"pool.lkp", "model.lkm"} <= {*found["files"]}
    assert not [name for name in found["files"] if name.endswith(".tmp")]


def test_without_the_calls_of_posix_the_same_tokens_and_whole_files_come_out(model_folder, tmp_path):
    found = run_on("windows", model_folder, tmp_path / "folder")
    check(found)
    assert found["memory"] == 0  # Windows does not tell it this way


def test_without_proc_and_the_libraries_of_linux_the_same_tokens_come_out(model_folder, tmp_path):
    check(run_on("macos", model_folder, tmp_path / "folder"))


def alone(*arguments: str) -> str:
    """What a process that finds no modules of POSIX prints; they are missing for the package alone."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_every_module_is_imported_without_the_modules_of_posix():
    modules = [path for path in (ROOT / "lookahead").rglob("*.py") if path.stem not in ("__init__", "__main__")]
    assert int(alone("tests.support.no_posix").splitlines()[-1]) >= len(modules)


def test_files_of_jobs_and_memories_are_whole_without_the_modules_of_posix():
    files = [f"tests/test_{name}.py" for name in ("hand_edits", "journals", "memory_file", "file_modes")]
    assert " passed" in alone("pytest", "-q", "-p", "tests.support.no_posix", "-p", "no:cacheprovider", *files)


def test_a_cpu_of_unknown_instructions_gets_plain_products_and_the_same_tokens(model_folder, tmp_path):
    plainest = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": "default"}
    found = run_on("unknown-cpu", model_folder, tmp_path / "folder", NUMBA_CACHE_DIR=str(tmp_path), **plainest)
    check(found)
    assert found["packs"] == []


def test_a_cpu_whose_features_cannot_be_read_has_none(monkeypatch):
    def fail() -> Any:
        raise RuntimeError("no host CPU features")

    monkeypatch.setattr(cpu_features.llvm, "get_host_cpu_features", fail)
    assert cpu_features.cpu_features.__wrapped__() == {}


@pytest.mark.parametrize("name", ["generic", "haswell", "skylake-avx512", "znver4"])
@pytest.mark.parametrize("features", [{}, {"NUMBA_CPU_FEATURES": ""}], ids=["own", "none"])
def test_kernels_are_chosen_for_the_cpu_that_numba_compiles_for(name, features, tmp_path):
    script = """
import torch
from lookahead.kernels import packed_product
weight = torch.ones(40, 64, dtype=torch.bfloat16)
if packed_product.is_supported(weight):
    of_packed = packed_product.multiply(packed_product.pack(weight, 512), weight[:3], None)
    assert torch.equal(of_packed, packed_product.multiply(packed_product.as_stored(weight, 512), weight[:3], None))
"""
    settings = {"PYTHONPATH": str(ROOT), "NUMBA_CPU_NAME": name, "NUMBA_CACHE_DIR": str(tmp_path), **features}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | settings, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_weights_lie_in_ordinary_memory_where_there_are_no_large_pages(platform, monkeypatch):
    monkeypatch.setattr(large_pages.sys, "platform", platform)
    monkeypatch.setattr(large_pages, "_newest", None)
    weights = large_pages.zeros(3, 5, dtype=torch.float32)
    weights += 1
    assert weights.sum() == 15


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe with a name")
def test_a_pipe_is_read_where_no_open_waits_for_its_writer(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'w').write('a text')"])
    monkeypatch.delattr(os, "O_NONBLOCK")
    with opened(str(pipe)) as file:
        assert file.read() == b"a text"
    assert writer.wait() == 0


@pytest.mark.parametrize(("name", "is_served"), [("arm64", True), ("aarch64", True), ("AMD64", False)])
def test_blocks_of_gguf_files_are_multiplied_on_arm_and_not_on_old_x86(name, is_served, monkeypatch):
    monkeypatch.setattr(block_product, "FEATURES", {})
    monkeypatch.setattr(block_product.platform, "machine", lambda: name)
    assert block_product.is_supported() == is_served
    with nullcontext() if is_served else pytest.raises(ConfigError, match="int4' needs a CPU with instructions for fl"):
        resolve_quantize("int4", torch.device("cpu"))
