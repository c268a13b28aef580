"""Compiled functions, converted models and step costs where neither the package nor the home can be written."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from typer.testing import CliRunner

from lookahead.cli.app import app
from lookahead.utils import cache_folders
from lookahead.utils.cache_folders import temporary_folder, writable_folder
from lookahead.utils.jit import _CacheFile, compiled_files
from lookahead.utils.sources import source_files

ROOT = Path(__file__).resolve().parent.parent
NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
NOWHERE = f"{os.devnull}/none"  # no user can make a folder there, root neither
SCRIPT = """
import json, tempfile, sys
tempfile.tempdir = sys.argv[1]
import numpy as np
import lookahead.drafting.tree, lookahead.ngram.chain_proposer
from lookahead.ngram.hit_rates import children_along
zeros = np.zeros(2, np.int32)
children_along(zeros, zeros, zeros)
known = children_along.stats
print(json.dumps([lookahead.__file__, known.cache_path, sum(known.cache_hits.values())]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with a file in the place of every `__pycache__`."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "lookahead", folder / "lookahead", ignore=shutil.ignore_patterns("__pycache__"))
    for each in [folder / "lookahead", *(folder / "lookahead").rglob("*")]:
        if each.is_dir():
            (each / "__pycache__").touch()
    return folder


def run(package: Path, temporary: Path | str, **variables: str) -> tuple[str | None, int, list[str]]:
    """Where a process caches a function, how often it found it there, and the lines of its warnings."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment = {**kept, "HOME": NOWHERE, "PYTHONPATH": str(package), **variables}
    command = [sys.executable, "-c", SCRIPT, str(temporary)]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=True)
    module, path, hits = json.loads(done.stdout)
    assert Path(module).is_relative_to(package)
    return path, hits, [line for line in done.stderr.splitlines() if "Warning: " in line]


def test_compiled_functions_have_a_temporary_cache_where_no_folder_can_be_written(
    package: Path, tmp_path: Path
) -> None:
    path, hits, said = run(package, tmp_path)
    assert path is not None and Path(path).is_relative_to(tmp_path) and hits == 0
    assert len(said) == 1 and "set NUMBA_CACHE_DIR to a folder that can be written" in said[0]
    assert next(tmp_path.iterdir()).stat().st_mode & 0o077 == 0
    assert run(package, tmp_path) == (path, 1, said)  # the next process finds them


def test_code_is_compiled_again_once_a_file_with_parts_of_it_changed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lookahead", tmp_path / "lookahead", ignore=shutil.ignore_patterns("__pycache__"))
    hits = [run(tmp_path, NOWHERE)[1] for _ in range(2)]
    with (tmp_path / "lookahead" / "ngram" / "prune.py").open("a") as other:
        other.write("# another part\n")
    assert [*hits, run(tmp_path, NOWHERE)[1]] == [0, 1, 0]


def test_the_first_compilation_of_this_package_is_told_once(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lookahead", tmp_path / "lookahead", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import numba, sys
numba.njit(lambda x: x)(1)
print("another package", file=sys.stderr)
import numpy as np
from lookahead.ngram.hit_rates import children_along
for dtype in (np.int32, np.int64):
    children_along(np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(2, dtype))
"""
    told = []
    for _ in range(2):  # the second process finds the code
        command = [sys.executable, "-c", script]
        told.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr)
    line = "compiling code for drafts and attention, once per installation and kind of model: up to a minute"
    assert [each.splitlines() for each in told] == [["another package", line], ["another package"]]


CLOSURES = """
from lookahead.kernels.scalars import jit_part
from lookahead.utils.jit import njit

def part_of(number):
    @jit_part
    def part(x):
{lines}
        return x + number

    return part

ONE, TWO = map(part_of, (1, 2))

@njit()
def add_one(x):
    return ONE(x) + ONE(x + 1)

@njit()
def add_two(x):
    return TWO(x) + TWO(x + 1)
"""
ADD = """
import sys
import closures
print(*(getattr(closures, name)(1e9) for name in sys.argv[1:]))
"""
FORK = """
import os, sys
import closures
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        getattr(closures, name)(1e9)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def written(folder: Path, script: str, *functions: str) -> list[float]:
    """What a process prints that compiles functions of `folder`, or finds them compiled."""
    command = [sys.executable, "-c", script, *functions]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return list(map(float, done.stdout.split()))


@pytest.mark.parametrize("process", ["spawned", pytest.param("forked", marks=NEEDS_FORK)])
def test_closures_that_two_processes_compiled_are_not_confused_by_a_third(process: str, tmp_path: Path) -> None:
    # So long that it is called, and not copied into the function that calls it.
    lines = "\n".join(f"        x = abs(x * number) + {i} if x < {i}.5 else x - {i} / (x + number)" for i in range(60))
    (tmp_path / "closures.py").write_text(CLOSURES.format(lines=lines))
    if process == "spawned":
        alone = [written(tmp_path, ADD, name)[0] for name in ("add_one", "add_two")]
    else:
        written(tmp_path, FORK, "add_one", "add_two")
    together = written(tmp_path, ADD, "add_one", "add_two"), written(tmp_path, ADD, "add_two", "add_one")[::-1]
    assert len(list(tmp_path.glob("__pycache__/*.nbc"))) == 2  # nothing was compiled again
    assert together[0] == together[1] and together[0][0] < together[0][1]
    assert process == "forked" or together[0] == alone


def index_in(folder: Path, stamp: object = 1) -> _CacheFile:
    folder.mkdir(exist_ok=True)
    return _CacheFile(str(folder), "function-1", stamp)


def test_code_of_two_processes_that_compile_at_once_is_not_confused(tmp_path: Path) -> None:
    one, other = index_in(tmp_path / "one"), index_in(tmp_path / "other")
    one.save("int32", "code for int32")
    other.save("float32", "code for float32")
    first = {file: file.read_bytes() for file in (tmp_path / "one").glob("*.nbc")}
    shutil.copytree(tmp_path / "other", tmp_path / "one", dirs_exist_ok=True)
    for file, code in first.items():  # the index of one process is replaced, and its files come last
        file.write_bytes(code)
    assert (one.load("float32"), one.load("int32")) == ("code for float32", None)


def test_nothing_is_lost_where_threads_save_at_once(tmp_path: Path) -> None:
    keys, start = range(16), Barrier(16)

    def save(key: int) -> None:
        file = index_in(tmp_path)
        start.wait()
        file.save(key, f"code {key}")

    with ThreadPoolExecutor(len(keys)) as pool:
        list(pool.map(save, keys))
    assert [index_in(tmp_path).load(key) for key in keys] == [f"code {key}" for key in keys]


def test_code_of_other_sources_is_not_loaded_and_does_not_pile_up(tmp_path: Path) -> None:
    for stamp in range(3):
        file = index_in(tmp_path, stamp)
        assert file.load("int32") is None
        for code in ("code", f"code {stamp}"):
            file.save("int32", code)
        assert file.load("int32") == f"code {stamp}"
    assert len(list(tmp_path.glob("*.nbc"))) == 1


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x05\x8c\x06absent\x93."], ids=repr)
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_file_that_cannot_be_read_is_compiled_again(suffix: str, content: bytes, tmp_path: Path) -> None:
    file = index_in(tmp_path)
    file.save("int32", "code")
    for each in tmp_path.glob(f"*.{suffix}"):
        each.write_bytes(content)
    assert file.load("int32") is None
    file.save("int32", "code")
    assert file.load("int32") == "code"


def test_code_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    file = index_in(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    file.save("int32", "code")
    assert file.load("int32") is None


def test_a_folder_that_the_user_names_is_used_without_a_word(package: Path, tmp_path: Path) -> None:
    path, _, said = run(package, NOWHERE, NUMBA_CACHE_DIR=str(tmp_path))
    assert path is not None and Path(path).is_relative_to(tmp_path) and said == []


def test_without_any_folder_functions_are_compiled_without_a_cache(package: Path) -> None:
    path, hits, said = run(package, NOWHERE, NUMBA_CACHE_DIR=NOWHERE)
    assert (path, hits) == (None, 0)
    assert len(said) == 1 and "every process compiles them" in said[0] and "set NUMBA_CACHE_DIR" in said[0]


def test_every_function_is_compiled_by_the_decorators_that_find_a_cache() -> None:
    offenders = []
    for folder in ("lookahead", "ngram", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [each.name for each in node.names] if isinstance(node, ast.ImportFrom) else []
                called = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                is_numba = isinstance(node, ast.ImportFrom) and node.module == "numba"
                if (is_numba and {"njit", "jit", "cfunc", "vectorize"} & {*names}) or called.startswith("numba."):
                    offenders.append(f"{path.name}: {called or names}")
    assert [each for each in offenders if not each.startswith("jit.py: ")] == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for temporary files, of which nothing was said yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary_folder.cache_clear()
    yield tmp_path
    temporary_folder.cache_clear()


def test_a_cache_folder_that_cannot_be_written_is_replaced_with_one_warning(temporary: Path) -> None:
    with pytest.warns(UserWarning, match=f"converted models are kept in .*; let {NOWHERE} be written .*XDG_CACHE_HOME"):
        folder = writable_folder(Path(NOWHERE), "converted models")
    assert folder.is_relative_to(temporary)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert writable_folder(Path(NOWHERE), "converted models") == folder
        assert writable_folder(temporary / "own" / "cache", "converted models") == temporary / "own" / "cache"


def test_a_temporary_folder_that_another_user_could_write_is_not_used(temporary: Path) -> None:
    folder = cache_folders._private_folder()
    assert cache_folders._private_folder() == folder
    folder.chmod(0o770)
    assert cache_folders._private_folder() != folder
    folder.chmod(0o700)
    assert cache_folders._private_folder() == folder
    if os.getuid() == 0:
        os.chown(folder, 12345, -1)
        assert cache_folders._private_folder() != folder
    folder.rmdir()
    (temporary / "open").mkdir()
    folder.symlink_to(temporary / "open")
    assert cache_folders._private_folder() != folder
    folder.unlink()
    folder.write_text("a file")
    assert cache_folders._private_folder() != folder


def test_a_gguf_file_is_converted_where_the_cache_folder_cannot_be_written(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from lookahead.loading.gguf_files import convert_once
    from tests.support.tiny_gguf import write_gguf

    monkeypatch.setenv("XDG_CACHE_HOME", NOWHERE)
    file, said = write_gguf(temporary / "tiny.gguf"), list[str]()
    with pytest.warns(UserWarning, match="converted models are kept in"):
        folder = convert_once(file, said.append)
    assert folder.is_relative_to(temporary) and convert_once(file, said.append) == folder and len(said) == 1


def test_a_command_runs_where_the_cache_folder_cannot_be_written(
    temporary: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", NOWHERE)
    words = ["generate", "abab", "--model", str(model_folder), "--device", "cpu", "--max-new-tokens", "4"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and result.stdout, result.stderr
    assert "Traceback" not in result.stderr


def test_code_is_compiled_again_after_an_edit_of_any_file_that_it_is_made_of():
    decorated = re.compile(rb"^@(njit|jit_inline|cfunc|intrinsic|overload|register_jitable|vectorize)\b", re.MULTILINE)
    files = {each for each in source_files() if decorated.search(each.read_bytes())}
    assert files <= set(compiled_files())
    assert {"candidates.py", "features.py"} <= {each.name for each in files}
