"""The house plan: who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lookahead
from lookahead.utils import seams

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

# The architecture, lowest floor first. A module imports from floors below its own and from its own folder.
FLOORS = (
    {"errors", "stats"},
    {"utils"},
    {"documents"},
    {"ngram", "kernels"},
    {"drafting"},
    {"config"},
    {"loading"},
    {"model"},
    {"verification"},
    {"backend"},
    {"proposers"},
    {"engine"},
    {"decoding"},
    {"plugins"},
    {"summarization"},
    {"lookahead"},  # the public names
    {"jobs", "serving"},
    {"reporting"},
    {"cli"},
    {"__main__"},
)
CORE = {"config", "drafting", "model", "loading", "verification", "backend", "proposers", "engine", "decoding"}
APPS = {"cli", "documents", "jobs", "reporting", "serving", "summarization"}
SHARED = {"errors", "stats", "utils"}
# What apps need of the engine beyond its public names.
OF_INNER_MODULES: dict[str, set[str]] = {
    "documents": set(),
    "jobs": set(),
    "reporting": set(),
    "cli": {
        "backend.cpu.product_choice", "backend.self_check", "config", "decoding.comparison", "decoding.diagnosis",
        "decoding.memory_building", "decoding.prompts", "decoding.session_file", "decoding.text_stream",
        "decoding.transcription", "loading.checkpoints", "loading.early_checks", "loading.loading",
        "loading.local_models", "loading.suggested_models", "loading.quantized", "ngram.memory_file", "ngram.pool_file",
        "plugins.grammar.grammar_text", "plugins.heads.training.train_heads", "plugins.heads.training.train_inputs",
        "proposers.memory_files", "proposers.pool_files",
    },
    "serving": {
        "config", "decoding.api", "decoding.cache_room", "decoding.plan", "decoding.prompts",
        "decoding.request", "decoding.scheduler", "decoding.text_pieces", "decoding.transcription",
        "decoding.validation", "engine.row", "loading.loading", "model.facts", "model.calls",
        "verification.rules",
    },
}  # fmt: skip
KNOW_TRANSFORMERS = {
    "serving",
    *CORE - {"config", "drafting"},
    *("plugins", "reporting", "jobs", "summarization"),
}
KNOW_THE_TERMINAL = {"cli", "__main__"}
# Packages of an extra, imported inside the function that needs them.
OPTIONAL = {
    "loading.gguf_files": {"gguf"},
    "loading.gguf_loading": {"gguf"},
    "loading.gguf_plan": {"gguf"},
    "documents.sound_files": {"soundfile", "soxr"},
    "kernels": {"triton"},
    "serving.media": {"PIL"},
    "serving": {"anyio", "fastapi", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"},
    "jobs.worker_pool": {"ray"},
    "plugins.grammar.grammar": {"llguidance"},
    "plugins.grammar.grammar_text": {"llguidance"},
}
BROUGHT_ALONG = {"tokenizers", "huggingface_hub", "llvmlite", "packaging"}  # by transformers and numba
FEW_PARAMETERS = 4  # a docstring says in a sentence what so many are; `Args:` describes more


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
    floors = [floor for floor, rooms in enumerate(FLOORS) if _is_in(room, rooms)]
    if not floors:
        pytest.fail(f"{room} has no floor: name it in FLOORS, or put its code where it belongs")
    return floors[0]


def _foreign(module: Module) -> set[str]:
    """Top-level names that a module imports from outside of the standard library."""
    return {name.partition(".")[0] for name in _imports(module)} - set(sys.stdlib_module_names)


def test_a_module_imports_only_from_its_own_folder_and_the_floors_below():
    offenders = [
        f"{module.name} must not import {name}"
        for module in MODULES
        for name in _imports(module)
        if name.partition(".")[0] == "lookahead" and not _is_in(name, {module.folder})
        if _floor(name.removeprefix("lookahead.")) >= _floor(module.room)
    ]
    assert not offenders


def test_what_apps_need_of_inner_modules_is_listed():
    """An app that needs more of them shows that the public names lack something."""
    found: dict[str, set[str]] = {room: set() for room in OF_INNER_MODULES}
    for module in MODULES:
        for name in _imports(module):
            inner, room = name.removeprefix("lookahead."), module.room.split(".")[0]
            if room in found and name != inner and not _is_in(inner, APPS | SHARED):
                found[room].add(inner)
    assert found == OF_INNER_MODULES


def test_apps_import_public_names_from_the_package():
    homes = {(f"lookahead.{home}", name) for name, home in lookahead._HOME.items() if not _is_in(home, SHARED)}
    nodes = [(each.name, node) for each in MODULES if _is_in(each.room, {*OF_INNER_MODULES}) for node in _from(each)]
    named = [(room, node.module, alias.name) for room, node in nodes for alias in node.names]
    assert not [(room, *name) for room, *name in named if tuple(name) in homes]


def _from(module: Module) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(module.tree) if isinstance(node, ast.ImportFrom)]


def test_the_core_names_no_plug_in():
    named = {
        module.name: sorted(set(re.findall(r"lookahead\.plugins[\w.]*", module.path.read_text(encoding="utf-8"))))
        for module in MODULES
        if _is_in(module.room, CORE)
    }
    assert not {name: plugins for name, plugins in named.items() if plugins}


def test_a_plug_in_that_lacks_a_method_of_its_seam_is_refused_when_it_is_registered():
    with pytest.raises(TypeError, match="HalfALoop cannot be"):
        seams.register("loop", "contrastive_search", type("HalfALoop", (), {"run": lambda self: iter(())}))
    assert seams.plugin_for("loop", "contrastive_search") is None
    with pytest.raises(ValueError, match="seam must be one of kind, loop"):
        seams.register("loops", "contrastive_search", object)


def test_the_core_does_not_ask_whether_a_model_has_an_encoder():
    """A configuration without a model is asked, and the model once; transformers has an argument of this name."""
    rooms = {"model.facts": 1, "model.calls": 1, "loading.checkpoints": 1, "cli.terminal": 1}
    found = {module.room: module.path.read_text(encoding="utf-8").count("is_encoder_decoder") for module in MODULES}
    assert {room: count for room, count in found.items() if count} == rooms


def test_every_plug_in_is_found_under_its_name():
    assert all(callable(seams.plugin_for(*key)) for key in seams._HOMES)


def test_only_the_rooms_that_know_a_model_import_transformers():
    strangers = [module for module in MODULES if not _is_in(module.room, KNOW_TRANSFORMERS)]
    assert not [module.name for module in strangers if {"transformers", "tokenizers"} & _foreign(module)]


def test_only_the_command_line_knows_the_terminal():
    strangers = [module for module in MODULES if not _is_in(module.room, KNOW_THE_TERMINAL)]
    assert not [module.name for module in strangers if {"typer", "click", "rich"} & _foreign(module)]


_LIGHT_UTILS = ("addresses", "atomic", "cache_folders", "cpu_features", "jit", "locks", "sources")
LIGHT = {f"lookahead.utils.{name}" for name in _LIGHT_UTILS}


def test_what_indexes_and_kernels_share_is_light():
    light = [module for module in MODULES if module.name in LIGHT]
    assert {module.name for module in light} == LIGHT
    allowed = {"numpy", "numba", "llvmlite", "xxhash", "filelock", "lookahead"}
    assert all(_foreign(module) <= allowed for module in light)
    assert all(name in LIGHT for module in light for name in _imports(module) if name.startswith("lookahead"))


def test_indexes_know_tokens_only():
    indexes = [module for module in MODULES if _is_in(module.room, {"ngram"})]
    assert indexes
    for module in indexes:
        assert _foreign(module) <= {"numpy", "numba", "xxhash", "lookahead"}, module.name
        own = {name for name in _imports(module) if "lookahead" in name} - LIGHT
        assert all(name.startswith("lookahead.ngram") for name in own), module.name


def test_kernels_know_tensors_only():
    kernels = [module for module in MODULES if _is_in(module.room, {"kernels"})]
    assert kernels
    for module in kernels:
        assert _foreign(module) <= {"torch", "triton", "numba", "llvmlite", "numpy", "lookahead"}, module.name
        own = {name for name in _imports(module) if "lookahead" in name} - LIGHT
        assert all(name.startswith("lookahead.kernels") for name in own), module.name


def test_kernels_that_need_triton_are_imported_where_they_are_used():
    of_triton = {module.name for module in MODULES if _is_in(module.room, {"kernels"}) and "triton" in _foreign(module)}
    assert of_triton
    for module in MODULES:
        if not _is_in(module.room, {"kernels"}):
            assert "triton" not in _foreign(module), module.name
        if module.name not in of_triton:
            assert not of_triton & set(_imports(module, top_level_only=True)), module.name


def test_every_import_is_a_declared_dependency():
    listed = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    declared = set(re.findall(r'"([a-z0-9_-]+)', listed.group(1))) | BROUGHT_ALONG | {"lookahead", "tomllib"}
    for module in MODULES:
        extras = set().union(*(OPTIONAL[room] for room in OPTIONAL if _is_in(module.room, {room})))
        assert _foreign(module) <= declared | extras, module.name


def test_only_jitted_functions_go_without_annotations():
    functions = [(module, node) for module in MODULES for node in ast.walk(module.tree)]
    bare = []
    for module, node in functions:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        untyped = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
        if untyped or node.returns is None:
            bare.append(f"{module.name} line {node.lineno}: {node.name}")
    assert not bare


def _public_functions(body: list[ast.stmt], bases: Sequence[ast.expr] = ()) -> Iterator[Any]:
    """Public functions of a module, and methods of its public classes, but for those of a documented base class."""
    for node in body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _public_functions(node.body, node.bases)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (ast.get_docstring(node) or not bases):
            yield node


def _undocumented(function: Any) -> list[str]:
    """The parameters that `Args:` lacks, if they are many, and the exceptions of the body that `Raises:` lacks."""
    if any("jit" in ast.unparse(decorator) for decorator in function.decorator_list):
        return []
    given = function.args
    parameters = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    names = [each.arg for each in parameters if each is not None and each.arg not in ("self", "cls")]
    if len(names) <= FEW_PARAMETERS:
        return []
    parts = re.split(r"^(\w+):\n", ast.get_docstring(function) or "", flags=re.M)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    entries = {title: re.findall(r"^    \*{0,2}(\w+):", text, re.M) for title, text in sections.items()}
    raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node.exc is not None]
    errors = {error.func.id for error in raised if isinstance(error, ast.Call) and isinstance(error.func, ast.Name)}
    errors = {name for name in errors if name[0].isupper()}  # else a function makes it
    lacking = [name for name in names if name not in entries.get("Args", ())]
    lacking += sorted(errors - set(entries.get("Raises", ())))
    return lacking + ["Raises"] * (bool(raised) and "Raises" not in sections)


def test_a_public_function_of_many_parameters_describes_each_and_what_it_raises():
    offenders = [
        f"{module.name} line {function.lineno}: {function.name} lacks {', '.join(lacking)}"
        for module in MODULES
        for function in _public_functions(module.tree.body)
        if (lacking := _undocumented(function))
    ]
    assert not offenders


def test_benchmarks_measure_the_library_not_its_command_line():
    for path in _source_files("bench"):
        names = set(_imports(Module(f"bench.{path.stem}", path)))
        assert not any(_is_in(name, {"lookahead.cli"}) for name in names), path.name


def test_a_file_is_short_enough_to_read_in_one_sitting():
    folders = ("lookahead", "ngram", "kernels", "tests", "bench", "tools")
    lines = {path: path.read_text(encoding="utf-8").count("\n") for folder in folders for path in _source_files(folder)}
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MAX_LINES}


def test_no_file_name_stands_for_two_things():
    names = Counter(module.path.stem for module in MODULES if not module.path.stem.startswith("__"))
    assert not [name for name, count in names.items() if count > 1]


def test_no_class_name_stands_for_two_things():
    names = Counter(node.name for module in MODULES for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_the_package_has_at_most_24_entries():
    entries = [path.name for path in (ROOT / "lookahead").iterdir() if not path.name.startswith("__pycache__")]
    assert len(entries) <= 24, sorted(entries)


def test_the_kernels_folder_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_triton_is_loaded_by_nothing_but_a_kernel_that_was_chosen():
    heavy = {each.name for each in MODULES if "triton" in set(_imports(each, top_level_only=True))}
    assert "lookahead.kernels.tree_attention" in heavy
    light = [module for module in MODULES if module.name not in heavy]
    assert not [module.name for module in light if heavy & set(_imports(module, top_level_only=True))]


def test_importing_the_library_loads_neither_the_command_line_nor_what_draws_it():
    script = "import sys\nbefore = set(sys.modules)\nimport lookahead\nprint(*sorted(set(sys.modules) - before))"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    loaded = run.stdout.split()
    assert "lookahead" in loaded
    assert not {"lookahead.cli.app", "lookahead.plugins.heads.training", "typer", "rich"} & set(loaded)


def test_every_folder_of_the_package_is_installed():
    listed = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    names = set(re.findall(r'"([a-z_.]+)"', listed.group(1))) - {"lookahead.kernels", "lookahead.ngram"}
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "lookahead").rglob("*.py") if path.resolve() == path}
    assert names == {".".join(folder.parts) for folder in folders}
