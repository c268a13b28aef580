"""Which model to take: the user's own default, models that fit a machine, and their download from the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from lookahead.errors import UnsupportedModelError, first_line
from lookahead.loading.loading import DEFAULT_MODEL, HUB, locate_model
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


def pull(name: str, announce: Callable[[str], None]) -> str:
    """Download a model of the Hub into its cache, or the rest of it; returns the path of its folder or GGUF file.

    Args:
        name: `OWNER/NAME`, `hf://OWNER/NAME` or `hf://OWNER/NAME/FILE.gguf`.
        announce: Receives a line with the licence and the size before the download.

    Raises:
        UnsupportedModelError: There is no such model, or it cannot be downloaded. What has arrived stays.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    owner, repository, file = (*name.removeprefix(HUB).split("/", 2), "", "")[:3]
    repository = f"{owner}/{repository}" if repository else owner
    try:
        about: Any = HfApi().model_info(repository, files_metadata=True, timeout=10.0)
        licence = getattr(about.card_data, "license", None) or "not stated"
        is_wanted = (lambda path: path == file) if file else (lambda path: any(map(Path(path).match, _FILES)))
        size = sum(each.size or 0 for each in about.siblings if is_wanted(each.rfilename))
        announce(f"{repository}: licence {licence}, {size / 1e9:,.1f} GB")
        if file:
            return hf_hub_download(repository, file)
        folder: str = snapshot_download(repository, allow_patterns=list(_FILES))
    except Exception as error:  # errors of the client and its HTTP library, which differ between versions
        what = f"model {name!r} cannot be downloaded: {first_line(error).rstrip('.')}; the same command continues"
        raise UnsupportedModelError(what) from error
    locate_model(name)
    return folder
