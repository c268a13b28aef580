"""Loading models and tokenizers: the bundled one, a folder, or a model of the Hub; remote code is never run."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lookahead.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUNDLED = "bundled"
BUNDLED_DIRECTORY = Path(__file__).resolve().parent / "bundled"

DTYPES = ("auto", "fp32", "bf16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class LoadedModel(NamedTuple):
    """A model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@functools.cache
def load_bundled() -> LoadedModel:
    """Load the summarizer that comes with the package, in fp32 on the CPU, once per process."""
    return load_model(BUNDLED, dtype="fp32", device="cpu")


def load_model(model: str = BUNDLED, *, dtype: str = "auto", device: str | None = None) -> LoadedModel:
    """Load a causal language model, or an encoder-decoder one, and its tokenizer, ready to generate.

    Args:
        model: `"bundled"`, the folder of a saved model, or a name on the Hugging Face Hub. What looks like a path
            is never looked for on the Hub.
        dtype: `"fp32"`, `"bf16"`, or `"auto"`: the checkpoint's own on a GPU and fp32 on a CPU.
        device: As PyTorch names it, such as `"cpu"` or `"cuda:1"`; `None` is a GPU if there is one.

    Raises:
        ConfigError: The dtype is not one of these, or the device does not exist.
        UnsupportedModelError: There is no such model, or it is not a language model that can be loaded.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be {', '.join(DTYPES)}, got {dtype!r}")
    location, is_local = locate_model(model)
    target = _device(device)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    chosen = dtypes.get(dtype, "auto" if target.type != "cpu" else torch.float32)
    options = {"local_files_only": is_local, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
        has_encoder = AutoConfig.from_pretrained(location, **options).is_encoder_decoder
        auto = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
        loaded = auto.from_pretrained(location, dtype=chosen, **options)
        loaded.to(target)  # type: ignore[arg-type]  # transformers wraps `to` without its self
    except Exception as error:
        # transformers, safetensors, tokenizers and the Hub client raise dozens of unrelated types here.
        raise UnsupportedModelError(f"model {model!r} cannot be loaded: {_first_line(error)}") from error
    return LoadedModel(loaded.eval(), tokenizer)


def load_tokenizer(model: str = BUNDLED) -> PreTrainedTokenizerBase:
    """Load a tokenizer alone.

    Args:
        model: As for `load_model`; a folder may also hold a tokenizer and no model.

    Raises:
        UnsupportedModelError: There is no such tokenizer, or it cannot be loaded.
    """
    location, is_local = locate_model(model, files=_TOKENIZER_FILES)
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location, local_files_only=is_local, trust_remote_code=False
        )
    except Exception as error:  # as unrelated as those of a model
        raise UnsupportedModelError(f"the tokenizer of {model!r} cannot be loaded: {_first_line(error)}") from error
    return tokenizer


def locate_model(model: str, files: Sequence[str] = ("config.json",)) -> tuple[str, bool]:
    """Where a model is, and whether that is a folder on this machine; torch is not imported for it.

    Args:
        model: As for `load_model`.
        files: A folder on this machine must hold one of these.

    Raises:
        UnsupportedModelError: It looks like a path and is no folder of a model, or the bundled one is missing.
    """
    bundled = model == BUNDLED and not Path(model).is_dir()
    path = BUNDLED_DIRECTORY if bundled else Path(model).expanduser()
    if path.is_dir() or bundled:
        if not any((path / file).is_file() for file in files):
            hint = "; the installation is incomplete, reinstall the package" if bundled else ""
            raise UnsupportedModelError(f"model {model!r}: no {' or '.join(files)} in the folder {path}{hint}")
        return str(path), True
    if path.exists():
        raise UnsupportedModelError(f"model {model!r} is a file; name the folder that holds its config.json")
    if _looks_like_a_path(model):
        raise UnsupportedModelError(f"model {model!r} does not exist: looked for the folder {path.absolute()}")
    return model, False


def prepare_process(threads: int | None) -> None:
    """Set the CPU threads, and keep transformers' warnings and bars out of a terminal that shows its own."""
    import torch
    from transformers.utils import logging

    if threads is not None:
        torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _looks_like_a_path(model: str) -> bool:
    """Whether a name that is no file here can only have meant one."""
    if model.startswith((".", "~")) or not _HUB_ID.fullmatch(model):
        return True
    # "models/summarizer" could be either; beside a folder "models" it is a typo in a path.
    return "/" in model and Path(model.split("/")[0]).is_dir()


def _device(name: str | None) -> torch.device:
    """The device to load to, checked to exist."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Allocating is the only check that also notices "cuda:7" on a machine with one GPU.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} is not available: {_first_line(error)}") from error
    return device


def _first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
