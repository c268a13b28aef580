"""What a user gets: built, installed and imported for real, with nothing downloaded.

With `--built FOLDER`, as in `make dist`, the sdist and the wheel are taken from that folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("lookahead", "ngram", "kernels")
SOURCE_FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
IMPORT_ALL_ROOMS = "import lookahead, lookahead.ngram.chains, lookahead.kernels; print(lookahead.__file__)"

# Stands in for the HuggingFace distribution `kernels`: every name is there, every decorator keeps its class.
FAKE_KERNELS = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name): return Anything()
    def __or__(self, other): return self
    def __call__(self, *args, **kwargs):
        return args[0] if args and isinstance(args[0], type) else self

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, fail with what it said, and return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build(kind: str, source: Path, out: Path) -> Path:
    """Build a `wheel` or an `sdist` with the setuptools at hand, and return the file."""
    out.mkdir(exist_ok=True)
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    return out / _run(sys.executable, "-c", script, cwd=source).split()[-1]


@dataclass(frozen=True)
class Environment:
    """A clean virtual environment that borrows the dependencies of this one, the package itself excepted."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        venv.create(folder, symlinks=True)
        borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
        return cls(folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, *arguments: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "--no-deps", "--no-index")
        _run(*pip, "--no-build-isolation", "--ignore-installed", "--no-compile", *arguments, cwd=self.folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what a build reads, so that it leaves nothing behind in the working tree."""
    copy = tmp_path_factory.mktemp("source")
    for folder in SOURCE_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    for file in SOURCE_FILES:
        shutil.copy(ROOT / file, copy / file)
    return copy


def _built(kind: str, request: pytest.FixtureRequest, source: Path, out: Path) -> Path:
    """The only `wheel` or `sdist` of the folder named by `--built`, or else a new one in `out`."""
    if (folder := request.config.getoption("--built")) is None:
        return _build(kind, source, out)
    (file,) = Path(folder).glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return file.resolve()


@pytest.fixture(scope="module")
def wheel(request, source, tmp_path_factory) -> Path:
    return _built("wheel", request, source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_from_sdist(request, source, tmp_path_factory) -> Path:
    """The wheel that pip makes where only the sdist is offered."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(_built("sdist", request, source, folder)) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return _build("wheel", unpacked, folder / "wheel")


@pytest.fixture(scope="module", params=["wheel", "wheel_from_sdist"])
def each_wheel(request) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    environment = Environment.create(tmp_path_factory.mktemp("installed"))
    environment.install(wheel)
    return environment


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_owns_the_name_lookahead_and_no_other(each_wheel):
    tops = {name.partition("/")[0] for name in _names(each_wheel)}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"lookahead"}
    assert len(info) == 1 and next(iter(info)).startswith("lookahead_decoding-")


def test_a_wheel_holds_every_file_of_the_package(each_wheel, source):
    rooms = [source / "lookahead", source / "lookahead" / "ngram", source / "lookahead" / "kernels"]
    files = {path for room in rooms for path in room.rglob("*") if path.is_file()}
    expected = {path.relative_to(source).as_posix() for path in files}
    packed = {name for name in _names(each_wheel) if name.startswith("lookahead/")}
    assert packed == expected


def test_a_checkout_with_text_files_in_place_of_links_builds_the_same_wheel(source, wheel, tmp_path):
    copy = tmp_path / "checkout"  # as git writes it on Windows
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "kernels", "ngram"))
    for folder in ("kernels", "ngram"):
        shutil.copytree(source / folder, copy / folder)
        (copy / "lookahead" / folder).write_text(f"../{folder}")
    assert _names(_build("wheel", copy, tmp_path / "wheel")) == _names(wheel)


def test_an_installed_package_satisfies_the_name_that_pages_install_extras_by(installed, tmp_path):
    pip = (sys.executable, "-m", "pip", "--python", installed.python, "install", "--no-deps", "--no-index")
    assert "already satisfied" in _run(*pip, "lookahead-decoding[gguf]", cwd=tmp_path)


def test_the_workflow_publishes_what_make_dist_checks_and_holds_no_secret():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text and "password" not in text
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "permissions" not in jobs["build"]
    assert any(step.get("run") == "make dist" for step in jobs["build"]["steps"])


def test_a_wheel_brings_its_types_and_its_licence_and_no_model(each_wheel):
    names = _names(each_wheel)
    assert "lookahead/py.typed" in names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert not any(name.endswith(".safetensors") for name in names)


def test_the_installed_package_imports_from_its_own_environment(installed, tmp_path):
    where = Path(_run(installed.python, "-c", IMPORT_ALL_ROOMS, cwd=tmp_path).strip())
    assert where.is_relative_to(installed.folder)


def test_the_installed_distribution_answers_for_one_import_name(installed, tmp_path):
    script = (
        "from importlib.metadata import packages_distributions as owners\n"
        "print([name for name, by in owners().items() if 'lookahead-decoding' in by])"
    )
    assert _run(installed.python, "-c", script, cwd=tmp_path).strip() == "['lookahead']"


def test_the_installed_command_answers(installed, tmp_path):
    assert "summarize" in _run(installed.folder / "bin" / "lookahead", "--help", cwd=tmp_path)


def test_an_editable_install_reads_the_working_tree(source, tmp_path):
    environment = Environment.create(tmp_path / "environment")
    environment.install("--editable", source)
    where = Path(_run(environment.python, "-c", IMPORT_ALL_ROOMS, cwd=tmp_path).strip())
    assert where == source / "lookahead" / "__init__.py"


def test_the_package_runs_from_the_root_of_the_repository_uninstalled(source, tmp_path):
    environment = Environment.create(tmp_path / "environment")
    where = Path(_run(environment.python, "-c", IMPORT_ALL_ROOMS, cwd=source).strip())
    assert where == source / "lookahead" / "__init__.py"


def test_transformers_finds_the_real_kernels_distribution_from_the_root(tmp_path):
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(FAKE_KERNELS)
    metadata = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    metadata.with_name("top_level.txt").write_text("kernels\n")
    script = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import kernels; print(is_kernels_available(), kernels.__file__)"
    )
    said = _run(sys.executable, "-c", script, cwd=ROOT, PYTHONPATH=str(tmp_path)).split()
    assert said == ["True", str(tmp_path / "kernels" / "__init__.py")]
