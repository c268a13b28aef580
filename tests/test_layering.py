"""The house plan: who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

# A module imports from floors below its own, and within its own folder. A module that is not named here has
# the floor of its folder; one with no folder has no floor yet, and the test says so.
FLOORS = (
    {"errors"},
    {"ngram", "kernels", "tree"},
    {"atomic", "locating", "gguf_files", "permodel"},
    {"files", "loading", "heads"},
    {"report"},
    {"proposers.base", "pools", "scores", "progress"},
    {"config"},
    {"drafting", "cost", "switch", "sampling", "stopping", "verify", "stats", "rejection", "typical"},
    {"ledger", "costfile", "validation"},
    {"branch"},
    {"pacing"},
    {"proposers"},
    {"accounts", "emission", "ensemble"},
    {"cache"},
    {"attention"},
    {"attention_scope", "levels", "static"},
    {"compiled", "graphs"},
    {"passes"},
    {"target"},
    {"support", "request", "passtime"},
    {"calibration", "proposers.draft_model", "proposers.model_proposer"},
    {"rows"},
    {"engine"},
    {"plain", "handover", "experience", "prompts"},
    {"pieces"},
    {"assembly", "seq2seq"},
    {"generation"},
    {"costs", "intake", "conversation"},
    {"batching"},
    {"explain"},
    {"enabling", "contest"},
    {"picking"},
    {"summarize"},
    {"jobs"},
    {"training", "terminal"},
    {"explain.drawing"},
    {"cli_draft", "cli_train", "cli_report"},
    {"cli_options", "cli_jobs"},
    {"cli_measure", "cli_summarize", "cli_chat"},
    {"lookahead", "cli_pool"},  # lookahead/__init__.py, the public names; the commands on pools
    {"cli"},
    {"__main__"},
)
MODEL_BACKED_PROPOSERS = frozenset({"proposers.draft_model", "proposers.model_proposer"})
KNOW_TRANSFORMERS = {
    *("cache", "attention", "attention_scope", "target", "sampling", "support", "request", "handover", "pieces"),
    *("experience", "prompts", "validation", "conversation"),
    *(
        "assembly",
        "batching",
        "intake",
        "calibration",
        "compiled",
        "passes",
        "generation",
        "plain",
        "enabling",
        "costs",
        "explain",
        "gguf_files",
        "loading",
        "pools",
        "seq2seq",
        "summarize",
        "jobs",
    ),
    *("contest", "passtime", "picking", "training", "heads"),
}
# Training shows its progress.
KNOW_THE_TERMINAL = {
    *(
        "__main__",
        "cli",
        "cli_pool",
        "cli_measure",
        "cli_draft",
        "cli_train",
        "cli_options",
        "cli_summarize",
        "cli_report",
        "cli_jobs",
        "cli_chat",
    ),
    *("explain.drawing", "terminal", "training"),
}
# Of an extra, imported where it is needed and missed with a word about the extra.
OPTIONAL = {
    "gguf_files": {"gguf"},
    "kernels": {"triton"},
    "files.office": {"docx", "pypdf"},
    "files.pages": {"trafilatura"},
    "files.tables": {"pyarrow"},
    "jobs.ray_cluster": {"ray"},
}
BROUGHT_ALONG = {
    "tokenizers",
    "huggingface_hub",
    "llvmlite",
}  # by transformers and numba, which pin the range they work with


@dataclass(frozen=True)
class Module:
    """A source file of the package under the name it is imported by."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        """`proposers.prompt` for `lookahead.proposers.prompt`, `lookahead` for the package itself."""
        return self.name.removeprefix("lookahead.")

    @property
    def folder(self) -> str:
        """`lookahead.proposers` for all that stands in that folder; a module beside it is its own folder."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if len(parts) > 1 else f"{self.name}.__init__"

    @property
    def tree(self) -> ast.Module:
        """The module, parsed."""
        return _parse(self.path)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _source_files(folder: str) -> list[Path]:
    """Python files below a folder of the repository, links not followed."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if path.resolve() == path]


def _package_modules() -> list[Module]:
    modules = []
    for folder, prefix in (("lookahead", ""), ("ngram", "lookahead."), ("kernels", "lookahead.")):
        for path in _source_files(folder):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules.append(Module(prefix + ".".join(parts).removesuffix(".__init__"), path))
    return modules


MODULES = _package_modules()
MODULE_NAMES = {module.name for module in MODULES} | {"lookahead.kernels", "lookahead.ngram"}


def _imports(module: Module, *, top_level_only: bool = False) -> Iterator[str]:
    """Full names of the modules that a module imports, type-only and local imports included."""
    nodes = module.tree.body if top_level_only else ast.walk(module.tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.name} line {node.lineno}: write imports in full"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in MODULE_NAMES else str(node.module)


def _is_in(room: str, rooms: set[str] | frozenset[str]) -> bool:
    return any(room == each or room.startswith(each + ".") for each in rooms)


def _floor(room: str) -> int:
    exact = [floor for floor, rooms in enumerate(FLOORS) if room in rooms]
    around = [floor for floor, rooms in enumerate(FLOORS) if _is_in(room, rooms)]
    if not around:
        pytest.fail(f"{room} has no floor: name it in FLOORS, or put its code where it belongs")
    return (exact or around)[0]


def _foreign(module: Module) -> set[str]:
    """Top-level names that a module imports from outside of the standard library."""
    return {name.partition(".")[0] for name in _imports(module)} - set(sys.stdlib_module_names)


every_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


@every_module
def test_a_module_imports_only_from_its_own_folder_and_the_floors_below(module):
    for name in _imports(module):
        if name.partition(".")[0] == "lookahead" and not _is_in(name, {module.folder}):
            imported = name.removeprefix("lookahead.")
            assert _floor(imported) < _floor(module.room), f"{module.name} must not import {name}"


@every_module
def test_only_the_rooms_that_know_a_model_import_transformers(module):
    if not _is_in(module.room, KNOW_TRANSFORMERS | MODEL_BACKED_PROPOSERS):
        assert not {"transformers", "tokenizers"} & _foreign(module)


@every_module
def test_only_the_command_line_and_training_know_the_terminal(module):
    if not _is_in(module.room, KNOW_THE_TERMINAL):
        assert not {"typer", "click", "rich"} & _foreign(module)


@every_module
def test_indexes_know_tokens_only_and_kernels_tensors_only(module):
    if _is_in(module.room, {"ngram"}):
        assert _foreign(module) <= {"numpy", "numba", "xxhash", "lookahead"}
        assert all(name.startswith("lookahead.ngram") for name in _imports(module) if "lookahead" in name)
    elif _is_in(module.room, {"kernels"}):
        assert _foreign(module) <= {"torch", "triton", "numba", "llvmlite", "numpy", "lookahead"}
        assert all(name.startswith("lookahead.kernels") for name in _imports(module) if "lookahead" in name)
    else:
        assert "triton" not in _foreign(module)
        assert not any(name.startswith("lookahead.kernels") for name in _imports(module, top_level_only=True))


@every_module
def test_every_import_is_a_declared_dependency(module):
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    declared = set(re.findall(r'"([a-z0-9_-]+)', listed.group(1)))
    allowed = declared | BROUGHT_ALONG | {"lookahead"}
    assert _foreign(module) <= allowed | set().union(
        *(OPTIONAL[room] for room in OPTIONAL if _is_in(module.room, {room}))
    )


@every_module
def test_only_jitted_functions_go_without_annotations(module):
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        jitted = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        bare = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
        where = f"{module.name} line {node.lineno}: {node.name}"
        assert jitted or (not bare and node.returns is not None), f"{where} lacks annotations"


@pytest.mark.parametrize("path", _source_files("bench"), ids=lambda path: path.name)
def test_benchmarks_measure_the_library_not_its_command_line_or_its_tests(path):
    names = set(_imports(Module(f"bench.{path.stem}", path)))
    assert not any(_is_in(name, {"lookahead.cli", "tests"}) for name in names)


@pytest.mark.parametrize(
    "path",
    [path for folder in ("lookahead", "ngram", "kernels", "tests", "bench") for path in _source_files(folder)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_file_is_short_enough_to_read_in_one_sitting(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{lines} lines, at most {MAX_LINES}"


def test_the_kernels_folder_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


@every_module
def test_triton_is_loaded_by_nothing_but_a_kernel_that_was_chosen(module):
    heavy = {each.name for each in MODULES if "triton" in set(_imports(each, top_level_only=True))}
    assert "lookahead.kernels.tree_attention" in heavy
    if module.name not in heavy:
        assert not heavy & set(_imports(module, top_level_only=True))


def test_importing_the_library_loads_neither_the_command_line_nor_what_draws_it():
    script = (
        "import sys, torch, transformers\n"
        "before = set(sys.modules)\n"
        "import lookahead\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    loaded = run.stdout.split()
    assert "lookahead" in loaded
    assert not {"lookahead.cli", "lookahead.training", "typer", "rich"} & set(loaded)
