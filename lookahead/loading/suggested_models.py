"""Which model to take: the user's own default, models that fit a machine, and their download from the Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from lookahead.errors import UnsupportedModelError, first_line
from lookahead.loading.loading import DEFAULT_MODEL, HUB, NOT_ON_HUB, locate_model
from lookahead.utils.atomic import write_atomically

# Instruction models of the Hub that anybody may use (Apache-2.0), with their parameters in millions.
_CATALOG = {
    "HuggingFaceTB/SmolLM2-360M-Instruct": 362,
    "Qwen/Qwen2.5-0.5B-Instruct": 494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_544,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711,
    "HuggingFaceTB/SmolLM3-3B": 3_075,
    "Qwen/Qwen2.5-7B-Instruct": 7_616,
    "Qwen/Qwen2.5-14B-Instruct": 14_770,
    "Qwen/Qwen2.5-32B-Instruct": 32_764,
}
_BYTES = {"bf16": 2.0, "int4": 0.7}  # of a parameter; with int4 the output layer keeps 8 bits
_ROOM = 1.15  # for keys and values, the program, and what the system needs
_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model that fits a machine.

    Attributes:
        name: Its name on the Hub.
        parameters: Their number.
        dtype: `"bf16"`, or `"int4"` (`--quantize int4`) if it does not fit otherwise.
        bytes: Memory that it needs.
        tokens_per_s: An estimate: memory bandwidth over the bytes of the weights, which a plain pass reads once.
    """

    name: str
    parameters: int
    dtype: str
    bytes: int
    tokens_per_s: float


def suggestions(memory: int, bytes_per_s: float, *, is_cpu: bool) -> Iterator[Suggestion]:
    """The models that fit into `memory` bytes, small ones first.

    On a CPU the packed copy of bf16 weights counts too, if it takes at most a quarter of the memory; int4 is for a CPU.
    """
    for name, millions in _CATALOG.items():
        for dtype in ("bf16", "int4") if is_cpu else ("bf16",):
            weights = _BYTES[dtype] * millions * 1e6
            packed = weights if is_cpu and dtype == "bf16" and weights <= memory / 4 else 0
            needed = int(_ROOM * (weights + packed))
            if needed <= memory:
                yield Suggestion(name, millions * 1_000_000, dtype, needed, bytes_per_s / weights)
                break


def default_name() -> str:
    """The model of commands that name none: the user's choice, or the one that a package installs."""
    try:
        return _default_file().read_text("utf-8").strip() or DEFAULT_MODEL
    except (OSError, UnicodeDecodeError):
        return DEFAULT_MODEL


def choose_default(name: str) -> Path:
    """Make a model the default of commands; returns the file that says so.

    UnsupportedModelError if there is no such model, OSError if the file cannot be written.
    """
    location, is_local = locate_model(name)
    is_path = is_local and name != DEFAULT_MODEL and not name.startswith(HUB)
    file = _default_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, f"{Path(location).absolute() if is_path else name}\n")
    return file


def _default_file() -> Path:
    return user_config_path("lookahead", appauthor=False) / "default_model.txt"


def pull(name: str, announce: Callable[[str, int], None]) -> str:
    """Download a model of the Hub into its cache, or the rest of it; returns the path of its folder or GGUF file.

    The client of the Hub checks sizes only, so every file is compared with the checksum that the Hub has of it. A file
    that differs is removed.

    Args:
        name: `OWNER/NAME`, `hf://OWNER/NAME` or `hf://OWNER/NAME/FILE.gguf`.
        announce: Receives the licence and the size in bytes before the download.

    Raises:
        UnsupportedModelError: There is no such model, or it cannot be downloaded. What has arrived stays.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    owner, repository, file = (*name.removeprefix(HUB).split("/", 2), "", "")[:3]
    repository = f"{owner}/{repository}" if repository else owner
    with _download_errors(name, repository):
        about: Any = HfApi().model_info(repository, files_metadata=True, timeout=10.0)
        patterns = [file] if file else _FILES
        wanted = [file for file in about.siblings if any(map(Path(file.rfilename).match, patterns))]
        if not any(Path(file.rfilename).match(patterns[0]) for file in wanted):
            ggufs = ", ".join(file.rfilename for file in about.siblings if file.rfilename.endswith(".gguf")) or "none"
            raise UnsupportedModelError(f"model {repository!r} has no {patterns[0]}; its GGUF files: {ggufs}")
        licence = getattr(about.card_data, "license", None) or "not stated"
        announce(licence, sum(file.size or 0 for file in wanted))
        place = hf_hub_download(repository, file) if file else snapshot_download(repository, allow_patterns=[*_FILES])
    paths = {Path(place) if file else Path(place) / entry.rfilename: entry for entry in wanted}
    damaged = [path for path, entry in paths.items() if not _is_whole(path, entry)]
    for path in damaged:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise UnsupportedModelError(f"model {name!r}: {names} arrived damaged; the same command downloads it again")
    locate_model(name)
    return place


@contextmanager
def _download_errors(name: str, repository: str) -> Iterator[None]:
    """Turn the errors of the Hub's client and its HTTP library, which differ between versions, into one."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = f"{first_line(error).rstrip('.')}; the same command continues"
        if isinstance(error, GatedRepoError):
            reason = f"accept its licence at https://huggingface.co/{repository}, and log in with 'hf auth login'"
        elif isinstance(error, RepositoryNotFoundError):
            reason = NOT_ON_HUB
        raise UnsupportedModelError(f"model {name!r} cannot be downloaded: {reason}") from error


def _is_whole(path: Path, about: Any) -> bool:
    """Whether a file has the checksum that the Hub has: SHA-256 of large files, of others the one of git."""
    expected = about.lfs.sha256 if about.lfs else about.blob_id
    with path.open("rb") as file:
        hashed = hashlib.sha256() if about.lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        while part := file.read(1 << 20):
            hashed.update(part)
    return expected is None or hashed.hexdigest() == expected
